"""One new token per sequence: `rope_and_cache` and the attention after it in one kernel."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import checks, dispatch
from pallas_kernels.rope_and_cache import check_operands
from pallas_kernels.sparse_attention import check_lists


def cached_step(
    qkv: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    start: jax.Array,
    attend_at: jax.Array,
    *,
    scale: float,
    bias: jax.Array | None = None,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    eps: float = 1e-6,
    early: bool = False,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Writes the token's key and value to cache row start[b] and attends from position attend_at[b].

    The same as q, k_cache, v_cache = rope_and_cache(qkv, ...) and cached_attention(q, k_cache, v_cache, attend_at, ...)
    for T = 1 and attend_at[b] <= start[b] (not checked: the values are traced), only that the weight of the token
    itself is not rounded.

    Returns:
      out [B, 1, K * G, H], and the two caches, which the kernel writes in place where XLA lets it alias its operands.

    Raises:
      ValueError: what those two raise; more than one token.
    """
    projection = {"bias": bias, "q_scale": q_scale, "k_scale": k_scale}
    operands = (qkv, k_cache, v_cache, cos, sin, start)
    backend = _check(operands, attend_at, projection, backend)
    if backend == "xla":
        from pallas_kernels.cached_attention import xla
        from pallas_kernels.rope_and_cache import reference

        q, *cache = reference.rope_and_cache(*operands, **projection, eps=eps)
        return xla.cached_attention(q, *cache, attend_at, scale=scale)[0], *cache
    from pallas_kernels.attention_step import triton

    options = {"scale": scale, "eps": eps, "early": early, "interpret": backend == "interpret"}
    return triton.cached_step(triton.Token(*operands, **projection), attend_at, **options)


def sparse_step(
    qkv: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    start: jax.Array,
    rows: jax.Array,
    attend_at: jax.Array,
    *,
    layer: int | None = None,
    count: jax.Array | None = None,
    valid: jax.Array,
    window: int,
    scale: float,
    bias: jax.Array | None = None,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    eps: float = 1e-6,
    early: bool = False,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `cached_step`, with `sparse_attention` to `rows` and the recent rows, whose arguments these are.

    The token's own row must not be listed: it is one of the recent rows.

    Raises:
      ValueError: what `rope_and_cache` and `sparse_attention` raise; more than one token.
    """
    projection = {"bias": bias, "q_scale": q_scale, "k_scale": k_scale}
    operands = (qkv, k_cache, v_cache, cos, sin, start)
    backend = _check(operands, attend_at, projection, backend)
    rows, count, layer = check_lists(rows, attend_at, layer, count, valid, window, batch=k_cache.shape[0])
    lists = {"valid": valid, "window": window, "scale": scale}
    if backend == "xla":
        from pallas_kernels.rope_and_cache import reference as rope_reference
        from pallas_kernels.sparse_attention import reference

        q, *cache = rope_reference.rope_and_cache(*operands, **projection, eps=eps)
        return reference.sparse_attention(q, *cache, rows[layer], attend_at, count=count[layer], **lists), *cache
    from pallas_kernels.attention_step import triton

    lists |= {"layer": layer, "count": count}
    options = {"eps": eps, "early": early, "interpret": backend == "interpret"}
    return triton.sparse_step(triton.Token(*operands, **projection), rows, attend_at, **lists, **options)


def _check(
    operands: tuple[jax.Array, ...], attend_at: jax.Array, projection: dict[str, Any], backend: str | None
) -> str:
    """Returns the backend."""
    backend = dispatch.resolve(backend)
    check_operands(*operands, **projection)
    if operands[0].shape[-4] != 1:
        raise ValueError(f"qkv has {operands[0].shape[-4]} tokens per sequence; allowed is 1")
    checks.int32("attend_at", attend_at, (operands[1].shape[0],), "[B]")
    return backend
