"""Pallas-Triton kernels of `cached_step` and `sparse_step`: each program rotates the queries that it attends with.

The programs of the first split also write the new cache row, and add it at their end. None reads it from the cache,
where it may not yet be.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch, online
from pallas_kernels.attention_tile import Tile, result_shapes, store_results, tile_of
from pallas_kernels.cached_attention import blocks as cached_blocks
from pallas_kernels.cached_attention.triton import attend_rows
from pallas_kernels.rope_and_cache.triton import read_projection
from pallas_kernels.sparse_attention import blocks as sparse_blocks
from pallas_kernels.sparse_attention.triton import start_slots
from pallas_kernels.tiling import ceil_div

BlockSizes = cached_blocks.BlockSizes | sparse_blocks.BlockSizes


class Token(NamedTuple):
    """What `rope_and_cache` takes, of one token per sequence."""

    qkv: jax.Array
    k_cache: jax.Array
    v_cache: jax.Array
    cos: jax.Array
    sin: jax.Array
    start: jax.Array
    bias: jax.Array | None = None
    q_scale: jax.Array | None = None
    k_scale: jax.Array | None = None


def _projected(
    refs: dict[str, Any], tile: Tile, member: jax.Array, mask: jax.Array, scale_ref: Any, rotated: bool, eps: float
) -> jax.Array:
    """The members [n] of the tile's kv head, [n,H] in the cache's dtype: with bias, normed and rotated."""
    head_dim, dtype = refs["qkv"].shape[5], refs["k_cache"].dtype
    half = head_dim // 2
    mask = mask[:, None] & tile.in_head[None, :]

    def read(column):
        of = tile.batch, 0, tile.kv_head
        return read_projection(refs["qkv"], refs.get("bias"), of, member[:, None], column[None, :], mask, dtype)

    if not rotated:
        return read(tile.column)
    low = tile.column < half
    # a second read from the cache is cheaper than moving the other half of a head between threads
    columns = tile.column, jnp.where(low, tile.column + half, tile.column - half)
    x, partner = (read(column).astype(jnp.float32) for column in columns)
    if scale_ref is not None:
        factor = jax.lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) / head_dim + eps)
        scales = (pltriton.load(scale_ref.at[column], mask=tile.in_head, other=0.0) for column in columns)
        x, partner = (
            (y * factor * scale.astype(jnp.float32)[None, :]).astype(dtype).astype(jnp.float32)
            for y, scale in zip((x, partner), scales, strict=True)
        )
    pair = jnp.where(low, tile.column, tile.column - half)
    cos, sin = (
        pltriton.load(refs[name].at[tile.batch, 0, pair], mask=tile.in_head, other=0.0) for name in ("cos", "sin")
    )
    return (x * cos[None, :] + partner * jnp.where(low, -sin, sin)[None, :]).astype(dtype)


def _add_new_row(
    refs: dict[str, Any], tile: Tile, q: jax.Array, state: online.State, *, scale: float, eps: float, window: int
) -> online.State:
    """Writes the new row, and adds it to the state of queries [rows,H] that see it."""
    group, head_dim = refs["qkv"].shape[4] - 2, refs["qkv"].shape[5]
    one = jnp.zeros((1,), jnp.int32)
    k = _projected(refs, tile, one + group, one == 0, refs.get("k_scale"), True, eps)
    v = _projected(refs, tile, one + group + 1, one == 0, None, False, eps)
    attend_at, start = refs["attend_at"][tile.batch], refs["start"][tile.batch]
    # interpret mode drops stores whose index is past the end, the GPU those that are masked
    column = jnp.where(tile.in_head, tile.column, head_dim)
    for name, x in (("k_out", k), ("v_out", v)):
        pltriton.store(refs[name].at[tile.batch, start, tile.kv_head, column[None, :]], x, mask=tile.in_head[None, :])

    seen = start <= attend_at
    if window:
        valid = refs["valid"][tile.batch]
        seen &= (start >= valid) & (start - valid < window)
    logits = jnp.sum(q.astype(jnp.float32) * k.astype(jnp.float32), axis=1) * (scale * math.log2(math.e))
    logits = jnp.where(seen, logits, -jnp.inf)
    acc, top, total = state
    new_top = jnp.maximum(top, logits)
    weights, shrink = jnp.exp2(logits - new_top), jnp.exp2(top - new_top)
    acc = acc * shrink[:, None] + weights[:, None] * jnp.where(seen, v.astype(jnp.float32), 0.0)
    return acc, new_top, total * shrink + weights


def _call(
    begin: Callable[..., Callable[[jax.Array, online.State], online.State]],
    token: Token,
    operands: dict[str, jax.Array],
    blocks: BlockSizes,
    name: str,
    *,
    scale: float,
    eps: float,
    window: int,
    early: bool,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs a kernel whose attention to the first `length` cache rows is begin(refs, tile, length)(queries, state).

    The operands are named as those of the public ops, `attend_at` among them.
    """
    named = {name: x for name, x in token._asdict().items() if x is not None} | operands
    named["qkv"] = token.qkv if token.qkv.ndim == 6 else token.qkv[None]
    # aliased operands are the last ones
    caches = {name: named.pop(name) for name in ("k_cache", "v_cache")}
    named |= caches
    _, batch, _, kv_heads, members, head_dim = named["qkv"].shape
    group, dtype = members - 2, token.k_cache.dtype
    if head_dim > 256:
        raise ValueError(f"qkv has head dim {head_dim}; the kernel allows at most 256 (backend 'xla' has no bound)")

    def kernel(*refs):
        by_name = dict(zip((*named, "k_out", "v_out"), refs, strict=False))
        tile = tile_of(1, group, head_dim, by_name["attend_at"], blocks.rows)
        visible = jnp.minimum(by_name["attend_at"][tile.batch] + 1, by_name["start"][tile.batch])
        attend = begin(by_name, tile, jnp.clip(visible, 0, by_name["k_cache"].shape[1]))
        member = tile.head - tile.kv_head * group
        q = _projected(by_name, tile, member, tile.query == 0, by_name.get("q_scale"), True, eps)
        state = attend(q, online.initial(blocks.rows, tile.column.size))
        # last: its loads would otherwise come before those of attention
        add = functools.partial(_add_new_row, by_name, tile, q, scale=scale, eps=eps, window=window)
        state = jax.lax.cond(tile.split == 0, add, lambda state: state, state)
        store_results(refs[len(by_name) :], tile, state, 1)

    # never early: XLA may read the caches
    k_cache, v_cache, *results = pl.pallas_call(
        kernel,
        out_shape=(
            *(jax.ShapeDtypeStruct(cache.shape, dtype) for cache in caches.values()),
            *result_shapes(batch, 1, kv_heads * group, head_dim, dtype, blocks.num_splits),
        ),
        grid=(kv_heads * ceil_div(group, blocks.rows), blocks.num_splits, batch),
        input_output_aliases={len(named) - 2: 0, len(named) - 1: 1},
        compiler_params=pltriton.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name=name,
    )(*named.values())
    if blocks.num_splits == 1:
        return results[0], k_cache, v_cache
    out, _ = online.merge(*results, dtype, want_lse=False, early=early, interpret=interpret, name=f"{name}_merge")
    return out, k_cache, v_cache


@dispatch.shared("scale", "eps", "early", "interpret", "blocks")
def cached_step(
    token: Token,
    attend_at: jax.Array,
    *,
    scale: float,
    eps: float,
    early: bool = False,
    interpret: bool = False,
    blocks: cached_blocks.BlockSizes | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See the public op; `blocks` overrides the choice for measurements."""
    batch, capacity, kv_heads, head_dim = token.k_cache.shape
    group, dtype = token.qkv.shape[-2] - 2, token.k_cache.dtype
    cut = blocks or cached_blocks.choose_block_sizes(batch, 1, kv_heads, group, capacity, head_dim, dtype)

    def begin(refs, tile, length):
        # the new row is none of these: every query sees them all
        tile = tile._replace(position=jnp.broadcast_to(length - 1, (cut.rows,)))
        rows = (refs["k_cache"], refs["v_cache"], tile, length, length)
        return lambda q, state: attend_rows(q, state, *rows, scale=scale, blocks=cut)

    options = {"scale": scale, "eps": eps, "early": early, "interpret": interpret}
    return _call(begin, token, {"attend_at": attend_at}, cut, "cached_step", **options, window=0)


@dispatch.shared("window", "scale", "eps", "early", "interpret", "blocks")
def sparse_step(
    token: Token,
    rows: jax.Array,
    attend_at: jax.Array,
    *,
    layer: int | jax.Array,
    count: jax.Array,
    valid: jax.Array,
    window: int,
    scale: float,
    eps: float,
    early: bool = False,
    interpret: bool = False,
    blocks: sparse_blocks.BlockSizes | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See the public op, with rows [L,B,M] and count [L,B]; `blocks` overrides the choice for measurements."""
    batch, _, kv_heads, head_dim = token.k_cache.shape
    group, listed, dtype = token.qkv.shape[-2] - 2, rows.shape[2], token.k_cache.dtype
    cut = blocks or sparse_blocks.choose_block_sizes(batch, 1, kv_heads, group, listed, window, head_dim, dtype)

    def begin(refs, tile, length):
        named = (refs[name] for name in ("k_cache", "v_cache", "rows", "count", "valid", "layer"))
        return start_slots(tile, *named, length, scale=scale, blocks=cut, window=window)

    operands = {
        "attend_at": attend_at,
        "rows": rows,
        "count": count,
        "valid": valid,
        "layer": jnp.asarray(layer, jnp.int32).reshape(1),
    }
    options = {"scale": scale, "eps": eps, "early": early, "interpret": interpret}
    return _call(begin, token, operands, cut, "sparse_step", **options, window=window)
