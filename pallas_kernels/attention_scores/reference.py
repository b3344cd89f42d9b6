"""`attention_scores` in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def attention_scores(
    q: jax.Array, k: jax.Array, q_pos: jax.Array, length: jax.Array, heads: tuple[int, ...], *, scale: float
) -> jax.Array:
    """See the public op. Everything is computed in float32."""
    capacity, kv_heads = k.shape[1:3]
    group = q.shape[2] // kv_heads
    row = jnp.arange(capacity)
    visible = row <= q_pos[:, :, None]  # [B,R,S]
    mass = jnp.zeros((q.shape[0], capacity), jnp.float32)
    # One kv head at a time: a gather of all chosen heads would copy a kv head once per query head that reads it.
    for kv_head in sorted({head // group for head in heads}):
        readers = jnp.array([head for head in heads if head // group == kv_head])
        queries = q[:, :, readers].astype(jnp.float32)
        keys = k[:, :, kv_head].astype(jnp.float32)
        logits = scale * jnp.einsum("brnh,bsh->brns", queries, keys, precision="highest")
        logits = jnp.where(visible[:, :, None], logits, -jnp.inf)
        top = jnp.max(logits, axis=-1, keepdims=True)
        unnormalised = jnp.exp(logits - jnp.where(top == -jnp.inf, 0.0, top))
        total = jnp.sum(unnormalised, axis=-1, keepdims=True)
        mass += jnp.sum(unnormalised / jnp.where(total == 0.0, 1.0, total), axis=(1, 2))
    mean = mass / (q.shape[1] * len(heads))
    return jnp.where(row < length[:, None], mean, -jnp.inf)
