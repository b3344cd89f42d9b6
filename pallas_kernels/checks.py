"""Shape and dtype checks shared by the ops. Each raises ValueError with the name, what it is and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def shape(name: str, array: jax.Array, expected: Sequence[int | None], meaning: str) -> None:
    """Checks rank and sizes; None in `expected` accepts any size of at least 1."""
    got = tuple(array.shape)
    sizes_fit = (n >= 1 if e is None else n == e for n, e in zip(got, expected, strict=False))
    if len(got) != len(expected) or not all(sizes_fit):
        wanted = ", ".join("any >= 1" if e is None else str(e) for e in expected)
        raise ValueError(f"{name} has shape {got}; it must be {meaning}, here [{wanted}]")


def dtype(name: str, array: jax.Array, allowed: Sequence[jnp.dtype]) -> None:
    """Checks that the dtype is one of `allowed`."""
    if array.dtype not in [jnp.dtype(d) for d in allowed]:
        names = ", ".join(jnp.dtype(d).name for d in allowed)
        raise ValueError(f"{name} has dtype {array.dtype}; allowed: {names}")


def product(name: str, array: jax.Array, expected: Sequence[int | None], meaning: str, like: jnp.dtype) -> None:
    """Checks an array of the expected shape and dtype, or float32 partial sums of one with an axis in front."""
    if array.ndim == len(expected) + 1:
        shape(name, array, (None, *expected), f"partial sums of {meaning}")
        dtype(name, array, (jnp.float32,))
    else:
        shape(name, array, expected, meaning)
        dtype(name, array, (like,))


def int32(name: str, array: jax.Array, expected: Sequence[int | None], meaning: str) -> None:
    """Checks an int32 array of the expected shape, see `shape`."""
    shape(name, array, expected, meaning)
    dtype(name, array, (jnp.int32,))


def attention_operands(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """Checks q [B,T,N,H] against k and v [B,S,K,H]: one float dtype, N a multiple of K."""
    query_and_keys(q, k, "[B,T,N,H]")
    shape("v", v, k.shape, "[B,S,K,H] like k")
    dtype("v", v, (q.dtype,))


def query_and_keys(q: jax.Array, k: jax.Array, q_meaning: str) -> None:
    """Checks q [B,T,N,H] against k [B,S,K,H]: one float dtype, N a multiple of K."""
    shape("q", q, (None,) * 4, q_meaning)
    dtype("q", q, FLOATS)
    batch, _, heads, head_dim = q.shape
    shape("k", k, (batch, None, None, head_dim), "[B,S,K,H] with q's B and H")
    dtype("k", k, (q.dtype,))
    if heads % k.shape[2]:
        raise ValueError(f"q has {heads} heads and k has {k.shape[2]}; q's must be a multiple of k's")
