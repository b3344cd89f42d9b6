"""`prefix_attention` in plain jnp for XLA's CPU backend: a running softmax over chunks, up to the longest prefix."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import online

CHUNK = 1024


def prefix_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array, *, scale: float, rows: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """See the public op; all queries are computed, whichever are wanted."""
    batch, kv_heads, queries, head_dim = q.shape
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    options = {"preferred_element_type": jnp.float32, "precision": precision}
    count = jnp.max(start) if rows is None else k.shape[1]
    rows = jnp.arange(k.shape[1], dtype=jnp.int32)[None] if rows is None else rows
    seen = (rows >= 0) & (rows < start[:, None])
    size = min(CHUNK, k.shape[1])

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, acc = carry
        # The last chunk is moved back into the cache; rows that it shares with the one before are masked.
        first = jnp.minimum(i * size, k.shape[1] - size)
        keys, values = (jax.lax.dynamic_slice(t, (0, first, 0, 0), (batch, size, *t.shape[2:])) for t in (k, v))
        new = jax.lax.dynamic_slice(seen, (0, first), (batch, size)) & (first + jnp.arange(size) >= i * size)
        # 0 * NaN is NaN: rows that no query sees must leave V as well.
        values = jnp.where(new[:, :, None, None], values, 0)
        logits = jnp.einsum("bkqh,bskh->bkqs", q, keys, **options) * scale
        logits = jnp.where(new[:, None, None], logits, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(logits, axis=-1, keepdims=True))
        weights, kept = jnp.exp(logits - new_top), jnp.exp(top - new_top)
        acc = acc * kept + jnp.einsum("bkqs,bskh->bkqh", weights.astype(values.dtype), values, **options)
        return new_top, total * kept + jnp.sum(weights, axis=-1, keepdims=True), acc

    column = jnp.zeros((batch, kv_heads, queries, 1), jnp.float32)
    carry = column + online.LOWEST, column, jnp.zeros((batch, kv_heads, queries, head_dim), jnp.float32)
    top, total, acc = jax.lax.fori_loop(0, -(-count // size), step, carry)
    some = total > 0
    total = jnp.where(some, total, 1)
    return acc / total, jnp.where(some, top + jnp.log(total), -jnp.inf)[..., 0]
