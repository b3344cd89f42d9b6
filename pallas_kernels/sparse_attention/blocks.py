"""Block sizes of the `sparse_attention` kernel: a pure function of the shapes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.tiling import (
    MULTIPROCESSORS,
    attention_tile,
    ceil_div,
    choose_splits,
    power_of_two,
    resident_programs,
)


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
    itemsize = jnp.dtype(dtype).itemsize
    packed = power_of_two(num_rows * group, 16)
    rows, block_m, num_warps, num_stages = attention_tile(packed, width, itemsize)
    programs = batch * kv_heads * ceil_div(num_rows * group, rows)
    resident = resident_programs(2 * num_stages * block_m * width * itemsize)
    steps = ceil_div(listed + window, block_m)
    if num_rows == 1 and itemsize == 2 and width <= 128 and rows <= 32:
        if programs * steps <= 3 * MULTIPROCESSORS:
            return BlockSizes(rows, block_m, steps, 2 if width == 64 else num_warps, num_stages)
        # One program per multiprocessor with twice the rows a step hides as much as two do, and leaves fewer parts.
        num_splits = MULTIPROCESSORS // programs
        if num_splits and steps >= 6 * num_splits:
            return BlockSizes(rows, 2 * block_m, num_splits, num_warps, num_stages)
    # A step waits for a gather of far rows, so that it costs about as much as a merge. Single steps pay where all of
    # them run at once: 3.9 us instead of 5.7 for 287 rows at batch 1, but 11 instead of 10 for 512 at batch 16.
    least_steps = 1 if programs * steps <= resident else 2
    num_splits = choose_splits(programs, steps, resident, merge_steps=1.0, least_steps=least_steps)
    return BlockSizes(rows, block_m, num_splits, num_warps, num_stages)
