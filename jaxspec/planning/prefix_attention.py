"""Attention of many queries to one shared prefix, as a part of a softmax that goes on elsewhere.

The branches of the planner share each sequence's prefix and differ in their own few tokens only. Here all of them
attend to the prefix at once, so that a tile of its keys and values serves a whole tile of branches, and hand out the
log-sum-exp with which the rest is added.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jaxspec.types import Array
from pallas_kernels import dispatch, online
from pallas_kernels.cached_attention.blocks import BlockSizes, choose_block_sizes
from pallas_kernels.tiling import ceil_div, power_of_two

CHUNK = 1024  # rows per step without a kernel


def prefix_attention(
    q: Array,
    k: Array,
    v: Array,
    start: Array,
    live: Array,
    *,
    scale: float,
    rows: Array | None = None,
    backend: str | None = None,
) -> tuple[Array, Array]:
    """Attends from Q queries per kv head to the same rows of each sequence.

    Rows that no query sees are not read: they may hold anything, NaN included.

    Args:
        q: [B, K, Q, H], float32, bfloat16 or float16.
        k: [B', S, K, H] of q's dtype, B' >= B; later sequences are left out.
        v: like k.
        start: int32 [B], rows 0..start-1 are seen.
        live: int32 [], queries of each kv head that are wanted, from the first on; what is returned for the others
            is undefined, but finite, and a kernel saves their work.
        scale: factor on the logits.
        rows: int32 [B, S], the cache row that each row of k and v is a copy of, where they are not a cache themselves;
            negative ones are padding, and those at or past `start` are not seen.
        backend: as in `pallas_kernels`.

    Returns:
        out float32 [B, K, Q, H] and the natural log of the softmax's sum, float32 [B, K, Q]: 0 and -inf where nothing
        is seen.

    Raises:
        ValueError: k, v, start or rows of other shapes, or of another dtype.
    """
    batch, kv_heads, _, head_dim = q.shape
    if k.shape != v.shape or k.shape[0] < batch or k.shape[2:] != (kv_heads, head_dim):
        raise ValueError(f"prefix attention: k and v must be [>= {batch}, S, {kv_heads}, {head_dim}] for q of shape "
                         f"{q.shape}, got {k.shape} and {v.shape}")  # fmt: skip
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"prefix attention: q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if start.shape != (batch,) or (rows is not None and rows.shape != (batch, k.shape[1])):
        shape = None if rows is None else rows.shape
        raise ValueError(f"prefix attention: start must be [{batch}] and rows [{batch}, {k.shape[1]}], "
                         f"got {start.shape} and {shape}")  # fmt: skip
    backend = dispatch.resolve(backend)
    if backend == "xla":
        return _in_chunks(q, k, v, start, rows, scale)
    return _kernel_call(q, k, v, start, live, rows, scale=scale, interpret=backend == "interpret")


def _in_chunks(q: Array, k: Array, v: Array, start: Array, rows: Array | None, scale: float) -> tuple[Array, Array]:
    """A running softmax over chunks, up to the longest prefix."""
    batch, kv_heads, queries, head_dim = q.shape
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    options = {"preferred_element_type": jnp.float32, "precision": precision}
    count = jnp.max(start) if rows is None else k.shape[1]
    rows = jnp.arange(k.shape[1], dtype=jnp.int32)[None] if rows is None else rows
    seen = (rows >= 0) & (rows < start[:, None])
    size = min(CHUNK, k.shape[1])

    def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        # the last chunk is moved back into the cache; rows that it shares with the one before are masked
        first = jnp.minimum(i * size, k.shape[1] - size)
        keys, values = (jax.lax.dynamic_slice(t, (0, first, 0, 0), (batch, size, *t.shape[2:])) for t in (k, v))
        new = jax.lax.dynamic_slice(seen, (0, first), (batch, size)) & (first + jnp.arange(size) >= i * size)
        # scratch rows may hold anything, and 0 * NaN is NaN
        values = jnp.where(new[:, :, None, None], values, 0)
        logits = jnp.einsum("bkqh,bskh->bkqs", q, keys, **options) * scale
        logits = jnp.where(new[:, None, None], logits, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(logits, axis=-1, keepdims=True))
        weights, kept = jnp.exp(logits - new_top), jnp.exp(top - new_top)
        acc = acc * kept + jnp.einsum("bkqs,bskh->bkqh", weights.astype(values.dtype), values, **options)
        return new_top, total * kept + jnp.sum(weights, axis=-1, keepdims=True), acc

    column = jnp.zeros((batch, kv_heads, queries, 1), jnp.float32)
    carry = column + online.LOWEST, column, jnp.zeros((batch, kv_heads, queries, head_dim), jnp.float32)
    top, total, acc = jax.lax.fori_loop(0, -(-count // size), step, carry)
    some = total > 0
    total = jnp.where(some, total, 1)
    return acc / total, jnp.where(some, top + jnp.log(total), -jnp.inf)[..., 0]


@dispatch.shared("scale", "interpret")
def _kernel_call(
    q: Array, k: Array, v: Array, start: Array, live: Array, rows: Array | None, *, scale: float, interpret: bool
) -> tuple[Array, Array]:
    batch, kv_heads, queries, head_dim = q.shape
    blocks = choose_block_sizes(batch, queries, kv_heads, 1, k.shape[1], head_dim, q.dtype)
    # as one query of K * Q heads, which is how the merge knows them
    parts = (batch, blocks.num_splits, 1, kv_heads * queries)
    acc, top, total = pl.pallas_call(
        functools.partial(_kernel, scale=scale, blocks=blocks),
        out_shape=[
            jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32),
            *[jax.ShapeDtypeStruct(parts, jnp.float32)] * 2,
        ],
        grid=(kv_heads * ceil_div(queries, blocks.rows), blocks.num_splits, batch),
        compiler_params=pltriton.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="prefix_attention",
    )(q, k, v, start, jnp.reshape(live, 1).astype(jnp.int32), *([] if rows is None else [rows]))
    name = "prefix_attention_merge"
    out, lse = online.merge(acc, top, total, jnp.float32, want_lse=True, interpret=interpret, name=name)
    lse = jnp.where(lse == jnp.inf, -jnp.inf, lse) * math.log(2)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def _kernel(q_ref, k_ref, v_ref, start_ref, live_ref, *refs, scale: float, blocks: BlockSizes) -> None:
    """Attends one tile of queries to one split of the rows.

    q [B,K,Q,H]; k, v [B',S,K,H]; start [B]; live [1]; then rows [B,S] where there are any; then the results
    acc [B,C,1,K*Q,H], top and total [B,C,1,K*Q].
    """
    *listed, acc_ref, top_ref, total_ref = refs
    queries, head_dim = q_ref.shape[2:]
    capacity = k_ref.shape[1]
    tiles = ceil_div(queries, blocks.rows)
    kv_head, tile = pl.program_id(0) // tiles, pl.program_id(0) % tiles
    split, batch = pl.program_id(1), pl.program_id(2)

    query = tile * blocks.rows + jnp.arange(blocks.rows, dtype=jnp.int32)
    in_tile = query < queries
    column = jnp.arange(power_of_two(head_dim, 16), dtype=jnp.int32)
    in_head = column < head_dim
    where = in_tile[:, None] & in_head[None, :]
    q = pltriton.load(q_ref.at[batch, kv_head, query[:, None], column[None, :]], mask=where, other=0.0)
    start = start_ref[batch]
    length = jnp.int32(capacity) if listed else jnp.clip(start, 0, capacity)
    steps = jnp.where(tile * blocks.rows < live_ref[0], pl.cdiv(length, blocks.block_s), 0)
    begin, end = steps * split // blocks.num_splits, steps * (split + 1) // blocks.num_splits
    base_two = scale * math.log2(math.e)

    def attend(step, state, masked):
        row = step * blocks.block_s + jnp.arange(blocks.block_s, dtype=jnp.int32)
        seen = row < length
        if listed:
            original = pltriton.load(listed[0].at[batch, row], mask=seen, other=-1)
            seen = (original >= 0) & (original < start)
        mask = seen[:, None] if masked else None
        if head_dim != column.size:
            mask = in_head[None, :] if mask is None else mask & in_head[None, :]

        def load(ref):
            at = ref.at[batch, row[:, None], kv_head, column[None, :]]
            return pltriton.load(at, mask=mask, other=None if mask is None else 0.0)

        logits = pltriton.dot(q, load(k_ref), trans_b=True, allow_tf32=False) * base_two
        if masked:
            logits = jnp.where(seen[None, :], logits, -jnp.inf)
        return online.update(state, logits, lambda: load(v_ref))

    state = online.initial(blocks.rows, column.size)
    if not listed:
        middle = jnp.clip(length // blocks.block_s, begin, end)
        state = jax.lax.fori_loop(begin, middle, functools.partial(attend, masked=False), state)
        begin = middle
    acc, top, total = jax.lax.fori_loop(begin, end, functools.partial(attend, masked=True), state)
    # Padding keeps an index past the end: interpret mode drops such stores, the GPU masks them. It may be the next kv
    # head's, so that one is out of bounds for all of them.
    head = jnp.where(in_tile, kv_head * queries + query, acc_ref.shape[3])
    pltriton.store(acc_ref.at[batch, split, 0, head[:, None], column[None, :]], acc, mask=where)
    pltriton.store(top_ref.at[batch, split, 0, head], top, mask=in_tile)
    pltriton.store(total_ref.at[batch, split, 0, head], total, mask=in_tile)
