"""Pallas-Triton kernels of `attention_scores`.

Three launches: weights relative to each step's largest logit (see `row_weights`), with running sums; the log-sum-exp of
the splits; the normalised sum.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch, online, row_weights
from pallas_kernels.attention_scores.blocks import BlockSizes, choose_block_sizes
from pallas_kernels.tiling import power_of_two


def head_table(heads: tuple[int, ...], group: int) -> np.ndarray:
    """int32 [K', P]: the chosen query heads of each kv head that has any, padded with -1."""
    kv_heads = sorted({head // group for head in heads})
    readers = [[head for head in heads if head // group == kv_head] for kv_head in kv_heads]
    most = max(map(len, readers))
    return np.array([row + [-1] * (most - len(row)) for row in readers], np.int32)


def _weights_kernel(
    q_ref,
    k_ref,
    q_pos_ref,
    table_ref,
    weights_ref,
    step_top_ref,
    top_ref,
    total_ref,
    *,
    scale: float,
    blocks: BlockSizes,
    keys_first: bool,
) -> None:
    """Weights of one chosen kv head over one split of the cache.

    q [B,R,N,H]; k [B,S,K,H]; q_pos [B,R]; table [K',P] -> weights and step_top as in `row_weights.shapes`, and top and
    total [B,C,K',c] of C splits, where column r * P + p is query r and the kv head's p-th chosen head.
    """
    num_queries, heads, head_dim = q_ref.shape[1:]
    capacity, kv_heads = k_ref.shape[1:3]
    per_head, columns = table_ref.shape[1], top_ref.shape[3]
    chosen, split, batch = (pl.program_id(axis) for axis in range(3))
    kv_head = table_ref[chosen, 0] // (heads // kv_heads)
    dim = jnp.arange(power_of_two(head_dim, 16), dtype=jnp.int32)
    in_head = (dim < head_dim)[None, :]

    chunk = row_weights.column_chunk(columns, keys_first, k_ref.dtype.itemsize)
    tiles, sums = [], []
    for begin in range(0, columns, chunk):
        column = begin + jnp.arange(chunk, dtype=jnp.int32)
        query = jnp.minimum(column // per_head, num_queries - 1)
        head = pltriton.load(table_ref.at[chosen, column % per_head])
        there = (column < num_queries * per_head) & (head >= 0)
        at = q_ref.at[batch, query[:, None], jnp.maximum(head, 0)[:, None], dim[None, :]]
        queries = pltriton.load(at, mask=there[:, None] & in_head, other=0.0)
        position = jnp.where(there, pltriton.load(q_pos_ref.at[batch, query]), -1)
        tiles.append((column, queries, position))
        sums.append((jnp.full((chunk,), online.LOWEST, jnp.float32), jnp.zeros((chunk,), jnp.float32)))

    # Another split than this one may hold the rows of a chunk's last position: all chunks take the same steps.
    slot = jnp.arange(power_of_two(num_queries), dtype=jnp.int32)
    last = jnp.max(pltriton.load(q_pos_ref.at[batch, slot], mask=slot < num_queries, other=-1))
    length = jnp.clip(last + 1, 0, capacity)
    steps = pl.cdiv(length, blocks.block_s)
    begin = steps * split // blocks.num_splits
    end = steps * (split + 1) // blocks.num_splits

    def step_weights(step, sums):
        row = step * blocks.block_s + jnp.arange(blocks.block_s, dtype=jnp.int32)
        # Rows past the length are not even read: they may hold NaN, and the capacity may end inside the step.
        at = k_ref.at[batch, row[:, None], kv_head, dim[None, :]]
        k = pltriton.load(at, mask=(row[:, None] < length) & in_head, other=0.0)
        new_sums = []
        for (column, queries, position), (top, total) in zip(tiles, sums, strict=True):
            weights, step_top = row_weights.weigh(queries, position, k, row, scale * math.log2(math.e), keys_first)
            index = (batch, step, chosen)
            row_weights.store_step(weights_ref, step_top_ref, index, column, weights, step_top, keys_first, None)
            new_top = jnp.maximum(top, step_top)
            added = jnp.sum(weights, axis=0 if keys_first else 1)
            total = total * jnp.exp2(top - new_top) + added * jnp.exp2(step_top - new_top)
            new_sums.append((new_top, total))
        return new_sums

    sums = jax.lax.fori_loop(begin, end, step_weights, sums)
    for (column, _, _), (top, total) in zip(tiles, sums, strict=True):
        pltriton.store(top_ref.at[batch, split, chosen, column], top)
        pltriton.store(total_ref.at[batch, split, chosen, column], total)


def _lse_kernel(top_ref, total_ref, lse_ref) -> None:
    """Merges the splits: top, total [B,C,K',c] -> base-2 log-sum-exp [B,K',c], +inf where a column saw nothing."""
    chosen, batch = pl.program_id(0), pl.program_id(1)
    splits, columns = top_ref.shape[1], top_ref.shape[3]
    chunk = min(16, columns)
    split = jnp.arange(power_of_two(splits), dtype=jnp.int32)[:, None]
    for begin in range(0, columns, chunk):
        column = begin + jnp.arange(chunk, dtype=jnp.int32)
        index = (batch, split, chosen, column[None, :])
        mask = jnp.broadcast_to(split < splits, (split.size, chunk))
        tops = pltriton.load(top_ref.at[index], mask=mask, other=online.LOWEST)
        totals = pltriton.load(total_ref.at[index], mask=mask, other=0.0)
        top = jnp.max(tops, axis=0)
        total = jnp.sum(totals * jnp.exp2(tops - top[None, :]), axis=0)
        seen = total > 0.0
        lse = jnp.where(seen, top + jnp.log2(jnp.where(seen, total, 1.0)), jnp.inf)
        pltriton.store(lse_ref.at[batch, chosen, column], lse)


def _load_lse(lse_ref, batch, kv_head, column, mask):
    return pltriton.load(lse_ref.at[batch, kv_head, column], mask=mask, other=0.0)


@dispatch.shared("heads", "scale", "interpret", "blocks")
def attention_scores(
    q: jax.Array,
    k: jax.Array,
    q_pos: jax.Array,
    length: jax.Array,
    heads: tuple[int, ...],
    *,
    scale: float,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
) -> jax.Array:
    """See the public op; `blocks` overrides the choice for measurements."""
    batch, num_queries, num_heads, head_dim = q.shape
    capacity, kv_heads = k.shape[1:3]
    if head_dim > 256:
        raise ValueError(f"q has head dim {head_dim}; the kernel allows at most 256 (backend 'xla' has no bound)")
    table = head_table(heads, num_heads // kv_heads)
    chosen, per_head = table.shape
    keys_first = k.dtype.itemsize == 2
    columns = power_of_two(num_queries * per_head, 16)
    blocks = blocks or choose_block_sizes(batch, chosen, capacity, head_dim, columns, k.dtype)
    stored = row_weights.shapes(batch, capacity, chosen, columns, blocks.block_s, keys_first, k.dtype)
    part = jax.ShapeDtypeStruct((batch, blocks.num_splits, chosen, columns), jnp.float32)
    weights, step_top, top, total = pl.pallas_call(
        functools.partial(_weights_kernel, scale=scale, blocks=blocks, keys_first=keys_first),
        out_shape=(stored["weights"], stored["step_top"], part, part),
        grid=(chosen, blocks.num_splits, batch),
        compiler_params=pltriton.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="attention_scores",
    )(q, k, q_pos, jnp.asarray(table))
    lse = pl.pallas_call(
        _lse_kernel,
        out_shape=jax.ShapeDtypeStruct((batch, chosen, columns), jnp.float32),
        grid=(chosen, batch),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="attention_scores_lse",
    )(top, total)
    scores = row_weights.sum_weights(
        weights,
        step_top,
        jnp.max(q_pos, axis=1) + 1,
        length,
        (lse,),
        _load_lse,
        capacity=capacity,
        keys_first=keys_first,
        used=num_queries * per_head,
        num_out=1,
        factor=1.0 / (num_queries * len(heads)),
        interpret=interpret,
        name="attention_scores_sum",
    )
    return scores[:, 0]
