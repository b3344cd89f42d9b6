"""Products that several programs have computed parts of: whoever reads them adds the parts up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton


def sum_of_parts(product: jax.Array, ndim: int, dtype: jnp.dtype) -> jax.Array:
    """A product of `ndim` axes, as it is or from its float32 partial sums [C, ...], rounded to `dtype`."""
    return product if product.ndim == ndim else jnp.sum(product, axis=0).astype(dtype)


def load_sum(at: Callable[[int], Any], num_parts: int, mask: jax.Array) -> jax.Array:
    """float32 sum over the parts, in order, inside a Pallas kernel.

    Args:
      at: part -> a reference to its elements.
      num_parts: static.
      mask: which elements are read; the others are 0.
    """
    # all loads first: they wait for memory together
    parts = [pltriton.load(at(part), mask=mask, other=0.0) for part in range(num_parts)]
    total = parts[0].astype(jnp.float32)
    for part in parts[1:]:
        total += part
    return total
