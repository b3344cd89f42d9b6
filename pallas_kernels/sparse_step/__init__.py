"""One new token per sequence: `rope_and_cache` and then `sparse_attention`, in one kernel."""

from __future__ import annotations

import jax

from pallas_kernels import dispatch
from pallas_kernels.rope_and_cache import check_operands as check_projection
from pallas_kernels.sparse_attention import check_lists


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
    """Writes the token's key and value to cache row start[b] and attends from position attend_at[b].

    The same as q, k_cache, v_cache = rope_and_cache(qkv, ...) and sparse_attention(q, k_cache, v_cache, rows,
    attend_at, ...), whose arguments these are, for T = 1 and with recent rows; only the attention's weights of the
    token itself are not rounded. Its row must not be listed: it is one of the recent rows.

    Returns:
      out [B, 1, K * G, H], and the two caches, which the kernel writes in place where XLA lets it alias its operands.

    Raises:
      ValueError: what those two raise; more than one token; a head dim above 256 with a kernel backend.
    """
    backend = dispatch.resolve(backend)
    check_projection(qkv, k_cache, v_cache, cos, sin, start, bias, q_scale, k_scale)
    if qkv.shape[-4] != 1:
        raise ValueError(f"qkv has {qkv.shape[-4]} tokens per sequence; allowed is 1")
    rows, layer = check_lists(rows, attend_at, layer, count, valid, window, batch=k_cache.shape[0])
    projection = {"bias": bias, "q_scale": q_scale, "k_scale": k_scale, "eps": eps}
    lists = {"count": count, "valid": valid, "window": window, "scale": scale}
    if backend == "xla":
        from pallas_kernels.rope_and_cache import reference as rope_reference
        from pallas_kernels.sparse_attention import reference as sparse_reference

        q, *cache = rope_reference.rope_and_cache(qkv, k_cache, v_cache, cos, sin, start, **projection)
        return sparse_reference.sparse_attention(q, *cache, rows[layer], attend_at, **lists), *cache
    from pallas_kernels.sparse_step import triton

    operands = (qkv, k_cache, v_cache, cos, sin, start, rows, attend_at)
    return triton.sparse_step(
        *operands, layer=layer, **projection, **lists, early=early, interpret=backend == "interpret"
    )
