"""Products of a few rows with a large weight: the weight is read once, at the rate of memory."""

from __future__ import annotations

import jax

from pallas_kernels import checks, dispatch

# More rows than this keep the matrix units busy, and a general matrix product wins.
MAX_ROWS = 64


def skinny_matmul(x: jax.Array, kernel: jax.Array, *, early: bool = False, backend: str | None = None) -> jax.Array:
    """Partial sums of x @ kernel, for an op that reads the product next and adds them up on the way (split-K).

    Args:
      x: [R, D], at most 64 rows.
      kernel: [D, N] of x's dtype.
      early: whether all that reads the result are kernels of this package, see `early_launch`.
      backend: see `pallas_kernels.dispatch`.

    Returns:
      float32 [C, R, N], whose sum over C is the product. C depends on the shapes alone.

    Raises:
      ValueError: a shape or dtype other than the above.
    """
    backend = dispatch.resolve(backend)
    _check(x, kernel, (x.shape[-1], None), "[D,N] with x's D")
    if backend == "xla":
        from pallas_kernels.skinny_matmul import reference

        return reference.skinny_matmul(x, kernel)
    from pallas_kernels.skinny_matmul import triton

    return triton.skinny_matmul(x, kernel, early=early, interpret=backend == "interpret")


def gated_matmul(x: jax.Array, kernel: jax.Array, *, early: bool = False, backend: str | None = None) -> jax.Array:
    """silu(x @ kernel[:, 0]) * (x @ kernel[:, 1]) (Shazeer, arXiv 2002.05202); both products round to x's dtype first.

    Args:
      x: [R, D], at most 64 rows.
      kernel: [D, 2, I] of x's dtype.
      early: whether all that reads the result are kernels of this package, see `early_launch`.
      backend: see `pallas_kernels.dispatch`.

    Returns:
      [R, I] like x.

    Raises:
      ValueError: a shape or dtype other than the above.
    """
    backend = dispatch.resolve(backend)
    _check(x, kernel, (x.shape[-1], 2, None), "[D,2,I] with x's D")
    if backend == "xla":
        from pallas_kernels.skinny_matmul import reference

        return reference.gated_matmul(x, kernel)
    from pallas_kernels.skinny_matmul import triton

    return triton.gated_matmul(x, kernel, early=early, interpret=backend == "interpret")


def _check(x: jax.Array, kernel: jax.Array, expected: tuple[int | None, ...], meaning: str) -> None:
    checks.shape("x", x, (None, None), "[R,D]")
    checks.dtype("x", x, checks.FLOATS)
    if x.shape[0] > MAX_ROWS:
        raise ValueError(f"x has {x.shape[0]} rows; at most {MAX_ROWS} are allowed")
    checks.shape("kernel", kernel, expected, meaning)
    checks.dtype("kernel", kernel, (x.dtype,))
