"""Block sizes of the `row_selection` kernels: a pure function of the shapes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.row_selection import digits
from pallas_kernels.tiling import power_of_two


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """How the work of one call is cut.

    Attributes:
      resident: one program per row, instead of one per tile and digit.
      depth: elements of a tile that one thread adds up in a 4-bit counter.
      lanes: the other size of a tile, a power of two; depth * lanes elements.
      num_warps: warps per program.
    """

    resident: bool
    depth: int
    lanes: int
    num_warps: int


def choose_block_sizes(num_rows: int, size: int, dtype: jnp.dtype) -> BlockSizes:
    """Returns the block sizes for scores [R,S]."""
    if size <= digits.MAX_TILE and (size <= 8192 or num_rows >= 64):
        depth = digits.MAX_DEPTH if size > 16384 else 4
        lanes = power_of_two(-(-size // depth), 128)
        return BlockSizes(True, depth, lanes, num_warps=max(1, min(16, lanes // 256)))
    # 128-bit loads of bfloat16: 8 lanes per thread.
    return BlockSizes(False, depth=4, lanes=1024, num_warps=4)
