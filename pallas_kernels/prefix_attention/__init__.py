"""Attention of many queries to one shared prefix, as a part of a softmax that goes on elsewhere.

The branches of KnapSpec's planner share each sequence's prefix and differ in their own few tokens only. Here all of
them attend to the prefix at once, so that a tile of its keys and values serves a whole tile of branches, and hand out
the log-sum-exp with which the rest is added.
"""

from __future__ import annotations

import jax

from pallas_kernels import checks, dispatch


def prefix_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    live: jax.Array,
    *,
    scale: float,
    rows: jax.Array | None = None,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends from Q queries per kv head to the same rows of each sequence.

    Rows that no query sees change nothing, whatever they hold, NaN included.

    Args:
      q: [B, K, Q, H], float32, bfloat16 or float16.
      k: [B', S, K, H] of q's dtype, B' >= B; later sequences are left out.
      v: like k.
      start: int32 [B], rows 0..start-1 are seen.
      live: int32 [], queries of each kv head that are wanted, from the first on; what is returned for the others is
        undefined, but `out` is finite, and a kernel saves their work.
      scale: factor on the logits.
      rows: int32 [B, S], the cache row that each row of k and v is a copy of, where they are not a cache themselves;
        negative ones are padding, and those at or past `start` are not seen.
      backend: 'pallas' (GPU kernel), 'interpret' (the same kernel, interpreted), 'xla' (plain jnp), or None for the
        platform's own.

    Returns:
      out float32 [B, K, Q, H] and the natural log of the softmax's sum, float32 [B, K, Q]: 0 and -inf where nothing is
      seen.

    Raises:
      ValueError: a shape, dtype or option other than the above; a head dim above 256 with a kernel backend.
    """
    backend = dispatch.resolve(backend)
    checks.shape("q", q, (None,) * 4, "[B,K,Q,H]")
    checks.dtype("q", q, checks.FLOATS)
    batch, kv_heads, _, head_dim = q.shape
    checks.shape("k", k, (None, None, kv_heads, head_dim), "[B',S,K,H] with q's K and H")
    checks.dtype("k", k, (q.dtype,))
    if k.shape[0] < batch:
        raise ValueError(f"k has {k.shape[0]} sequences; it must have at least q's {batch}")
    checks.shape("v", v, k.shape, "[B',S,K,H] like k")
    checks.dtype("v", v, (q.dtype,))
    checks.int32("start", start, (batch,), "[B]")
    checks.int32("live", live, (), "a scalar")
    if rows is not None:
        checks.int32("rows", rows, (batch, k.shape[1]), "[B,S] with k's S")

    if backend == "xla":
        from pallas_kernels.prefix_attention import xla

        return xla.prefix_attention(q, k, v, start, scale=scale, rows=rows)
    from pallas_kernels.prefix_attention import triton

    return triton.prefix_attention(q, k, v, start, live, scale=scale, rows=rows, interpret=backend == "interpret")
