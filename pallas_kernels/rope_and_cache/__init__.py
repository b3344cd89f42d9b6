"""From a fused projection to rotated queries and an updated KV cache, in one kernel instead of five small ones."""

from __future__ import annotations

import jax

from pallas_kernels import checks, dispatch


def rope_and_cache(
    qkv: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    start: jax.Array,
    *,
    bias: jax.Array | None = None,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds the bias, norms and rotates q and k, and writes k and v into the cache at rows start..start + T - 1.

    Each step rounds to the cache's dtype, as separate layers would. Dimension i of a head rotates with i + H / 2
    (RoFormer, arXiv 2104.09864); norms are RMS norms over a head, float32 inside, before the rotation.

    Args:
      qkv: [B, T, K, G + 2, H], for every kv head its G query heads, then its key, then its value; or partial sums of
        it, float32 [C, B, T, K, G + 2, H], whose sum rounds to the cache's dtype.
      k_cache: [B, S, K, H] of qkv's dtype; v_cache the same.
      cos: float32 [B, T, H / 2]; sin the same.
      start: int32 [B]; start + T must not exceed S (not checked: the values are traced).
      bias: [K, G + 2, H], added first.
      q_scale: [H], scale of the query norm, together with k_scale [H]; None: no norm.
      eps: added to the mean square.
      backend: see `pallas_kernels.dispatch`.

    Returns:
      q [B, T, K * G, H], and the two caches. The kernel writes them in place where XLA lets it alias its operands.

    Raises:
      ValueError: a shape or dtype other than the above, or one norm scale without the other.
    """
    backend = dispatch.resolve(backend)
    check_operands(qkv, k_cache, v_cache, cos, sin, start, bias, q_scale, k_scale)
    options = {"bias": bias, "q_scale": q_scale, "k_scale": k_scale, "eps": eps}
    if backend == "xla":
        from pallas_kernels.rope_and_cache import reference

        return reference.rope_and_cache(qkv, k_cache, v_cache, cos, sin, start, **options)
    from pallas_kernels.rope_and_cache import triton

    interpret = backend == "interpret"
    return triton.rope_and_cache(qkv, k_cache, v_cache, cos, sin, start, **options, interpret=interpret)


def check_operands(
    qkv: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    start: jax.Array,
    bias: jax.Array | None,
    q_scale: jax.Array | None,
    k_scale: jax.Array | None,
) -> None:
    """Raises what `rope_and_cache` raises of its operands."""
    checks.dtype("k_cache", k_cache, checks.FLOATS)
    checks.product("qkv", qkv, (None,) * 5, "[B,T,K,G+2,H]", k_cache.dtype)
    batch, num_rows, kv_heads, members, head_dim = qkv.shape[-5:]
    if members < 3 or head_dim % 2:
        raise ValueError(f"qkv has shape {qkv.shape}; it must be [B,T,K,G+2,H] with G >= 1 and an even H")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        checks.shape(name, cache, (batch, None, kv_heads, head_dim), "[B,S,K,H]")
        checks.dtype(name, cache, (k_cache.dtype,))
    checks.shape("v_cache", v_cache, k_cache.shape, "[B,S,K,H] like k_cache")
    if num_rows > k_cache.shape[1]:
        raise ValueError(f"{num_rows} rows do not fit a cache of {k_cache.shape[1]}")
    for name, table in (("cos", cos), ("sin", sin)):
        checks.shape(name, table, (batch, num_rows, head_dim // 2), "[B,T,H/2]")
        checks.dtype(name, table, ("float32",))
    checks.int32("start", start, (batch,), "[B]")
    if bias is not None:
        checks.shape("bias", bias, (kv_heads, members, head_dim), "[K,G+2,H]")
    if (q_scale is None) != (k_scale is None):
        raise ValueError("q_scale and k_scale go together: give both or neither")
    for name, scale in (("q_scale", q_scale), ("k_scale", k_scale)):
        if scale is not None:
            checks.shape(name, scale, (head_dim,), "[H]")
