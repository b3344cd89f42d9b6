"""Which cache rows a sparse forward reads: pure functions on lengths and scores."""

from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from jaxspec.types import Array
from pallas_kernels import row_selection


def budget(rho: float, min_keep: int, length: Array, limit: Array) -> Array:
    """int32 [B] rows to keep of `length` [B]: ceil(rho * length), at least `min_keep`, at most `limit` [B].

    rho counts as the nearest fraction with a denominator up to 10,000, so that 0.07 of 100 rows are 7 and not 8.
    """
    return jnp.minimum(jnp.maximum(_share(rho, length), min_keep), limit)


def buffer_width(rho: float, min_keep: int, capacity: int) -> int:
    """The largest budget of any length up to `capacity`: the static width of an index buffer."""
    return min(max(_share(rho, capacity), min_keep), capacity)


def _share(rho: float, length: Any) -> Any:
    share = Fraction(repr(float(rho))).limit_denominator(10_000)
    whole, rest = length // share.denominator, length % share.denominator
    # split so that products stay below 2^31
    return whole * share.numerator - (-rest * share.numerator) // share.denominator


def top_rows(scores: Array, valid: Array, k: Array, width: int, backend: str | None) -> Array:
    """The k[b] best of rows 0..valid[b]-1 in every layer, in one call over all layers.

    Args:
        scores: float32 [L, B, S].
        valid: int32 [B].
        k: int32 [B].
        width: static size of the result.
        backend: see `pallas_kernels.dispatch`.

    Returns:
        int32 [L, B, width], as in `KVSelection.rows`.
    """
    layers, batch, capacity = scores.shape
    rows, _ = row_selection(
        scores.reshape(layers * batch, capacity),
        jnp.tile(valid, layers),
        jnp.tile(k, layers),
        width=width,
        backend=backend,
    )
    return rows.reshape(layers, batch, width)


def sink_and_recent_rows(length: Array, k: Array, sinks: int, width: int) -> Array:
    """The first `sinks` rows and the k[b] - sinks newest of rows 0..length[b]-1 (StreamingLLM, arXiv 2309.17453).

    Args:
        length: int32 [B].
        k: int32 [B], at most `length`.
        sinks: how many of the first rows.
        width: static size of the result, at least every k.

    Returns:
        int32 [1, B, width], as in `KVSelection.rows`; one set for all layers.
    """
    slot = jnp.arange(width, dtype=jnp.int32)
    rows = jnp.where(slot < sinks, slot, length[:, None] - k[:, None] + slot)
    return jnp.where(slot < k[:, None], rows, -1)[None]
