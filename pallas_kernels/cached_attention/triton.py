"""Pallas-Triton kernel of `cached_attention`: split over cache rows, with scores as a by-product.

One program owns `rows` (query, head) pairs of one kv head, so that each key and value is loaded once for the whole
group and all queries. Softmax works in base 2: the factor log2(e) is folded into the scale.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.cached_attention import scores as scoring
from pallas_kernels.cached_attention.blocks import BlockSizes, ceil_div, choose_block_sizes, power_of_two

LOWEST = float(jnp.finfo(jnp.float32).min)
# Up to this many queries the scored ones are taken from the attention pass itself.
SCORED_IN_PASS = 16


def _attention_kernel(refs: scoring.Refs, *, scale: float, shape: tuple[int, ...], blocks: BlockSizes) -> None:
    """Attends one row tile to one split of the cache.

    refs.start [B]; refs.order [B,T] or None; refs.q [B,T,N,H]; refs.k, refs.v [B,S,K,H]. The results are
    refs.out [B,T,N,H] and refs.lse [B,T,N] with one split, else refs.acc [B,C,T,N,H], refs.top and refs.total [B,C,T,N]
    for C splits.
    """
    num_rows, group, capacity, head_dim = shape
    row_tiles = ceil_div(num_rows * group, blocks.rows)
    batch, split = pl.program_id(2), pl.program_id(1)
    kv_head = pl.program_id(0) // row_tiles
    # Later rows see more of the cache: start the long programs first.
    row_tile = row_tiles - 1 - pl.program_id(0) % row_tiles

    tile_row = row_tile * blocks.rows + jnp.arange(blocks.rows, dtype=jnp.int32)
    slot = tile_row // group
    head = kv_head * group + tile_row % group
    in_tile = slot < num_rows
    column = jnp.arange(power_of_two(head_dim, 16), dtype=jnp.int32)
    in_head = column < head_dim
    start = refs.start[batch]
    if refs.order is None:
        query = slot
        first, last = (row_tile * blocks.rows) // group, ((row_tile + 1) * blocks.rows - 1) // group
        last = jnp.minimum(last, num_rows - 1)
    else:
        # Padding keeps an index past the end: interpret mode drops such stores, the GPU masks them.
        query = jnp.where(in_tile, pltriton.load(refs.order.at[batch, slot], mask=in_tile, other=0), num_rows)
        first, last = 0, num_rows - 1
    position = start + query
    q = pltriton.load(
        refs.q.at[batch, query[:, None], head[:, None], column[None, :]],
        mask=in_tile[:, None] & in_head[None, :],
        other=0.0,
    )
    length = jnp.clip(start + last + 1, 0, capacity)
    steps = pl.cdiv(length, blocks.block_s)
    begin = steps * split // blocks.num_splits
    end = steps * (split + 1) // blocks.num_splits
    score_step = scoring.make_step(refs, batch, kv_head, row_tile, tile_row, column, head_dim, blocks.block_s)

    def attend(step, carry, masked):
        acc, top, total = carry
        row = step * blocks.block_s + jnp.arange(blocks.block_s, dtype=jnp.int32)
        # Rows past the length are not even read: they may hold NaN, and the capacity may end inside the step.
        in_cache = row[:, None] < length if masked else None
        mask = in_cache
        if head_dim != column.size:
            mask = in_head[None, :] if mask is None else mask & in_head[None, :]
        other = None if mask is None else 0.0
        k = pltriton.load(refs.k.at[batch, row[:, None], kv_head, column[None, :]], mask=mask, other=other)
        logits = pltriton.dot(q, k, trans_b=True, allow_tf32=False) * (scale * math.log2(math.e))
        if masked:
            logits = jnp.where(row[None, :] <= position[:, None], logits, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(logits, axis=1))
        weights = jnp.exp2(logits - new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=1)
        v = pltriton.load(refs.v.at[batch, row[:, None], kv_head, column[None, :]], mask=mask, other=other)
        weights = weights.astype(v.dtype)
        acc = acc * shrink[:, None] + pltriton.dot(weights, v, allow_tf32=False)
        if score_step is not None:
            score_step(step, row, k, weights, new_top)
        return acc, new_top, total

    carry = (
        jnp.zeros((blocks.rows, column.size), jnp.float32),
        jnp.full((blocks.rows,), LOWEST, jnp.float32),
        jnp.zeros((blocks.rows,), jnp.float32),
    )
    if blocks.split_tail:
        unmasked = jnp.clip(start + first + 1, 0, capacity) // blocks.block_s
        middle = jnp.clip(unmasked, begin, end)
        carry = jax.lax.fori_loop(begin, middle, functools.partial(attend, masked=False), carry)
        carry = jax.lax.fori_loop(middle, end, functools.partial(attend, masked=True), carry)
    else:
        carry = jax.lax.fori_loop(begin, end, functools.partial(attend, masked=True), carry)
    acc, top, total = carry

    where = in_tile[:, None] & in_head[None, :]
    if blocks.num_splits == 1:
        seen = total > 0.0
        out = acc / jnp.where(seen, total, 1.0)[:, None]
        at = refs.out.at[batch, query[:, None], head[:, None], column[None, :]]
        pltriton.store(at, out.astype(refs.out.dtype), mask=where)
        lse = jnp.where(seen, top + jnp.log2(jnp.where(seen, total, 1.0)), jnp.inf)
        pltriton.store(refs.lse.at[batch, query, head], lse, mask=in_tile)
    else:
        at = refs.acc.at[batch, split, query[:, None], head[:, None], column[None, :]]
        pltriton.store(at, acc, mask=where)
        pltriton.store(refs.top.at[batch, split, query, head], top, mask=in_tile)
        pltriton.store(refs.total.at[batch, split, query, head], total, mask=in_tile)


def _combine_kernel(acc_ref, top_ref, total_ref, out_ref, lse_ref, *, num_splits: int, head_dim: int) -> None:
    """Merges the splits of one (batch row, query, head): acc [B,C,T,N,H], top and total [B,C,T,N]."""
    head, query, batch = (pl.program_id(axis) for axis in range(3))
    column = jnp.arange(power_of_two(head_dim, 16), dtype=jnp.int32)
    split = jnp.arange(power_of_two(num_splits), dtype=jnp.int32)
    there = split < num_splits
    tops = pltriton.load(top_ref.at[batch, split, query, head], mask=there, other=LOWEST)
    totals = pltriton.load(total_ref.at[batch, split, query, head], mask=there, other=0.0)
    top = jnp.max(tops)
    total = jnp.sum(jnp.exp2(tops - top) * totals)
    seen = total > 0.0
    total = jnp.where(seen, total, 1.0)

    chunk = min(16, split.size)

    def add(step, out):
        part = step * chunk + jnp.arange(chunk, dtype=jnp.int32)
        here = part < num_splits
        factor = jnp.exp2(pltriton.load(top_ref.at[batch, part, query, head], mask=here, other=LOWEST) - top)
        acc = pltriton.load(
            acc_ref.at[batch, part[:, None], query, head, column[None, :]],
            mask=here[:, None] & (column < head_dim)[None, :],
            other=0.0,
        )
        return out + jnp.sum(factor[:, None] * acc, axis=0)

    out = jax.lax.fori_loop(0, split.size // chunk, add, jnp.zeros(column.shape, jnp.float32)) / total
    pltriton.store(out_ref.at[batch, query, head, column], out.astype(out_ref.dtype), mask=column < head_dim)
    lse_ref[batch, query, head] = jnp.where(seen, top + jnp.log2(total), jnp.inf)


def _combine(acc, top, total, dtype, interpret):
    batch, num_splits, num_rows, heads, head_dim = acc.shape
    return pl.pallas_call(
        functools.partial(_combine_kernel, num_splits=num_splits, head_dim=head_dim),
        out_shape=(
            jax.ShapeDtypeStruct((batch, num_rows, heads, head_dim), dtype),
            jax.ShapeDtypeStruct((batch, num_rows, heads), jnp.float32),
        ),
        grid=(heads, num_rows, batch),
        compiler_params=pltriton.CompilerParams(num_warps=2, num_stages=2),
        interpret=interpret,
        name="cached_attention_combine",
    )(acc, top, total)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    *,
    scale: float,
    request: scoring.Request | None,
    blocks: BlockSizes,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Runs the kernels for at most one request for scores."""
    batch, num_rows, heads, head_dim = q.shape
    capacity, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    names, operands = ["start", "q", "k", "v"], [start, q, k, v]
    outputs: dict[str, jax.ShapeDtypeStruct] = {}
    if blocks.num_splits == 1:
        outputs["out"] = jax.ShapeDtypeStruct(q.shape, q.dtype)
        outputs["lse"] = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    else:
        parts = (batch, blocks.num_splits, num_rows, heads)
        outputs["acc"] = jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32)
        outputs["top"] = outputs["total"] = jax.ShapeDtypeStruct(parts, jnp.float32)
    if request is not None:
        for name, value in request.operands(q, kv_heads).items():
            names.append(name)
            operands.append(value)
        outputs |= request.outputs(k, group, blocks)

    def kernel(*refs):
        named = scoring.Refs(**dict(zip((*names, *outputs), refs, strict=True)))
        _attention_kernel(named, scale=scale, shape=(num_rows, group, capacity, head_dim), blocks=blocks)

    row_tiles = ceil_div(num_rows * group, blocks.rows)
    results = pl.pallas_call(
        kernel,
        out_shape=tuple(outputs.values()),
        grid=(kv_heads * row_tiles, blocks.num_splits, batch),
        compiler_params=pltriton.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="cached_attention",
    )(*operands)
    got = dict(zip(outputs, results, strict=True))
    if blocks.num_splits == 1:
        out, lse = got["out"], got["lse"]
    else:
        out, lse = _combine(got["acc"], got["top"], got["total"], q.dtype, interpret)
    if request is None:
        return out, None
    return out, request.finish(got, lse, start, group, scale, blocks, interpret)


def cached_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    *,
    scale: float,
    scored_rows: jax.Array | None = None,
    score_mode: str = "weight",
    per_row: bool = False,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """See the public op; `blocks` overrides the choice for measurements."""
    batch, num_rows, heads, head_dim = q.shape
    capacity, kv_heads = k.shape[1:3]
    if head_dim > 256:
        raise ValueError(f"q has head dim {head_dim}; the kernel allows at most 256 (backend 'xla' has no bound)")
    choose = functools.partial(
        choose_block_sizes,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        capacity=capacity,
        head_dim=head_dim,
        dtype=q.dtype,
    )
    blocks = blocks or choose(batch, num_rows)
    run = functools.partial(attend, scale=scale, interpret=interpret)
    if scored_rows is None:
        return run(q, k, v, start, request=None, blocks=blocks)
    # Longer chunks score in passes of their own, one query each: every row of a pass then stands at one position.
    if num_rows <= SCORED_IN_PASS:
        request = scoring.Request.create(scored_rows, num_rows, score_mode, per_row)
        return run(q, k, v, start, request=request, blocks=blocks)
    out, _ = run(q, k, v, start, request=None, blocks=blocks)
    scored = jnp.clip(scored_rows, 0, num_rows - 1)
    only = jnp.zeros((batch, 1), jnp.int32)
    request = scoring.Request.create(only, 1, score_mode, False)
    scores = []
    for r in range(scored.shape[1]):
        query = jnp.take_along_axis(q, scored[:, r, None, None, None], axis=1)
        single = run(query, k, v, start + scored[:, r], request=request, blocks=choose(batch, 1))[1]
        scores.append(single)
    scores = jnp.stack(scores, axis=1)
    scores = jnp.where(jnp.any(scores == -jnp.inf, axis=1, keepdims=True), -jnp.inf, scores)
    return out, scores if per_row else jnp.sum(scores, axis=1)
