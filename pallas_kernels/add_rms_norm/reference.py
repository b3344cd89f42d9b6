"""`add_rms_norm` in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.partial_sums import sum_of_parts


def add_rms_norm(
    x: jax.Array, update: jax.Array | None, scale: jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See the public op."""
    y = x if update is None else x + sum_of_parts(update, x.ndim, x.dtype)
    y32 = y.astype(jnp.float32)
    y32 = y32 * jax.lax.rsqrt(jnp.mean(y32 * y32, axis=-1, keepdims=True) + eps)
    return y, (y32 * scale.astype(jnp.float32)).astype(x.dtype)
