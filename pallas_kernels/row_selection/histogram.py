"""Triton's histogram as a primitive of Pallas kernels: every score is an atomic addition in shared memory.

Pallas has no such primitive, and JAX no public way to add one. Without the private function that this takes,
`AVAILABLE` is False, and long rows are searched by `spread`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

try:
    from jax._src.pallas.triton.lowering import register_lowering
    from jaxlib.mlir import ir
    from jaxlib.triton import dialect
except ImportError:
    AVAILABLE = False
else:
    AVAILABLE = True

_histogram = Primitive("row_selection_histogram")


@_histogram.def_abstract_eval
def _(x, mask, *, bins):
    del x, mask
    return jax.core.ShapedArray((bins,), jnp.int32)


if AVAILABLE:

    @register_lowering(_histogram)
    def _(ctx, x, mask, *, bins):
        del ctx
        return dialect.histogram(ir.RankedTensorType.get((bins,), ir.IntegerType.get_signless(32)), x, mask=mask)


def histogram(x: jax.Array, mask: jax.Array, *, bins: int, interpret: bool) -> jax.Array:
    """int32 [bins]: how many of x int32 [E], of those that `mask` [E] selects, are 0, 1, .. bins - 1."""
    if interpret:
        return jnp.zeros(bins, jnp.int32).at[jnp.where(mask, x, bins)].add(1, mode="drop")
    return _histogram.bind(x, mask, bins=bins)
