"""Block sizes of the `skinny_matmul` kernels: a pure function of the shapes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

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


def choose_block_sizes(num_rows: int, depth: int, dtype: jnp.dtype, *, gated: bool = False) -> BlockSizes:
    """Returns the block sizes for x [R,D] of `dtype` and a weight [D,N], or [D,2,N] when gated."""
    rows = power_of_two(num_rows, 16)
    if jnp.dtype(dtype).itemsize == 4:
        # IEEE float32 products have no tensor-core path; both operands then sit in registers.
        block_n, block_k, splits, num_warps, num_stages = 32, 32, 4, 4 if rows <= 32 else 8, 2
    elif gated:
        block_n, block_k, splits, num_warps, num_stages = 64, 64, 1, 4, 4 if rows == 16 else 5
    elif depth <= 4096:
        block_n, block_k, splits, num_warps, num_stages = 64, 128, 4, 4, 3
    else:
        block_n, block_k, splits, num_warps, num_stages = 64, 128, 5, 4, 4
    splits = 1 if gated else min(splits, ceil_div(depth, block_k))
    return BlockSizes(rows, block_n, block_k, splits, num_warps, num_stages)
