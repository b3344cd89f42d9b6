"""Dense attention of T query rows over a KV cache, optionally handing out one score per cache row."""

from __future__ import annotations

import jax

from pallas_kernels import checks, dispatch

SCORE_MODES = ("weight", "logit")


def cached_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    *,
    scale: float,
    scored_rows: jax.Array | None = None,
    score_mode: str = "weight",
    per_row: bool = False,
    early: bool = False,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Attends from T consecutive positions to every earlier row of the cache, the current rows included.

    Query t of batch row b stands at position start[b] + t and sees cache row s iff 0 <= s <= start[b] + t; its own key
    and value are already in the cache. Rows past the last position are scratch: whatever they hold, NaN included,
    changes nothing. A query that sees no row (negative position) gives zeros.

    Args:
      q: [B, T, N, H], float32, bfloat16 or float16.
      k: [B, S, K, H] of q's dtype; N is a multiple of K and query head n reads kv head n // (N // K).
      v: [B, S, K, H] of q's dtype.
      start: int32 [B], position of query 0.
      scale: factor on the logits.
      scored_rows: int32 [B, R], queries in [0, T) whose attention is handed out; a query may be named twice and then
        counts twice. Values outside [0, T) are clipped.
      score_mode: 'weight' sums softmax probabilities, 'logit' sums scaled raw logits. The sum runs over heads and,
        unless `per_row`, over the R scored queries.
      per_row: keep the scored queries apart.
      early: whether all that reads `out` are kernels of this package, see `early_launch`.
      backend: 'pallas' (GPU kernel, or cuDNN for prefill chunks), 'interpret' (the same kernel, interpreted), 'xla'
        (plain jnp), or None for the platform's own.

    Returns:
      out [B, T, N, H] of q's dtype, and scores: None without `scored_rows`, else float32 [B, S], or [B, R, S] with
      `per_row`. Cache rows that some scored query of that batch row does not see hold -inf.

    Raises:
      ValueError: a shape, dtype or option other than the above; a head dim above 256 with a kernel backend.
    """
    backend = dispatch.resolve(backend)
    checks.attention_operands(q, k, v)
    checks.int32("start", start, (q.shape[0],), "[B]")
    if scored_rows is not None:
        checks.int32("scored_rows", scored_rows, (q.shape[0], None), "[B,R]")
    if score_mode not in SCORE_MODES:
        raise ValueError(f"score_mode is {score_mode!r}; allowed are " + ", ".join(map(repr, SCORE_MODES)))
    if per_row and scored_rows is None:
        raise ValueError("per_row is set without scored_rows; name the rows whose scores are wanted")

    options = {"scale": scale, "scored_rows": scored_rows, "score_mode": score_mode, "per_row": per_row}
    if backend == "xla":
        from pallas_kernels.cached_attention import xla

        return xla.cached_attention(q, k, v, start, **options)
    from pallas_kernels.cached_attention import cudnn, triton

    available = backend == "pallas" and scored_rows is None and dispatch.has_cudnn()
    if cudnn.is_faster(*q.shape, k.shape[1], q.dtype, available=available):
        return cudnn.cached_attention(q, k, v, start, scale=scale), None
    return triton.cached_attention(q, k, v, start, **options, early=early, interpret=backend == "interpret")
