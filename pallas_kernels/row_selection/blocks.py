"""Block sizes of the `row_selection` kernels: a pure function of the shapes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.row_selection import keys
from pallas_kernels.tiling import power_of_two


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """How the work of one call is cut.

    Attributes:
      resident: one program per row, instead of one per tile and digit.
      tile: scores per program, a power of two.
      num_warps: warps per program.
      depth: elements of a tile that the spread design adds up in a 4-bit counter, at most 8.
    """

    resident: bool
    tile: int
    num_warps: int
    depth: int = 4


def choose_block_sizes(num_rows: int, size: int, dtype: jnp.dtype) -> BlockSizes:
    """Returns the block sizes for scores [R,S]."""
    del dtype
    if size <= keys.MAX_TILE and (size <= 8192 or num_rows >= 64):
        tile = power_of_two(size, 256)
        return BlockSizes(True, tile, num_warps=max(1, min(16, tile // 1024)))
    # 128-bit loads of bfloat16: 8 scores of each of the `depth` rows per thread.
    return BlockSizes(False, tile=4096, num_warps=4)
