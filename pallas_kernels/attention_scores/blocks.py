"""Block sizes of the `attention_scores` kernel: a pure function of the shapes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.tiling import ceil_div, choose_splits, power_of_two, resident_programs


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """How the work of one call is cut.

    Attributes:
      block_s: cache rows per step, a power of two.
      num_splits: programs that share the cache rows of one (batch row, kv head).
      num_warps: warps per program.
      num_stages: depth of the load pipeline.
    """

    block_s: int
    num_splits: int
    num_warps: int = 4
    num_stages: int = 3


def choose_block_sizes(batch: int, kv_heads: int, capacity: int, head_dim: int, dtype: jnp.dtype) -> BlockSizes:
    """Returns the block sizes for `kv_heads` chosen heads of a cache [B,S,K,H]."""
    itemsize = jnp.dtype(dtype).itemsize
    block_s, num_stages = (32, 2) if itemsize == 4 else (64, 4)
    tile_bytes = num_stages * block_s * power_of_two(head_dim, 16) * itemsize
    resident = resident_programs(tile_bytes, most=3)
    num_splits = choose_splits(batch * kv_heads, ceil_div(capacity, block_s), resident)
    return BlockSizes(block_s, num_splits, num_stages=num_stages)
