"""Pallas-Triton kernel of `sparse_attention`: the attention kernel's loop over gathered rows.

The recent rows come first and the listed ones after them in one sequence of slots, so that one loop reads both and the
padding of the list is at the end.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import online
from pallas_kernels.sparse_attention.blocks import BlockSizes, choose_block_sizes
from pallas_kernels.tiling import ceil_div, power_of_two

# Past every position.
NOWHERE = 2**31 - 1


def _last_entry(rows_ref: Any, layer: jax.Array, batch: jax.Array) -> jax.Array:
    """Returns one more than the index of the last entry of rows [L,B,M] that is not padding."""
    listed = rows_ref.shape[2]
    # Nothing can start before the end is known: most lists take one trip to memory.
    chunk = min(power_of_two(listed), 4096)

    def scan(step, end):
        slot = step * chunk + jnp.arange(chunk, dtype=jnp.int32)
        row = pltriton.load(rows_ref.at[layer, batch, slot], mask=slot < listed, other=-1)
        return jnp.maximum(end, jnp.max(jnp.where(row >= 0, slot + 1, 0)))

    chunks = ceil_div(listed, chunk)
    if chunks == 1:
        return scan(0, jnp.int32(0))
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(chunks), scan, jnp.int32(0))


def _sparse_kernel(
    q_ref,
    k_ref,
    v_ref,
    rows_ref,
    start_ref,
    layer_ref,
    *refs,
    scale: float,
    blocks: BlockSizes,
    window: int,
) -> None:
    """Attends one row tile to one split of the slots.

    q [B,T,N,H]; k, v [B,S,K,H]; rows [L,B,M]; start [B]; layer [1]; then valid [B] with a window; then the results:
    out [B,T,N,H] with one split, else acc [B,C,T,N,H], top and total [B,C,T,N].
    """
    num_results = 1 if blocks.num_splits == 1 else 3
    results = refs[-num_results:]
    num_rows, heads, head_dim = q_ref.shape[1:]
    capacity, kv_heads = k_ref.shape[1:3]
    group, listed = heads // kv_heads, rows_ref.shape[2]
    pairs, sharing = num_rows * group, blocks.kv_heads_per_tile
    row_tiles = ceil_div(sharing * pairs, blocks.rows)
    first_kv_head = pl.program_id(0) // row_tiles * blocks.kv_heads_per_program
    row_tile = pl.program_id(0) % row_tiles
    split, batch = pl.program_id(1), pl.program_id(2)

    tile_row = row_tile * blocks.rows + jnp.arange(blocks.rows, dtype=jnp.int32)
    in_tile = tile_row < sharing * pairs
    # Padding keeps an index past the end: interpret mode drops such stores, the GPU masks them.
    query = jnp.where(in_tile, tile_row % pairs // group, num_rows)
    column = jnp.arange(power_of_two(head_dim, 16), dtype=jnp.int32)
    in_head = column < head_dim
    where = in_tile[:, None] & in_head[None, :]
    # An operand, so that the layers of a model share one compiled kernel.
    start, layer = start_ref[batch], layer_ref[0]
    valid = refs[0][batch] if window else 0
    position = start + query
    length = jnp.clip(start + num_rows, 0, capacity)
    base_two = scale * math.log2(math.e)
    # The kv heads of a cache row are neighbours in memory: as neighbouring keys of a tile they are one piece to gather.
    key = jnp.arange(blocks.block_m * sharing, dtype=jnp.int32)
    same_head = tile_row[:, None] // pairs == key[None, :] % sharing

    tiles = []
    for kv_head in range(0, blocks.kv_heads_per_program, sharing):
        kv_head += first_kv_head
        head = (kv_head + tile_row // pairs) * group + tile_row % group
        q = pltriton.load(q_ref.at[batch, query[:, None], head[:, None], column[None, :]], mask=where, other=0.0)
        tiles.append((kv_head + key % sharing, head, online.in_registers(q)))

    def listed_rows(i):
        step = split + i * blocks.num_splits if blocks.interleaved else i
        slot = step * blocks.block_m + key // sharing
        in_list = (slot >= window) & (slot < window + listed)
        row = pltriton.load(rows_ref.at[layer, batch, jnp.maximum(slot - window, 0)], mask=in_list, other=-1)
        return jnp.where(slot < window, valid + slot, row) if window else row

    def attend(i, carry):
        states, rows = carry
        row, *next_rows = *rows, listed_rows(i + len(rows))
        # Rows that no query sees are not even read: they may hold NaN.
        here = (row >= 0) & (row < length)
        mask = here[:, None]
        if head_dim != column.size:
            mask &= in_head[None, :]
        visible = jnp.where(here, row, NOWHERE)[None, :] <= position[:, None]
        if sharing > 1:
            visible &= same_head

        def load(ref, kv_head):
            at = ref.at[batch, jnp.where(here, row, 0)[:, None], kv_head[:, None], column[None, :]]
            return pltriton.load(at, mask=mask, other=0.0)

        keys = [load(k_ref, kv_head) for kv_head, *_ in tiles]
        next_states = []
        for (kv_head, _, q), keys_, state in zip(tiles, keys, states, strict=True):
            logits = pltriton.dot(q, keys_, trans_b=True, allow_tf32=False) * base_two
            logits = jnp.where(visible, logits, -jnp.inf)
            next_states.append(online.update(state, logits, functools.partial(load, v_ref, kv_head)))
        return tuple(next_states), tuple(next_rows)

    if blocks.find_end:
        steps = pl.cdiv(window + _last_entry(rows_ref, layer, batch), jnp.int32(blocks.block_m))
    else:
        steps = jnp.int32(ceil_div(window + listed, blocks.block_m))
    # What is listed for a sequence that sees nothing is not looked at.
    steps = jnp.where(length > 0, steps, 0)
    if blocks.interleaved:
        begin, end = jnp.int32(0), (steps + blocks.num_splits - 1 - split) // blocks.num_splits
    else:
        begin, end = (steps * i // blocks.num_splits for i in (split, split + 1))
    states = tuple(online.initial(blocks.rows, column.size) for _ in tiles)
    # A step ahead, or the address of a gather would wait for memory in the step itself; unless the pipeline sees to it.
    first_rows = () if blocks.pipelined_list else (listed_rows(begin),)
    states, _ = jax.lax.fori_loop(begin, end, attend, (states, first_rows))

    for (_, head, _), state in zip(tiles, states, strict=True):
        if blocks.num_splits == 1:
            out, _ = online.finish(state)
            at = results[0].at[batch, query[:, None], head[:, None], column[None, :]]
            pltriton.store(at, out.astype(results[0].dtype), mask=where)
        else:
            acc, top, total = state
            at = results[0].at[batch, split, query[:, None], head[:, None], column[None, :]]
            pltriton.store(at, acc, mask=where)
            pltriton.store(results[1].at[batch, split, query, head], top, mask=in_tile)
            pltriton.store(results[2].at[batch, split, query, head], total, mask=in_tile)


def sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: jax.Array,
    start: jax.Array,
    *,
    layer: int,
    valid: jax.Array | None = None,
    window: int = 0,
    scale: float,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
) -> jax.Array:
    """See the public op, with rows [L,B,M]; `blocks` overrides the choice for measurements."""
    batch, num_rows, heads, head_dim = q.shape
    kv_heads, listed = k.shape[2], rows.shape[2]
    if head_dim > 256:
        raise ValueError(f"q has head dim {head_dim}; the kernel allows at most 256 (backend 'xla' has no bound)")
    group = heads // kv_heads
    blocks = blocks or choose_block_sizes(batch, num_rows, kv_heads, group, listed, window, head_dim, q.dtype)
    if kv_heads % blocks.kv_heads_per_program or blocks.kv_heads_per_program % blocks.kv_heads_per_tile:
        raise ValueError(f"k has {kv_heads} kv heads; {blocks} does not divide them")
    row_tiles = ceil_div(num_rows * group * blocks.kv_heads_per_tile, blocks.rows)
    if blocks.num_splits == 1:
        shapes = (jax.ShapeDtypeStruct(q.shape, q.dtype),)
    else:
        parts = (batch, blocks.num_splits, num_rows, heads)
        part = jax.ShapeDtypeStruct(parts, jnp.float32)
        shapes = (jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32), part, part)
    results = pl.pallas_call(
        functools.partial(_sparse_kernel, scale=scale, blocks=blocks, window=window),
        out_shape=shapes,
        grid=(kv_heads // blocks.kv_heads_per_program * row_tiles, blocks.num_splits, batch),
        compiler_params=pltriton.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="sparse_attention",
    )(q, k, v, rows, start, jnp.full(1, layer, jnp.int32), *(() if valid is None else (valid,)))
    if blocks.num_splits == 1:
        return results[0]
    return online.merge(*results, q.dtype, want_lse=False, interpret=interpret, name="sparse_attention_merge")[0]
