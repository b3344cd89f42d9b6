"""Block sizes of the `cached_attention` kernels: a pure function of the shapes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

MULTIPROCESSORS = 132


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
      sum_logits: add the parts of the aggregated logit in the kernel instead of storing each.
    """

    rows: int
    block_s: int
    num_splits: int
    num_warps: int = 4
    num_stages: int = 3
    split_tail: bool = False
    sum_logits: bool = True


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int, at_least: int = 1) -> int:
    """Returns the smallest power of two that is at least `n` and `at_least`."""
    return max(at_least, 1 << (n - 1).bit_length())


def choose_block_sizes(
    batch: int, num_rows: int, kv_heads: int, group: int, capacity: int, head_dim: int, dtype: jnp.dtype
) -> BlockSizes:
    """Returns the block sizes for q [B,T,K*G,H] over a cache [B,S,K,H]."""
    width = power_of_two(head_dim, 16)
    packed = power_of_two(num_rows * group, 16)
    if jnp.dtype(dtype).itemsize == 4:
        # IEEE float32 products have no tensor-core path; both operands then sit in registers.
        rows, block_s, num_warps, num_stages = min(packed, 32), 32, 4, 2
    elif packed <= 64:
        rows, block_s, num_warps, num_stages = packed, 64, 4, 3 if width <= 128 else 2
    else:
        # Two warp groups of 64 rows each.
        rows, block_s, num_warps, num_stages = 128, 64, 8, 3 if width <= 128 else 2
    row_tiles = ceil_div(num_rows * group, rows)
    programs = batch * kv_heads * row_tiles
    steps = ceil_div(capacity, block_s)
    # Two programs per multiprocessor hide each other's latency; a program with fewer than two steps is all overhead.
    num_splits = max(1, min(ceil_div(2 * MULTIPROCESSORS, programs), steps // 2))
    return BlockSizes(rows, block_s, num_splits, num_warps, num_stages, split_tail=num_splits == 1)
