"""Pallas-Triton kernel of `sparse_step`: each program rotates its own queries; one also writes the new cache row.

No program reads the new row from the cache, where it may not yet be: attention starts from it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch, online
from pallas_kernels.partial_sums import load_sum
from pallas_kernels.sparse_attention.blocks import BlockSizes, choose_block_sizes
from pallas_kernels.sparse_attention.triton import attend_slots, result_shapes, store_results, tile_of


def _projected(
    refs: dict[str, Any], tile: Any, member: jax.Array, mask: jax.Array, scale_ref: Any, rotated: bool, eps: float
) -> jax.Array:
    """The members [n] of this program's kv head, [n,H] in the cache's dtype: with bias, normed and rotated."""
    head_dim, dtype = refs["qkv"].shape[5], refs["k_cache"].dtype
    half = head_dim // 2
    mask = mask[:, None] & tile.in_head[None, :]

    def read(column):
        at = lambda part: refs["qkv"].at[part, tile.batch, 0, tile.kv_head, member[:, None], column[None, :]]  # noqa: E731
        x = load_sum(at, refs["qkv"].shape[0], mask).astype(dtype)
        if "bias" in refs:
            bias = pltriton.load(refs["bias"].at[tile.kv_head, member[:, None], column[None, :]], mask=mask, other=0.0)
            x = (x.astype(jnp.float32) + bias.astype(jnp.float32)).astype(dtype)
        return x

    if not rotated:
        return read(tile.column)
    low = tile.column < half
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


def _kernel(
    refs: dict[str, Any], results: list[Any], *, eps: float, scale: float, blocks: BlockSizes, window: int
) -> None:
    """qkv [C,B,1,K,G+2,H]; otherwise as the public op, with layer [1]; results as of `sparse_attention`."""
    group, head_dim = refs["qkv"].shape[4] - 2, refs["qkv"].shape[5]
    capacity = refs["k_cache"].shape[1]
    tile = tile_of(1, group, head_dim, refs["attend_at"], blocks)
    attend_at, start, valid = (refs[name][tile.batch] for name in ("attend_at", "start", "valid"))

    one = jnp.zeros((1,), jnp.int32)
    k = _projected(refs, tile, one + group, one == 0, refs.get("k_scale"), True, eps)
    v = _projected(refs, tile, one + group + 1, one == 0, None, False, eps)
    # one program of a kv head writes; interpret mode drops stores whose index is past the end, the GPU masked ones
    mine = (tile.split == 0) & (one == 0)
    row = jnp.where(mine, start, capacity)
    for name, x in (("k_out", k), ("v_out", v)):
        column = jnp.where(tile.in_head, tile.column, head_dim)
        at = refs[name].at[tile.batch, row[:, None], tile.kv_head, column[None, :]]
        pltriton.store(at, x, mask=mine[:, None] & tile.in_head[None, :])

    member = tile.head - tile.kv_head * group
    q = _projected(refs, tile, member, tile.query == 0, refs.get("q_scale"), True, eps)
    seen = (tile.split == 0) & (start <= attend_at) & (start >= valid) & (start - valid < window)
    logits = jnp.sum(q.astype(jnp.float32) * k.astype(jnp.float32), axis=1) * (scale * math.log2(math.e))
    acc, top, total = online.initial(blocks.rows, tile.column.size)
    state = (
        jnp.where(seen, v.astype(jnp.float32), acc),
        jnp.where(seen, logits, top),
        jnp.where(seen, 1.0, total),
    )
    length = jnp.clip(jnp.minimum(attend_at + 1, start), 0, capacity)
    lists = (refs[name] for name in ("rows", "count", "valid", "layer"))
    options = {"scale": scale, "blocks": blocks, "window": window}
    state = attend_slots(tile, q, state, refs["k_cache"], refs["v_cache"], *lists, length, **options)
    store_results(results, tile, state, 1)


@dispatch.shared("window", "scale", "eps", "early", "interpret", "blocks")
def sparse_step(
    qkv: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    start: jax.Array,
    rows: jax.Array,
    attend_at: jax.Array,
    *,
    layer: int | jax.Array,
    count: jax.Array | None,
    valid: jax.Array,
    window: int,
    scale: float,
    bias: jax.Array | None,
    q_scale: jax.Array | None,
    k_scale: jax.Array | None,
    eps: float,
    early: bool = False,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See the public op, with rows [L,B,M]; `blocks` overrides the choice for measurements."""
    qkv = qkv if qkv.ndim == 6 else qkv[None]
    _, batch, _, kv_heads, members, head_dim = qkv.shape
    group, listed, dtype = members - 2, rows.shape[2], k_cache.dtype
    if head_dim > 256:
        raise ValueError(f"qkv has head dim {head_dim}; the kernel allows at most 256 (backend 'xla' has no bound)")
    blocks = blocks or choose_block_sizes(batch, 1, kv_heads, group, listed, window, head_dim, dtype)
    operands = {
        "qkv": qkv,
        "cos": cos,
        "sin": sin,
        "start": start,
        "rows": rows,
        "attend_at": attend_at,
        "count": jnp.full(batch, listed, jnp.int32) if count is None else count,
        "valid": valid,
        "layer": jnp.asarray(layer, jnp.int32).reshape(1),
        "bias": bias,
        "q_scale": q_scale,
        "k_scale": k_scale,
        "k_cache": k_cache,
        "v_cache": v_cache,
    }
    operands = {name: x for name, x in operands.items() if x is not None}
    outputs = result_shapes(batch, 1, kv_heads * group, head_dim, dtype, blocks)

    def kernel(*refs):
        named = dict(zip((*operands, "k_out", "v_out"), refs, strict=False))
        _kernel(named, refs[len(named) :], eps=eps, scale=scale, blocks=blocks, window=window)

    caches = (jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in (k_cache, v_cache))
    # never early: XLA may read the caches
    k_cache, v_cache, *results = pl.pallas_call(
        kernel,
        out_shape=(*caches, *outputs),
        grid=(kv_heads * -(-group // blocks.rows), blocks.num_splits, batch),
        input_output_aliases={len(operands) - 2: 0, len(operands) - 1: 1},
        compiler_params=pltriton.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="sparse_step",
    )(*operands.values())
    if blocks.num_splits == 1:
        return results[0], k_cache, v_cache
    out, _ = online.merge(*results, dtype, want_lse=False, early=early, interpret=interpret, name="sparse_step_merge")
    return out, k_cache, v_cache
