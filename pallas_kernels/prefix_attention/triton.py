"""Pallas-Triton kernel of `prefix_attention`: a tile of queries against the prefix, whose rows are split and merged.

Block sizes are those of `cached_attention` for as many rows of one head.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch, online
from pallas_kernels.cached_attention.blocks import BlockSizes, choose_block_sizes
from pallas_kernels.tiling import ceil_div, power_of_two


def _prefix_kernel(q_ref, k_ref, v_ref, start_ref, live_ref, *refs, scale: float, blocks: BlockSizes) -> None:
    """Attends one tile of queries to one split of the rows.

    q [B,K,Q,H]; k, v [B',S,K,H]; start [B]; live [1]; then rows [B,S] where there are any; then the results
    acc [B,C,1,K*Q,H], top and total [B,C,1,K*Q].
    """
    *listed, acc_ref, top_ref, total_ref = refs
    queries, head_dim = q_ref.shape[2:]
    capacity = k_ref.shape[1]
    tiles = ceil_div(queries, blocks.rows)
    kv_head, tile = pl.program_id(0) // tiles, pl.program_id(0) % tiles
    split, batch = pl.program_id(1), pl.program_id(2)

    query = tile * blocks.rows + jnp.arange(blocks.rows, dtype=jnp.int32)
    in_tile = query < queries
    column = jnp.arange(power_of_two(head_dim, 16), dtype=jnp.int32)
    in_head = column < head_dim
    where = in_tile[:, None] & in_head[None, :]
    q = pltriton.load(q_ref.at[batch, kv_head, query[:, None], column[None, :]], mask=where, other=0.0)
    start = start_ref[batch]
    length = jnp.int32(capacity) if listed else jnp.clip(start, 0, capacity)
    steps = jnp.where(tile * blocks.rows < live_ref[0], pl.cdiv(length, blocks.block_s), 0)
    begin, end = steps * split // blocks.num_splits, steps * (split + 1) // blocks.num_splits
    base_two = scale * math.log2(math.e)

    def attend(step, state, masked):
        row = step * blocks.block_s + jnp.arange(blocks.block_s, dtype=jnp.int32)
        seen = row < length
        if listed:
            original = pltriton.load(listed[0].at[batch, row], mask=seen, other=-1)
            seen = (original >= 0) & (original < start)
        mask = seen[:, None] if masked else None
        if head_dim != column.size:
            mask = in_head[None, :] if mask is None else mask & in_head[None, :]

        def load(ref):
            at = ref.at[batch, row[:, None], kv_head, column[None, :]]
            return pltriton.load(at, mask=mask, other=None if mask is None else 0.0)

        logits = pltriton.dot(q, load(k_ref), trans_b=True, allow_tf32=False) * base_two
        if masked:
            logits = jnp.where(seen[None, :], logits, -jnp.inf)
        return online.update(state, logits, lambda: load(v_ref))

    state = online.initial(blocks.rows, column.size)
    if not listed:
        middle = jnp.clip(length // blocks.block_s, begin, end)
        state = jax.lax.fori_loop(begin, middle, functools.partial(attend, masked=False), state)
        begin = middle
    acc, top, total = jax.lax.fori_loop(begin, end, functools.partial(attend, masked=True), state)
    # Padding keeps an index past the end: interpret mode drops such stores, the GPU masks them. It may be the next kv
    # head's, so that one is out of bounds for all of them.
    head = jnp.where(in_tile, kv_head * queries + query, acc_ref.shape[3])
    pltriton.store(acc_ref.at[batch, split, 0, head[:, None], column[None, :]], acc, mask=where)
    pltriton.store(top_ref.at[batch, split, 0, head], top, mask=in_tile)
    pltriton.store(total_ref.at[batch, split, 0, head], total, mask=in_tile)


@dispatch.shared("scale", "interpret")
def prefix_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    live: jax.Array,
    *,
    scale: float,
    rows: jax.Array | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See the public op."""
    batch, kv_heads, queries, head_dim = q.shape
    if head_dim > 256:
        raise ValueError(f"q has head dim {head_dim}; the kernel allows at most 256 (backend 'xla' has no bound)")
    blocks = choose_block_sizes(batch, queries, kv_heads, 1, k.shape[1], head_dim, q.dtype)
    # as one query of K * Q heads, which is how the merge knows them
    parts = (batch, blocks.num_splits, 1, kv_heads * queries)
    acc, top, total = pl.pallas_call(
        functools.partial(_prefix_kernel, scale=scale, blocks=blocks),
        out_shape=[
            jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32),
            *[jax.ShapeDtypeStruct(parts, jnp.float32)] * 2,
        ],
        grid=(kv_heads * ceil_div(queries, blocks.rows), blocks.num_splits, batch),
        compiler_params=pltriton.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="prefix_attention",
    )(q, k, v, start, jnp.reshape(live, 1).astype(jnp.int32), *([] if rows is None else [rows]))
    name = "prefix_attention_merge"
    out, lse = online.merge(acc, top, total, jnp.float32, want_lse=True, interpret=interpret, name=name)
    lse = jnp.where(lse == jnp.inf, -jnp.inf, lse) * math.log(2)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])
