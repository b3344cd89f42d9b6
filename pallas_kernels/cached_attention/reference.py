"""The meaning of `cached_attention` in plain jnp, with no thought for speed."""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
) -> tuple[jax.Array, jax.Array | None]:
    """See the public op. Everything is computed in float32."""
    batch, num_rows, heads, head_dim = q.shape
    capacity, kv_heads = k.shape[1:3]
    position = start[:, None] + jnp.arange(num_rows)
    visible = jnp.arange(capacity) <= position[:, :, None]  # [B,T,S]

    grouped = q.reshape(batch, num_rows, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32)
    raw = scale * jnp.einsum("btkgh,bskh->btkgs", grouped, k.astype(jnp.float32), precision="highest")
    logits = jnp.where(visible[:, :, None, None], raw, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True)
    unnormalised = jnp.exp(logits - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(unnormalised, axis=-1, keepdims=True)
    weights = unnormalised / jnp.where(total == 0.0, 1.0, total)
    # 0 * NaN is NaN: rows that no query sees must leave V as well.
    seen = jnp.any(visible, axis=1)[:, :, None, None]
    values = jnp.where(seen, v, 0).astype(jnp.float32)
    out = jnp.einsum("btkgs,bskh->btkgh", weights, values, precision="highest").reshape(q.shape).astype(q.dtype)
    if scored_rows is None:
        return out, None

    # [B,T,S] -> the scored queries, [B,R,S]
    chosen = jnp.clip(scored_rows, 0, num_rows - 1)[:, :, None]
    summed = jnp.sum(weights if score_mode == "weight" else raw, axis=(2, 3))
    scores = jnp.take_along_axis(summed, chosen, axis=1)
    everywhere = jnp.all(jnp.take_along_axis(visible, chosen, axis=1), axis=1, keepdims=True)
    if not per_row:
        scores, everywhere = jnp.sum(scores, axis=1), everywhere[:, 0]
    return out, jnp.where(everywhere, scores, -jnp.inf)
