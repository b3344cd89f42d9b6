"""Exact, stable top-k of long score rows with an output of static size."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import checks, dispatch


def row_selection(
    scores: jax.Array,
    length: jax.Array,
    k: jax.Array,
    *,
    width: int,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Selects the k[r] largest of scores[r, :length[r]], in the given dtype and without approximation.

    Equal scores go to the lower index (-0.0 equals 0.0). NaN is never chosen; -inf is an ordinary lowest score. Entries
    at or past the length change nothing, whatever they hold.

    Args:
      scores: [R, S], bfloat16 or float32.
      length: int32 [R]; values outside [0, S] are clipped.
      k: int32 [R], how many to select. At most min(length, width) are; a negative k selects none.
      width: static size of the output, 1 .. S.
      backend: 'pallas' (GPU kernel), 'interpret' (the same kernel, interpreted), 'xla' (plain jnp), or None for the
        platform's own.

    Returns:
      rows int32 [R, width], the selected indices in ascending order, then -1; and count int32 [R], how many there are:
      min(k, width, number of scores below the length that are not NaN).

    Raises:
      ValueError: a shape, dtype or width other than the above.
    """
    backend = dispatch.resolve(backend)
    checks.shape("scores", scores, (None, None), "[R,S]")
    checks.dtype("scores", scores, (jnp.bfloat16, jnp.float32))
    checks.int32("length", length, scores.shape[:1], "[R]")
    checks.int32("k", k, scores.shape[:1], "[R]")
    if not 1 <= width <= scores.shape[1]:
        raise ValueError(f"width is {width}; allowed is 1 .. {scores.shape[1]}, the row length of scores")

    if backend == "xla":
        from pallas_kernels.row_selection import xla

        return xla.row_selection(scores, length, k, width=width)
    from pallas_kernels.row_selection import triton

    return triton.row_selection(scores, length, k, width=width, interpret=backend == "interpret")
