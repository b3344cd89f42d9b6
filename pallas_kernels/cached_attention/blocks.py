"""Block sizes of the `cached_attention` kernels: a pure function of the shapes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.tiling import attention_tile, ceil_div, choose_splits, power_of_two, resident_programs


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """How the work of one call is cut.

    Attributes:
      rows: (query, head) pairs of one kv head that share a tile, a power of two.
      block_s: cache rows per step, a power of two.
      num_splits: programs that share the cache rows of one (batch row, kv head, row tile).
      num_warps: warps per program.
      num_stages: depth of the load pipeline.
      split_tail: run the steps that need no causal mask in a loop of their own.
      stream: mark keys and values as first to leave the L2 cache.
    """

    rows: int
    block_s: int
    num_splits: int
    num_warps: int = 4
    num_stages: int = 3
    split_tail: bool = False
    stream: bool = False


def choose_block_sizes(
    batch: int, num_rows: int, kv_heads: int, group: int, capacity: int, head_dim: int, dtype: jnp.dtype
) -> BlockSizes:
    """Returns the block sizes for q [B,T,K*G,H] over a cache [B,S,K,H]."""
    width = power_of_two(head_dim, 16)
    itemsize = jnp.dtype(dtype).itemsize
    packed = power_of_two(num_rows * group, 16)
    rows, block_s, num_warps, num_stages = attention_tile(packed, width, itemsize)
    programs = batch * kv_heads * ceil_div(num_rows * group, rows)
    resident = resident_programs(2 * num_stages * block_s * width * itemsize)
    num_splits = choose_splits(programs, ceil_div(capacity, block_s), resident)
    return BlockSizes(rows, block_s, num_splits, num_warps, num_stages, split_tail=num_splits == 1)
