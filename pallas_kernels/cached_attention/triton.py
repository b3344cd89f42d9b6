"""Pallas-Triton kernel of `cached_attention`: split over cache rows, with scores as a by-product.

One program owns `rows` (query, head) pairs of one kv head, so that each key and value is loaded once for the whole
group and all queries. Softmax works in base 2: the factor log2(e) is folded into the scale.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch, online
from pallas_kernels.attention_tile import Tile, load_queries, result_shapes, store_results, tile_of
from pallas_kernels.cached_attention import scores as scoring
from pallas_kernels.cached_attention.blocks import BlockSizes, choose_block_sizes
from pallas_kernels.early_launch import early_launch
from pallas_kernels.tiling import ceil_div

# Up to this many queries the scored ones are taken from the attention pass itself.
SCORED_IN_PASS = 16


def _attention_kernel(
    refs: scoring.Refs,
    *,
    scale: float,
    shape: tuple[int, ...],
    blocks: BlockSizes,
    request: scoring.Request | None,
) -> None:
    """Attends one row tile to one split of the cache.

    refs.start [B]; refs.scored [B,R] or None; refs.q [B,T,N,H]; refs.k, refs.v [B,S,K,H]. The results are
    refs.out [B,T,N,H] and, with weight scores, refs.lse [B,T,N] with one split, else refs.acc [B,C,T,N,H], refs.top and
    refs.total [B,C,T,N] for C splits.
    """
    num_rows, group, capacity, head_dim = shape
    row_tiles = ceil_div(num_rows * group, blocks.rows)
    # Later rows see more of the cache: start the long programs first.
    tile = tile_of(num_rows, group, head_dim, refs.start, blocks.rows, last_first=True)
    start = refs.start[tile.batch]
    first, last = (tile.row_tile * blocks.rows) // group, ((tile.row_tile + 1) * blocks.rows - 1) // group
    last = jnp.minimum(last, num_rows - 1)
    q = load_queries(refs.q, tile)
    if request is not None:
        # The scores' own shared memory would otherwise cost the second program of a multiprocessor.
        q = online.in_registers(q)
    length = jnp.clip(start + last + 1, 0, capacity)
    seen_by_all = jnp.clip(start + first + 1, 0, capacity)
    last_tile = None if row_tiles == 1 else tile.row_tile == row_tiles - 1
    base_two = scale * math.log2(math.e)
    score_step = scoring.make_step(refs, request, tile.batch, tile.kv_head, last_tile, tile.column, base_two, blocks)
    state = online.initial(blocks.rows, tile.column.size)
    options = {"scale": scale, "blocks": blocks, "score_step": score_step}
    state = attend_rows(q, state, refs.k, refs.v, tile, length, seen_by_all, **options)
    results = (refs.out,) if blocks.num_splits == 1 else (refs.acc, refs.top, refs.total)
    store_results(results, tile, state, num_rows, refs.lse)


def attend_rows(
    q: jax.Array,
    state: online.State,
    k_ref: Any,
    v_ref: Any,
    tile: Tile,
    length: jax.Array,
    seen_by_all: jax.Array,
    *,
    scale: float,
    blocks: BlockSizes,
    score_step: Callable[..., None] | None = None,
) -> online.State:
    """Adds this split's share of the first `length` cache rows to the state of queries [rows,H].

    k, v [B,S,K,H]. A query sees no row past its position, and all of them see the first `seen_by_all` rows.
    `score_step(step, row, keys)` is called in every step.
    """
    steps = pl.cdiv(length, blocks.block_s)
    begin = steps * tile.split // blocks.num_splits
    end = steps * (tile.split + 1) // blocks.num_splits
    eviction = "evict_first" if blocks.stream else None

    def attend(step, state, masked):
        row = step * blocks.block_s + jnp.arange(blocks.block_s, dtype=jnp.int32)
        # Rows past the length are not even read: they may hold NaN, and the capacity may end inside the step.
        mask = row[:, None] < length if masked else None
        if k_ref.shape[3] != tile.column.size:
            mask = tile.in_head[None, :] if mask is None else mask & tile.in_head[None, :]

        def load(ref):
            at = ref.at[tile.batch, row[:, None], tile.kv_head, tile.column[None, :]]
            return pltriton.load(at, mask=mask, other=None if mask is None else 0.0, eviction_policy=eviction)

        k = load(k_ref)
        logits = pltriton.dot(q, k, trans_b=True, allow_tf32=False) * (scale * math.log2(math.e))
        if masked:
            logits = jnp.where(row[None, :] <= tile.position[:, None], logits, -jnp.inf)
        state = online.update(state, logits, lambda: load(v_ref))
        if score_step is not None:
            score_step(step, row, k)
        return state

    if blocks.split_tail:
        middle = jnp.clip(seen_by_all // blocks.block_s, begin, end)
        state = jax.lax.fori_loop(begin, middle, functools.partial(attend, masked=False), state)
        return jax.lax.fori_loop(middle, end, functools.partial(attend, masked=True), state)
    return jax.lax.fori_loop(begin, end, functools.partial(attend, masked=True), state)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    *,
    scale: float,
    scored: jax.Array | None,
    request: scoring.Request | None,
    blocks: BlockSizes,
    early: bool = False,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Runs the kernels for at most one request for scores of the queries `scored` [B,R]."""
    batch, num_rows, heads, head_dim = q.shape
    capacity, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    want_lse = request is not None and request.mode == "weight"
    names, operands = ["start", "q", "k", "v"], [start, q, k, v]
    shapes = result_shapes(*q.shape, q.dtype, blocks.num_splits)
    outputs = dict(zip(("out",) if blocks.num_splits == 1 else ("acc", "top", "total"), shapes, strict=True))
    if want_lse and blocks.num_splits == 1:
        outputs["lse"] = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    if request is not None:
        names.append("scored")
        operands.append(scored)
        outputs |= request.outputs(k, blocks)

    def kernel(*refs):
        named = scoring.Refs(**dict(zip((*names, *outputs), refs, strict=True)))
        shape = (num_rows, group, capacity, head_dim)
        _attention_kernel(named, scale=scale, shape=shape, blocks=blocks, request=request)

    row_tiles = ceil_div(num_rows * group, blocks.rows)
    # XLA adds logit scores up; a kernel adds weights, and another merges several parts, whoever reads `out`
    read_by_kernels = request is None or request.mode == "weight"
    results = pl.pallas_call(
        early_launch(kernel, read_by_kernels and (early or blocks.num_splits > 1), interpret=interpret),
        out_shape=tuple(outputs.values()),
        grid=(kv_heads * row_tiles, blocks.num_splits, batch),
        compiler_params=pltriton.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="cached_attention",
    )(*operands)
    got = dict(zip(outputs, results, strict=True))
    if blocks.num_splits == 1:
        out, lse = got["out"], got.get("lse")
    else:
        name = "cached_attention_merge"
        parts = got["acc"], got["top"], got["total"]
        out, lse = online.merge(*parts, q.dtype, want_lse=want_lse, early=early, interpret=interpret, name=name)
    if request is None:
        return out, None
    return out, request.finish(got, lse, scored, start, capacity, scale, blocks, interpret)


@dispatch.shared("scale", "score_mode", "per_row", "early", "interpret", "blocks")
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
    early: bool = False,
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
        return run(q, k, v, start, scored=None, request=None, blocks=blocks, early=early)
    group = heads // kv_heads
    scored = jnp.clip(scored_rows, 0, num_rows - 1)
    # Longer chunks score in passes of their own, one query each: every row of a pass then stands at one position.
    if num_rows <= SCORED_IN_PASS:
        request = scoring.Request(scored.shape[1], group, score_mode, per_row)
        return run(q, k, v, start, scored=scored, request=request, blocks=blocks, early=early)
    out, _ = run(q, k, v, start, scored=None, request=None, blocks=blocks, early=early)
    only, request = jnp.zeros((batch, 1), jnp.int32), scoring.Request(1, group, score_mode, False)
    scores = []
    for r in range(scored.shape[1]):
        query = jnp.take_along_axis(q, scored[:, r, None, None, None], axis=1)
        position = start + scored[:, r]
        scores.append(run(query, k, v, position, scored=only, request=request, blocks=choose(batch, 1))[1])
    scores = jnp.stack(scores, axis=1)
    scores = jnp.where(jnp.any(scores == -jnp.inf, axis=1, keepdims=True), -jnp.inf, scores)
    return out, scores if per_row else jnp.sum(scores, axis=1)
