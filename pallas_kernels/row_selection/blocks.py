"""Design and block sizes of the `row_selection` kernels: a pure function of the shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Literal

import jax.numpy as jnp

from pallas_kernels.row_selection import keys
from pallas_kernels.tiling import MULTIPROCESSORS, power_of_two

MAX_RADIX_SIZE = 1 << 20


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """How the work of one call is cut.

    Attributes:
      design: the module. `resident` and, for bfloat16, `gather` take one program per row, whose tile is a whole row;
        `spread` and, for bfloat16, `radix` take one per tile and digit.
      tile: scores per program, a power of two.
      num_warps: warps per program.
      depth: elements of a tile that `spread` adds up in a 4-bit counter, at most 8.
    """

    design: Literal["resident", "gather", "spread", "radix"]
    tile: int
    num_warps: int
    depth: int = 4


def choose_block_sizes(num_rows: int, size: int, dtype: jnp.dtype, unavailable: Collection[str] = ()) -> BlockSizes:
    """Returns the block sizes for scores [R,S], of a design that is not `unavailable`.

    Times are of one H200, k = 5% of bfloat16 scores, or 512 at [16, 32768].
    """
    designs = {"gather", "radix"} - set(unavailable) if jnp.dtype(dtype) == jnp.bfloat16 else set()
    tile = power_of_two(size, 256)
    # `gather` and `radix` have not been measured on rows this short.
    if size <= 8192:
        return BlockSizes("resident", tile, num_warps=max(1, min(16, tile // 1024)))
    if "gather" in designs and size <= keys.MAX_TILE:
        # [448, 32768]: 57 us, `resident` 113. With 16 warps two rows share the registers of a multiprocessor.
        # [16, 32768]: 14.9 us with 32 warps, `spread` 15.4. Every row has a multiprocessor to itself.
        return BlockSizes("gather", tile, num_warps=16 if num_rows > MULTIPROCESSORS else 32)
    if "radix" in designs and keys.MAX_TILE < size <= MAX_RADIX_SIZE:
        # [36, 131072]: 30.5 us, with tiles of 16384 33.2, `spread` 53.7. Every program loads 256 counts of each tile of
        # its row, hence fewer tiles in the longest rows.
        return BlockSizes("radix", tile=8192 if size <= 32 * 8192 else 16384, num_warps=8)
    if size <= keys.MAX_TILE and num_rows >= 64:
        return BlockSizes("resident", tile, num_warps=16)
    # 128-bit loads of bfloat16: 8 scores of each of the `depth` rows per thread.
    return BlockSizes("spread", tile=4096, num_warps=4)
