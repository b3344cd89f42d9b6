"""Block sizes of the `attention_scores` kernel: a pure function of the shapes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.tiling import (
    OTHER_SHARED_MEMORY,
    SHARED_MEMORY,
    ceil_div,
    choose_splits,
    power_of_two,
    resident_programs,
)


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


def choose_block_sizes(
    batch: int, kv_heads: int, capacity: int, head_dim: int, columns: int, dtype: jnp.dtype
) -> BlockSizes:
    """Returns the block sizes for `kv_heads` chosen heads of a cache [B,S,K,H], each with `columns` query rows.

    Raises:
      ValueError: the query rows of a kv head do not fit the shared memory.
    """
    itemsize, width = jnp.dtype(dtype).itemsize, power_of_two(head_dim, 16)
    block_s, num_stages = (32, 2) if itemsize == 4 else (64, 4)
    # 16-bit queries stay in shared memory beside the tiles of keys.
    queries = columns * width * itemsize if itemsize == 2 else 0
    tile = block_s * width * itemsize
    while num_stages > 2 and queries + num_stages * tile + OTHER_SHARED_MEMORY > SHARED_MEMORY:
        num_stages -= 1
    if queries + num_stages * tile + OTHER_SHARED_MEMORY > SHARED_MEMORY:
        most = (SHARED_MEMORY - OTHER_SHARED_MEMORY - num_stages * tile) // (width * itemsize)
        raise ValueError(
            f"{columns} query rows of one kv head, a power of two of queries x heads, with head dim {head_dim}; the "
            f"kernel allows {most} (backend 'xla' has no bound)"
        )
    resident = resident_programs(queries + num_stages * tile, most=3)
    num_splits = choose_splits(batch * kv_heads, ceil_div(capacity, block_s), resident)
    return BlockSizes(block_s, num_splits, num_stages=num_stages)
