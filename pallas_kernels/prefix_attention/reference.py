"""The meaning of `prefix_attention` in plain jnp, with no thought for speed."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def prefix_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array, *, scale: float, rows: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """See the public op; all queries are wanted. Everything is computed in float32."""
    q, k, v = (x[: len(q)].astype(jnp.float32) for x in (q, k, v))
    rows = jnp.arange(k.shape[1])[None] if rows is None else rows
    seen = (rows >= 0) & (rows < start[:, None])
    logits = scale * jnp.einsum("bkqh,bskh->bkqs", q, k, precision="highest")
    logits = jnp.where(seen[:, None, None], logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - jnp.where(lse == -jnp.inf, 0, lse)[..., None])
    # 0 * NaN is NaN: rows that no query sees must leave V as well.
    values = jnp.where(seen[:, :, None, None], v, 0)
    return jnp.einsum("bkqs,bskh->bkqh", weights, values, precision="highest"), lse
