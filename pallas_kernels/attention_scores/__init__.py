"""Softmax mass of a few chosen heads, one number per cache row."""

from __future__ import annotations

import jax

from pallas_kernels import checks, dispatch


def attention_scores(
    q: jax.Array,
    k: jax.Array,
    q_pos: jax.Array,
    length: jax.Array,
    heads: tuple[int, ...],
    *,
    scale: float,
    backend: str | None = None,
) -> jax.Array:
    """Averages the attention weights of R queries and the given heads.

    Query r of batch row b stands at position q_pos[b, r]; its softmax runs over cache rows 0 .. q_pos[b, r]. Only rows
    below length[b] are handed out, so the result sums to 1 where every query's position is below the length. A query
    with a negative position adds zeros. Rows past every position change nothing, whatever they hold.

    Args:
      q: [B, R, N, H], float32, bfloat16 or float16.
      k: [B, S, K, H] of q's dtype; N is a multiple of K and query head n reads kv head n // (N // K).
      q_pos: int32 [B, R].
      length: int32 [B], number of cache rows to score.
      heads: distinct query heads in [0, N), static.
      scale: factor on the logits.
      backend: 'pallas' (GPU kernel), 'interpret' (the same kernel, interpreted), 'xla' (plain jnp), or None for the
        platform's own.

    Returns:
      float32 [B, S], -inf at rows >= length[b].

    Raises:
      ValueError: a shape, dtype, head or option other than the above; a head dim above 256 with a kernel backend.
    """
    backend = dispatch.resolve(backend)
    checks.query_and_keys(q, k, "[B,R,N,H]")
    checks.int32("q_pos", q_pos, q.shape[:2], "[B,R]")
    checks.int32("length", length, (q.shape[0],), "[B]")
    heads = tuple(int(head) for head in heads)
    if not heads or len(set(heads)) != len(heads) or not all(0 <= head < q.shape[2] for head in heads):
        raise ValueError(f"heads is {heads}; it must name distinct query heads in [0, {q.shape[2]}), at least one")

    if backend == "xla":
        from pallas_kernels.attention_scores import reference

        return reference.attention_scores(q, k, q_pos, length, heads, scale=scale)
    from pallas_kernels.attention_scores import triton

    return triton.attention_scores(q, k, q_pos, length, heads, scale=scale, interpret=backend == "interpret")
