"""`cached_attention` in plain jnp for XLA's CPU backend: a loop over cache chunks up to the longest row.

Three things make it several times faster than one einsum over the whole cache, which transposes K and V in memory:
chunks stay in the core's cache between the copy out of the KV cache and their two products; chunks past the longest row
are never touched; and with few kv heads all of them are multiplied at once, by queries laid out block-diagonally, so
that K [C,K,H] is used as the matrix [C,K*H] that it is in memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

CHUNK = 1024
ROW_TILE = 256
# Up to this many rows, the pass that makes the output keeps every row's logits instead of a second pass making them.
KEEP_ROWS = 16
# Zero blocks multiply the arithmetic by the number of kv heads; past this it costs more than the copies it saves.
BLOCK_DIAGONAL_WORK = 1024


def cached_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    *,
    scale: float,
    scored_rows: jax.Array | None = None,
    score_mode: str = "weight",
    per_row: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """See the public op."""
    batch, num_rows, heads, head_dim = q.shape
    position = start[:, None] + jnp.arange(num_rows)
    keep = scored_rows is not None and score_mode == "weight" and num_rows <= KEEP_ROWS
    kept = None
    if num_rows <= ROW_TILE:
        out, *kept = _attend(q, k, v, position, scale, keep)
    else:
        tiles = -(-num_rows // ROW_TILE)
        padding = tiles * ROW_TILE - num_rows
        # Padding rows see nothing.
        q_tiles = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0))).reshape(batch, tiles, ROW_TILE, heads, head_dim)
        positions = jnp.pad(position, ((0, 0), (0, padding)), constant_values=-1).reshape(batch, tiles, ROW_TILE)
        operands = jnp.swapaxes(q_tiles, 0, 1), jnp.swapaxes(positions, 0, 1)
        out = jax.lax.map(lambda tile: _attend(tile[0], k, v, tile[1], scale, keep=False)[0], operands)
        out = jnp.swapaxes(out, 0, 1).reshape(batch, -1, heads, head_dim)[:, :num_rows]
    if scored_rows is None:
        return out, None

    chosen = jnp.clip(scored_rows, 0, num_rows - 1)
    queries = jnp.take_along_axis(q, chosen[:, :, None, None], axis=1)
    positions = jnp.take_along_axis(position, chosen, axis=1)
    if score_mode == "weight":
        if keep:
            logits, top, total = (
                jnp.take_along_axis(x, chosen.reshape(batch, 1, 1, -1, *(1,) * (x.ndim - 4)), axis=3) for x in kept
            )
        else:
            _, logits, top, total = _attend(queries, k, v, positions, scale, keep=True)
        scores = jnp.exp(logits - top[..., None]) / jnp.where(total == 0.0, 1.0, total)[..., None]
        scores = jnp.sum(scores, axis=(1, 2))  # [B,K,G,R,S] -> [B,R,S]
        scores = scores if per_row else jnp.sum(scores, axis=1)
    else:
        # Logits are linear in the query: one summed query per kv head, and one product over all kv heads.
        summed = queries.reshape(batch, -1, k.shape[2], heads // k.shape[2], head_dim).astype(jnp.float32)
        summed = jnp.sum(summed, axis=3 if per_row else (1, 3))
        summed = summed.reshape(batch, -1, k.shape[2] * head_dim)
        scores = scale * _logits(summed, k, jnp.max(positions) + 1)
        scores = scores if per_row else scores[:, 0]
    visible = jnp.min(positions, axis=1) + 1
    visible = visible.reshape(batch, *(1,) * (scores.ndim - 1))
    return out, jnp.where(jnp.arange(k.shape[1]) < visible, scores, -jnp.inf)


def _chunks(capacity: int) -> int:
    return min(CHUNK, capacity)


def _slice(x: jax.Array, step: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chunk `step` of x [B,S,K,H], the cache row of each of its rows, and which of them no chunk before it had."""
    first = jnp.minimum(step * size, x.shape[1] - size)
    row = first + jnp.arange(size)
    return jax.lax.dynamic_slice_in_dim(x, first, size, axis=1).astype(jnp.float32), row, row >= step * size


def _logits(summed: jax.Array, k: jax.Array, length: jax.Array) -> jax.Array:
    """summed [B,R,K*H] times k [B,S,K,H], up to cache row `length`; what is past it is undefined."""
    batch, capacity = k.shape[:2]
    size = _chunks(capacity)

    def body(step, logits):
        keys, row, _ = _slice(k, step, size)
        part = jnp.einsum("brd,bsd->brs", summed, keys.reshape(batch, size, -1), precision="highest")
        return jax.lax.dynamic_update_slice_in_dim(logits, part, row[0], axis=2)

    steps = jnp.clip(-(-length // size), 0, -(-capacity // size))
    return jax.lax.fori_loop(0, steps, body, jnp.zeros((batch, summed.shape[1], capacity), jnp.float32))


def _attend(q, k, v, position, scale, keep):
    """Online softmax over chunks for q [B,T,N,H] at position [B,T].

    Returns out [B,T,N,H] and, with `keep`, the logits [B,K,G,T,S] and the softmax's maximum and sum [B,K,G,T].
    """
    batch, num_rows, heads, head_dim = q.shape
    capacity, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    size = _chunks(capacity)
    steps = jnp.clip(-(-(jnp.max(position) + 1) // size), 0, -(-capacity // size))
    # [B,K,G,T,H]
    queries = scale * jnp.transpose(
        q.reshape(batch, num_rows, kv_heads, group, head_dim).astype(jnp.float32), (0, 2, 3, 1, 4)
    )
    together = kv_heads > 1 and kv_heads * num_rows * heads <= BLOCK_DIAGONAL_WORK
    if together:
        eye = jnp.eye(kv_heads, dtype=jnp.float32)
        diagonal = queries[:, :, :, :, None] * eye[None, :, None, None, :, None]
        diagonal = diagonal.reshape(batch, -1, kv_heads * head_dim)

    def body(step, carry):
        acc, top, total, kept = carry
        keys, row, new = _slice(k, step, size)
        values = _slice(v, step, size)[0]
        # 0 * NaN is NaN: rows that no query sees must leave V as well.
        values = jnp.where((row <= jnp.max(position, axis=1)[:, None])[:, :, None, None], values, 0.0)
        if together:
            logits = jnp.einsum("bnd,bsd->bns", diagonal, keys.reshape(batch, size, -1), precision="highest")
            logits = logits.reshape(batch, kv_heads, group, num_rows, size)
        else:
            logits = jnp.einsum("bkgth,bskh->bkgts", queries, keys, precision="highest")
        visible = (row <= position[:, :, None]) & new
        logits = jnp.where(visible[:, None, None], logits, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(logits, axis=-1))
        weights = jnp.exp(logits - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        if together:
            mixed = weights.reshape(batch, -1, size)
            out = jnp.einsum("bns,bsd->bnd", mixed, values.reshape(batch, size, -1), precision="highest")
            out = out.reshape(batch, kv_heads, group, num_rows, kv_heads, head_dim)
            out = jnp.einsum("bkgtjh,kj->bkgth", out, eye, precision="highest")
        else:
            out = jnp.einsum("bkgts,bskh->bkgth", weights, values, precision="highest")
        if keep:
            # The last chunk may reach back into the one before it, whose logits must survive.
            old = jax.lax.dynamic_slice_in_dim(kept, row[0], size, axis=4)
            kept = jax.lax.dynamic_update_slice_in_dim(kept, jnp.where(new, logits, old), row[0], axis=4)
        return acc * shrink[..., None] + out, new_top, total * shrink + jnp.sum(weights, axis=-1), kept

    shape = queries.shape[:4]
    carry = (
        jnp.zeros(queries.shape, jnp.float32),
        jnp.full(shape, jnp.finfo(jnp.float32).min),
        jnp.zeros(shape, jnp.float32),
        jnp.full((*shape, capacity), -jnp.inf) if keep else None,
    )
    acc, top, total, kept = jax.lax.fori_loop(0, steps, body, carry)
    out = acc / jnp.where(total == 0.0, 1.0, total)[..., None]
    return jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(q.shape).astype(q.dtype), kept, top, total
