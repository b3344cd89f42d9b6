"""`sparse_attention` in plain jnp: gather the listed rows, then attend to them."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: jax.Array,
    start: jax.Array,
    *,
    count: jax.Array | None = None,
    valid: jax.Array | None = None,
    window: int = 0,
    scale: float,
) -> jax.Array:
    """See the public op. Everything is computed in float32."""
    batch, num_rows, heads, head_dim = q.shape
    capacity, kv_heads = k.shape[1:3]
    if count is not None:
        rows = jnp.where(jnp.arange(rows.shape[1]) < count[:, None], rows, -1)
    if valid is not None:
        rows = jnp.concatenate([rows, valid[:, None] + jnp.arange(window, dtype=jnp.int32)], axis=1)
    position = start[:, None] + jnp.arange(num_rows)
    in_cache = (rows >= 0) & (rows < capacity)
    visible = in_cache[:, None] & (rows[:, None] <= position[:, :, None])  # [B,T,M]
    index = jnp.clip(rows, 0, capacity - 1)[:, :, None, None]
    keys = jnp.take_along_axis(k, index, axis=1).astype(jnp.float32)
    values = jnp.take_along_axis(v, index, axis=1).astype(jnp.float32)

    grouped = q.reshape(batch, num_rows, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32)
    logits = scale * jnp.einsum("btkgh,bmkh->bkgtm", grouped, keys, precision="highest")
    logits = jnp.where(visible[:, None, None], logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True)
    unnormalised = jnp.exp(logits - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(unnormalised, axis=-1, keepdims=True)
    weights = unnormalised / jnp.where(total == 0.0, 1.0, total)
    # 0 * NaN is NaN: rows that no query sees must leave V as well.
    values = jnp.where(jnp.any(visible, axis=1)[:, :, None, None], values, 0.0)
    out = jnp.einsum("bkgtm,bmkh->btkgh", weights, values, precision="highest")
    return out.reshape(q.shape).astype(q.dtype)
