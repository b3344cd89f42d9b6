"""Residual addition and RMS norm in one pass."""

from __future__ import annotations

import jax

from pallas_kernels import checks, dispatch


def add_rms_norm(
    x: jax.Array,
    update: jax.Array | None,
    scale: jax.Array,
    *,
    eps: float,
    early: bool = False,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """y = x + update, and the RMS norm of y over the last axis (Zhang and Sennrich, arXiv 1910.07467).

    The sum rounds to x's dtype before the norm, as separate layers would; the norm is float32 inside.

    Args:
      x: [B, T, D], float32, bfloat16 or float16.
      update: like x, or None for no addition, or float32 [C, B, T, D]: partial sums, whose sum rounds to x's dtype.
      scale: [D], any float dtype.
      eps: added to the mean square.
      early: whether all that reads the results are kernels of this package, see `early_launch`.
      backend: see `pallas_kernels.dispatch`.

    Returns:
      y and its norm, both like x.

    Raises:
      ValueError: a shape or dtype other than the above.
    """
    backend = dispatch.resolve(backend)
    checks.shape("x", x, (None, None, None), "[B,T,D]")
    checks.dtype("x", x, checks.FLOATS)
    if update is not None:
        checks.product("update", update, x.shape, "[B,T,D] like x", x.dtype)
    checks.shape("scale", scale, x.shape[-1:], "[D]")
    if backend == "xla":
        from pallas_kernels.add_rms_norm import reference

        return reference.add_rms_norm(x, update, scale, eps=eps)
    from pallas_kernels.add_rms_norm import triton

    return triton.add_rms_norm(x, update, scale, eps=eps, early=early, interpret=backend == "interpret")
