"""Which cache rows a sparse forward reads: pure functions on lengths and scores."""

import jax.numpy as jnp
import numpy as np

from jaxspec.types import Array
from pallas_kernels import row_selection


def budget(rho: float, min_keep: int, length: Array, limit: Array) -> Array:
    """int32 [B] rows to keep of `length` [B]: ceil(rho * length), at least `min_keep`, at most `limit` [B]."""
    share = jnp.ceil(jnp.float32(rho) * length.astype(jnp.float32)).astype(jnp.int32)
    return jnp.minimum(jnp.maximum(share, min_keep), limit)


def buffer_width(rho: float, min_keep: int, capacity: int) -> int:
    """The largest budget of any length up to `capacity`: the static width of an index buffer."""
    share = int(np.ceil(np.float32(rho) * np.float32(capacity)))
    return min(max(share, min_keep), capacity)


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
