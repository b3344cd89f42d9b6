"""`skinny_matmul` and `gated_matmul` in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def skinny_matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """See the public op; one part."""
    return jnp.dot(x, kernel, precision="highest", preferred_element_type=jnp.float32)[None]


def gated_matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """See the public op."""
    gate, up = (jnp.dot(x, kernel[:, i], precision="highest").astype(jnp.float32) for i in (0, 1))
    return (jax.nn.silu(gate) * up).astype(x.dtype)
