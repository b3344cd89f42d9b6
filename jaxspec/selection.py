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
    return layer_budgets(rho, min_keep, (1.0,), length, limit)[0]


def layer_budgets(rho: float, min_keep: int, shares: tuple[float, ...], length: Array, limit: Array) -> Array:
    """int32 [L, B] rows to keep in each layer: its share, in thousandths, of max(min_keep, ceil(rho * length)), rounded
    up; at most `limit`. See `budget`."""
    thousandths = jnp.array([round(1000 * share) for share in shares], jnp.int32)[:, None]
    return jnp.minimum(_of_thousand(thousandths, jnp.maximum(_share(rho, length), min_keep)), limit)


def buffer_width(rho: float, min_keep: int, capacity: int, shares: tuple[float, ...] = (1.0,)) -> int:
    """The largest budget of any layer and any length up to `capacity`: the static width of an index buffer."""
    return min(_of_thousand(round(1000 * max(shares)), max(_share(rho, capacity), min_keep)), capacity)


def _of_thousand(numerator: Any, rows: Any) -> Any:
    # split so that products stay below 2^31
    return rows // 1000 * numerator - (-(rows % 1000) * numerator) // 1000


def _share(rho: float, length: Any) -> Any:
    share = Fraction(repr(float(rho))).limit_denominator(10_000)
    whole, rest = length // share.denominator, length % share.denominator
    # split so that products stay below 2^31
    return whole * share.numerator - (-rest * share.numerator) // share.denominator


def top_rows(scores: Array, valid: Array, k: Array, width: int, backend: str | None) -> Array:
    """The k best of rows 0..valid[b]-1 in every layer, in one call over all layers.

    Args:
        scores: float32 or bfloat16 [L, B, S].
        valid: int32 [B].
        k: int32 [B], or [L, B].
        width: static size of the result.
        backend: see `pallas_kernels.dispatch`.

    Returns:
        int32 [L, B, width], as in `KVSelection.rows`.
    """
    layers, batch, capacity = scores.shape
    rows, _ = row_selection(
        scores.reshape(layers * batch, capacity),
        jnp.tile(valid, layers),
        jnp.broadcast_to(k, (layers, batch)).reshape(-1),
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


def protect(scores: Array, length: Array, sinks: int, window: int) -> Array:
    """Puts the first `sinks` and the newest `window` of rows 0..length[b]-1 above all others: their scores become +inf.

    Args:
        scores: float32 [B, S].
        length: int32 [B].
        sinks: how many of the first rows.
        window: how many of the newest rows.
    """
    row = jnp.arange(scores.shape[1])
    length = length[:, None]
    return jnp.where((row < length) & ((row < sinks) | (row >= length - window)), jnp.inf, scores)


def promote(scores: Array, favoured: Array, length: Array, count: int, backend: str | None) -> Array:
    """Gives the score +inf to the `count` rows that `favoured` ranks highest among those that lack it so far.

    Rows that are promoted and rows that are protected end up level, so one top-k over the result takes both, without
    duplicates, and fills what is left of the budget by `scores`: a hierarchical budget.

    Args:
        scores: float32 [B, S], as `protect` returns them.
        favoured: float32 [B, S], the ranking that goes first.
        length: int32 [B]; only rows below it count.
        count: how many rows to promote, at least 1; all there are where fewer are left.
        backend: see `pallas_kernels.dispatch`.
    """
    batch, capacity = scores.shape
    there = jnp.arange(capacity) < length[:, None]
    left = jnp.sum(there & (scores < jnp.inf), axis=1, dtype=jnp.int32)
    candidates = jnp.where(scores < jnp.inf, favoured, -jnp.inf)
    width = min(count, capacity)
    rows, _ = row_selection(candidates, length, jnp.minimum(left, width), width=width, backend=backend)
    return scores.at[jnp.arange(batch)[:, None], jnp.where(rows < 0, capacity, rows)].set(jnp.inf, mode="drop")
