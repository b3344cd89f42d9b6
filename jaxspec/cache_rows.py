"""Reading and writing a few consecutive rows of every sequence of a cache."""

import jax

from jaxspec.types import Array


def rows_from(x: Array, start: Array, count: int) -> Array:
    """x [B, S, ...] at rows start[b]..start[b] + count - 1: [B, count, ...]. `start` must leave room for them."""
    return jax.vmap(lambda x, start: jax.lax.dynamic_slice_in_dim(x, start, count))(x, start)


def put_rows(x: Array, rows: Array, start: Array) -> Array:
    """x [B, S, ...] with rows [B, T, ...] in place from start[b] on. `start` must leave room for them."""
    return jax.vmap(lambda x, rows, start: jax.lax.dynamic_update_slice_in_dim(x, rows, start, 0))(x, rows, start)
