"""`rope_and_cache` in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.partial_sums import sum_of_parts


def rope_and_cache(
    qkv: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    start: jax.Array,
    *,
    bias: jax.Array | None,
    q_scale: jax.Array | None,
    k_scale: jax.Array | None,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See the public op."""
    qkv = sum_of_parts(qkv, 5, k_cache.dtype)
    batch, num_rows, kv_heads, members, head_dim = qkv.shape
    if bias is not None:
        qkv = qkv + bias.astype(qkv.dtype)
    q, k, v = qkv[:, :, :, :-2], qkv[:, :, :, -2], qkv[:, :, :, -1]
    q = q.reshape(batch, num_rows, kv_heads * (members - 2), head_dim)
    if q_scale is not None:
        q, k = rms_norm(q, q_scale, eps), rms_norm(k, k_scale, eps)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q, write_rows(k_cache, k, start), write_rows(v_cache, v, start)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """RMS norm over the last axis, float32 inside."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale.astype(jnp.float32)).astype(x.dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [B, T, heads, H] by tables [B, T, H / 2], float32 inside."""
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def write_rows(cache: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    """Writes rows [B, T, K, H] into cache [B, S, K, H] at start [B]."""
    if cache.shape[0] == 1:
        return jax.lax.dynamic_update_slice(cache, rows, (0, start[0], 0, 0))
    return jax.vmap(lambda c, r, s: jax.lax.dynamic_update_slice(c, r, (s, 0, 0)))(cache, rows, start)
