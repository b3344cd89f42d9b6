"""Pallas-Triton kernel of `sparse_attention`: the attention kernel's loop over gathered rows.

The recent rows come first and the listed ones after them in one sequence of slots, so that one loop reads both and the
padding of the list is at the end.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch, online
from pallas_kernels.early_launch import early_launch
from pallas_kernels.sparse_attention.blocks import BlockSizes, choose_block_sizes
from pallas_kernels.tiling import ceil_div, power_of_two

# Past every position.
NOWHERE = 2**31 - 1


def _sparse_kernel(
    q_ref,
    k_ref,
    v_ref,
    rows_ref,
    start_ref,
    count_ref,
    layer_ref,
    *refs,
    scale: float,
    blocks: BlockSizes,
    window: int,
) -> None:
    """Attends one row tile to one split of the slots.

    q [B,T,N,H]; k, v [B,S,K,H]; rows [L,B,M]; start and count [B]; layer [1]; then valid [B] with a window; then the
    results: out [B,T,N,H] with one split, else acc [B,C,T,N,H], top and total [B,C,T,N].
    """
    num_results = 1 if blocks.num_splits == 1 else 3
    results = refs[-num_results:]
    num_rows, heads, head_dim = q_ref.shape[1:]
    capacity, kv_heads = k_ref.shape[1:3]
    group = heads // kv_heads
    row_tiles = ceil_div(num_rows * group, blocks.rows)
    kv_head, row_tile = pl.program_id(0) // row_tiles, pl.program_id(0) % row_tiles
    split, batch = pl.program_id(1), pl.program_id(2)

    tile_row = row_tile * blocks.rows + jnp.arange(blocks.rows, dtype=jnp.int32)
    # Padding keeps an index past the end: interpret mode drops such stores, the GPU masks them.
    query, head = tile_row // group, kv_head * group + tile_row % group
    in_tile = query < num_rows
    column = jnp.arange(power_of_two(head_dim, 16), dtype=jnp.int32)
    in_head = column < head_dim
    where = in_tile[:, None] & in_head[None, :]
    q = pltriton.load(q_ref.at[batch, query[:, None], head[:, None], column[None, :]], mask=where, other=0.0)
    q = online.in_registers(q)
    # The layer is an operand, so that all layers of a model share one compiled kernel.
    start, layer = start_ref[batch], layer_ref[0]
    listed = jnp.clip(count_ref[batch], 0, rows_ref.shape[2])
    valid = refs[0][batch] if window else 0
    position = start + query
    length = jnp.clip(start + num_rows, 0, capacity)
    base_two = scale * math.log2(math.e)

    def listed_rows(step):
        slot = step * blocks.block_m + jnp.arange(blocks.block_m, dtype=jnp.int32)
        in_list = (slot >= window) & (slot < window + listed)
        row = pltriton.load(rows_ref.at[layer, batch, jnp.maximum(slot - window, 0)], mask=in_list, other=-1)
        return jnp.where(slot < window, valid + slot, row) if window else row

    def attend(step, carry):
        state, row = carry
        # A step ahead: the address of a gather would otherwise wait for memory in the step itself.
        next_row = listed_rows(step + 1)
        # Rows that no query sees are not even read: they may hold NaN.
        here = (row >= 0) & (row < length)
        mask = here[:, None]
        if head_dim != column.size:
            mask &= in_head[None, :]

        def load(ref):
            at = ref.at[batch, jnp.where(here, row, 0)[:, None], kv_head, column[None, :]]
            return pltriton.load(at, mask=mask, other=0.0)

        logits = pltriton.dot(q, load(k_ref), trans_b=True, allow_tf32=False) * base_two
        row = jnp.where(here, row, NOWHERE)
        logits = jnp.where(row[None, :] <= position[:, None], logits, -jnp.inf)
        return online.update(state, logits, lambda: load(v_ref)), next_row

    # What is listed for a sequence that sees nothing is not looked at.
    steps = jnp.where(length > 0, pl.cdiv(window + listed, jnp.int32(blocks.block_m)), 0)
    begin = steps * split // blocks.num_splits
    end = steps * (split + 1) // blocks.num_splits
    state, _ = jax.lax.fori_loop(begin, end, attend, (online.initial(blocks.rows, column.size), listed_rows(begin)))

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


@dispatch.shared("window", "scale", "early", "interpret", "blocks")
def sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: jax.Array,
    start: jax.Array,
    *,
    layer: int | jax.Array,
    count: jax.Array | None = None,
    valid: jax.Array | None = None,
    window: int = 0,
    scale: float,
    early: bool = False,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
) -> jax.Array:
    """See the public op, with rows [L,B,M]; `blocks` overrides the choice for measurements."""
    batch, num_rows, heads, head_dim = q.shape
    kv_heads, listed = k.shape[2], rows.shape[2]
    count = jnp.full(batch, listed, jnp.int32) if count is None else count
    if head_dim > 256:
        raise ValueError(f"q has head dim {head_dim}; the kernel allows at most 256 (backend 'xla' has no bound)")
    group = heads // kv_heads
    blocks = blocks or choose_block_sizes(batch, num_rows, kv_heads, group, listed, window, head_dim, q.dtype)
    if blocks.num_splits == 1:
        shapes = (jax.ShapeDtypeStruct(q.shape, q.dtype),)
    else:
        parts = (batch, blocks.num_splits, num_rows, heads)
        part = jax.ShapeDtypeStruct(parts, jnp.float32)
        shapes = (jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32), part, part)
    kernel = functools.partial(_sparse_kernel, scale=scale, blocks=blocks, window=window)
    results = pl.pallas_call(
        # several parts are read by the merge, whoever reads the result
        early_launch(kernel, early or blocks.num_splits > 1, interpret=interpret),
        out_shape=shapes,
        grid=(kv_heads * ceil_div(num_rows * group, blocks.rows), blocks.num_splits, batch),
        compiler_params=pltriton.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="sparse_attention",
    )(q, k, v, rows, start, count, jnp.asarray(layer, jnp.int32).reshape(1), *(() if valid is None else (valid,)))
    if blocks.num_splits == 1:
        return results[0]
    name = "sparse_attention_merge"
    return online.merge(*results, q.dtype, want_lse=False, early=early, interpret=interpret, name=name)[0]
