"""Block sizes of the `skinny_matmul` kernels: a pure function of the shapes."""

from __future__ import annotations

import dataclasses

from pallas_kernels.tiling import ceil_div, power_of_two


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """How the work of one call is cut.

    Attributes:
      rows: rows of x in a tile, all of them, a power of two.
      block_n: columns of the weight per program, a power of two.
      block_k: rows of the weight per step, a power of two.
      num_splits: programs that share the rows of the weight behind one tile of columns.
      num_warps: warps per program.
      num_stages: depth of the load pipeline.
    """

    rows: int
    block_n: int
    block_k: int
    num_splits: int
    num_warps: int = 4
    num_stages: int = 4


def choose_block_sizes(num_rows: int, depth: int, columns: int, *, gated: bool = False) -> BlockSizes:
    """Returns the block sizes for x [R,D] and a weight of `columns` columns [D,N], or [D,2,N] when gated."""
    rows = power_of_two(num_rows, 16)
    if gated:
        return BlockSizes(rows, 64, 64, 1)
    tiles, steps = ceil_div(columns, 64), ceil_div(depth, 64)
    return BlockSizes(rows, 64, 64, max(1, min(8, steps // 3, ceil_div(264, tiles))))
