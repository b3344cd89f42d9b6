"""The meaning of `row_selection` in plain jnp: a stable sort."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def row_selection(scores: jax.Array, length: jax.Array, k: jax.Array, *, width: int) -> tuple[jax.Array, jax.Array]:
    """See the public op."""
    size = scores.shape[1]
    index = jnp.arange(size, dtype=jnp.int32)
    eligible = (index < length[:, None]) & ~jnp.isnan(scores)
    count = jnp.clip(jnp.minimum(k, jnp.sum(eligible, axis=1, dtype=jnp.int32)), 0, width)
    # Ineligible entries sort behind -inf, which may be chosen; adding zero makes -0.0 and 0.0 one value.
    order = jnp.lexsort((-(scores + 0.0), ~eligible), axis=-1)[:, :width].astype(jnp.int32)
    rows = jnp.sort(jnp.where(jnp.arange(width) < count[:, None], order, size), axis=1)
    return jnp.where(rows < size, rows, -1), count
