"""Block sizes of the `sparse_attention` kernel: a pure function of the shapes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.tiling import ceil_div, choose_splits, power_of_two, resident_programs


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """How the work of one call is cut.

    Attributes:
      rows: (query, head) pairs of one kv head that share a tile, a power of two.
      block_m: listed rows per step, a power of two.
      num_splits: programs that share the listed rows of one (batch row, kv head, row tile).
      num_warps: warps per program.
      num_stages: depth of the load pipeline.
    """

    rows: int
    block_m: int
    num_splits: int
    num_warps: int = 4
    num_stages: int = 3


def choose_block_sizes(
    batch: int, num_rows: int, kv_heads: int, group: int, listed: int, window: int, head_dim: int, dtype: jnp.dtype
) -> BlockSizes:
    """Returns the block sizes for q [B,T,K*G,H], `listed` rows and a recent window."""
    width = power_of_two(head_dim, 16)
    packed = power_of_two(num_rows * group, 16)
    itemsize = jnp.dtype(dtype).itemsize
    if itemsize == 4:
        # IEEE float32 products have no tensor-core path; both operands then sit in registers, and larger tiles spill.
        rows, block_m, num_warps = (min(packed, 32), 32, 4) if width <= 64 else (16, 16, 4 if width <= 128 else 8)
        num_stages = 2
    elif width > 128:
        # Two warp groups share the columns of 64 rows: the output of more does not fit the registers.
        rows, block_m, num_warps, num_stages = min(packed, 64), 64, 8 if packed >= 32 else 4, 2
    else:
        rows, block_m, num_stages = min(packed, 128), 64, 3
        num_warps = 8 if rows == 128 else 4
    programs = batch * kv_heads * ceil_div(num_rows * group, rows)
    resident = resident_programs(2 * num_stages * block_m * width * itemsize)
    steps = ceil_div(listed + window, block_m)
    # A step waits for a gather of far rows, so that it costs about as much as a merge. Single steps pay where all of
    # them run at once: 3.9 us instead of 5.7 for 287 rows at batch 1, but 11 instead of 10 for 512 at batch 16.
    least_steps = 1 if programs * steps <= resident else 2
    num_splits = choose_splits(programs, steps, resident, merge_steps=1.0, least_steps=least_steps)
    return BlockSizes(rows, block_m, num_splits, num_warps, num_stages)
