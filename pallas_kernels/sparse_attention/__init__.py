"""Attention of T query rows over a listed subset of the cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import checks, dispatch


def sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: jax.Array,
    start: jax.Array,
    *,
    layer: int | None = None,
    count: jax.Array | None = None,
    valid: jax.Array | None = None,
    window: int = 0,
    scale: float,
    early: bool = False,
    backend: str | None = None,
) -> jax.Array:
    """Attends from T consecutive positions to the cache rows in `rows` and, with `valid`, to every row from there on.

    Query t of batch row b stands at position start[b] + t. It sees a listed row iff 0 <= row <= start[b] + t, and with
    `valid` also rows valid[b] .. start[b] + t. Rows outside those change nothing, whatever they hold. A query that
    sees no row gives zeros.

    Args:
      q: [B, T, N, H], float32, bfloat16 or float16.
      k: [B, S, K, H] of q's dtype; N is a multiple of K and query head n reads kv head n // (N // K).
      v: [B, S, K, H] of q's dtype.
      rows: int32 [B, M], cache rows shared by all heads; negative entries are padding. No row twice, and with `valid`
        none at or past valid[b]: a row that occurs twice counts twice. Or [L, B, M] with `layer`.
      start: int32 [B], position of query 0.
      layer: which of L lists is meant; the kernel reads it in place, where a slice would be a copy per layer.
      count: int32 [B], or [L, B] with `layer`: how many entries of a list are looked at, from its first; None: all of
        them. A long buffer that is mostly padding then costs no more than what it lists.
      valid: int32 [B], first of the recent rows, or None for no recent rows.
      window: static bound on the number of recent rows: start[b] + T - valid[b] <= window for every b. Rows past the
        bound are not read. Required with `valid`, and 0 without.
      scale: factor on the logits.
      early: whether all that reads the result are kernels of this package, see `early_launch`.
      backend: 'pallas' (GPU kernel), 'interpret' (the same kernel, interpreted), 'xla' (plain jnp), or None for the
        platform's own.

    Returns:
      [B, T, N, H] of q's dtype.

    Raises:
      ValueError: a shape, dtype or option other than the above; a head dim above 256 with a kernel backend.
    """
    backend = dispatch.resolve(backend)
    checks.attention_operands(q, k, v)
    rows, count, layer = check_lists(rows, start, layer, count, valid, window, batch=q.shape[0])
    options = {"valid": valid, "window": window, "scale": scale}
    if backend == "xla":
        from pallas_kernels.sparse_attention import reference

        return reference.sparse_attention(q, k, v, rows[layer], start, count=count[layer], **options)
    from pallas_kernels.sparse_attention import triton

    options |= {"early": early, "interpret": backend == "interpret"}
    return triton.sparse_attention(q, k, v, rows, start, layer=layer, count=count, **options)


def check_lists(
    rows: jax.Array,
    start: jax.Array,
    layer: int | None,
    count: jax.Array | None,
    valid: jax.Array | None,
    window: int,
    *,
    batch: int,
) -> tuple[jax.Array, jax.Array, int]:
    """Raises what `sparse_attention` raises of its lists; returns them as [L, B, M], their counts [L, B], and the
    layer."""
    if layer is None:
        checks.int32("rows", rows, (batch, None), "[B,M]")
        if count is not None:
            checks.int32("count", count, (batch,), "[B]")
            count = count[None]
        rows, layer = rows[None], 0
    else:
        checks.int32("rows", rows, (None, batch, None), "[L,B,M] with layer")
        if not 0 <= layer < rows.shape[0]:
            raise ValueError(f"layer is {layer}; rows has layers 0 to {rows.shape[0] - 1}")
        if count is not None:
            checks.int32("count", count, rows.shape[:2], "[L,B] with layer")
    for name, x in (("start", start), ("valid", valid)):
        if x is not None:
            checks.int32(name, x, (batch,), "[B]")
    if valid is None and window != 0:
        raise ValueError(f"window is {window} without valid; give valid, the first recent row, or leave window at 0")
    if valid is not None and window < 1:
        raise ValueError(f"window is {window}; with valid it must be at least 1, the most rows past valid")
    if count is None:
        count = jnp.full(rows.shape[:2], rows.shape[2], jnp.int32)
    return rows, count, layer
