"""Pallas-Triton kernel of `sparse_attention`: the attention kernel's loop over gathered rows.

The recent rows come first and the listed ones after them in one sequence of slots, so that one loop reads both and the
padding of the list is at the end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch, online
from pallas_kernels.attention_tile import Tile, load_queries, result_shapes, store_results, tile_of
from pallas_kernels.early_launch import early_launch
from pallas_kernels.sparse_attention.blocks import BlockSizes, choose_block_sizes
from pallas_kernels.tiling import ceil_div

# Past every position.
NOWHERE = 2**31 - 1


def start_slots(
    tile: Tile,
    k_ref: Any,
    v_ref: Any,
    rows_ref: Any,
    count_ref: Any,
    valid_ref: Any,
    layer_ref: Any,
    length: jax.Array,
    *,
    scale: float,
    blocks: BlockSizes,
    window: int,
) -> Callable[[jax.Array, online.State], online.State]:
    """Loads the first listed rows and returns what adds this split's slots to the state of queries [rows,H].

    k, v [B,S,K,H]; rows [L,B,M]; count [L,B]; valid [B] with a window; layer [1]. Cache rows from `length` on are not
    read. Queries that are loaded in between wait for memory together with the list.
    """
    # The layer is an operand, so that all layers of a model share one compiled kernel.
    layer = layer_ref[0]
    listed = jnp.clip(count_ref[layer, tile.batch], 0, rows_ref.shape[2])
    valid = valid_ref[tile.batch] if window else 0

    def listed_rows(step):
        slot = step * blocks.block_m + jnp.arange(blocks.block_m, dtype=jnp.int32)
        in_list = (slot >= window) & (slot < window + listed)
        row = pltriton.load(rows_ref.at[layer, tile.batch, jnp.maximum(slot - window, 0)], mask=in_list, other=-1)
        return jnp.where(slot < window, valid + slot, row) if window else row

    def attend(q, step, carry):
        state, row = carry
        # A step ahead: the address of a gather would otherwise wait for memory in the step itself.
        next_row = listed_rows(step + 1)
        # Rows that no query sees are not even read: they may hold NaN.
        here = (row >= 0) & (row < length)
        mask = here[:, None]
        if k_ref.shape[3] != tile.column.size:
            mask &= tile.in_head[None, :]

        def load(ref):
            at = ref.at[tile.batch, jnp.where(here, row, 0)[:, None], tile.kv_head, tile.column[None, :]]
            return pltriton.load(at, mask=mask, other=0.0)

        logits = pltriton.dot(q, load(k_ref), trans_b=True, allow_tf32=False) * (scale * math.log2(math.e))
        row = jnp.where(here, row, NOWHERE)
        logits = jnp.where(row[None, :] <= tile.position[:, None], logits, -jnp.inf)
        return online.update(state, logits, lambda: load(v_ref)), next_row

    # What is listed for a sequence that sees nothing is not looked at.
    steps = jnp.where(length > 0, pl.cdiv(window + listed, jnp.int32(blocks.block_m)), 0)
    begin = steps * tile.split // blocks.num_splits
    end = steps * (tile.split + 1) // blocks.num_splits
    first = listed_rows(begin)

    def run(q, state):
        step = functools.partial(attend, online.in_registers(q))
        return jax.lax.fori_loop(begin, end, step, (state, first))[0]

    return run


def _sparse_kernel(
    q_ref, k_ref, v_ref, rows_ref, start_ref, count_ref, layer_ref, *refs, scale: float, blocks: BlockSizes, window: int
) -> None:  # fmt: skip
    """Attends one tile: q [B,T,N,H], start [B], then valid [B] with a window, then the results."""
    valid_ref, results = (refs[0], refs[1:]) if window else (None, refs)
    num_rows, heads, head_dim = q_ref.shape[1:]
    capacity, kv_heads = k_ref.shape[1:3]
    tile = tile_of(num_rows, heads // kv_heads, head_dim, start_ref, blocks.rows)
    length = jnp.clip(start_ref[tile.batch] + num_rows, 0, capacity)
    lists = rows_ref, count_ref, valid_ref, layer_ref
    attend = start_slots(tile, k_ref, v_ref, *lists, length, scale=scale, blocks=blocks, window=window)
    q = load_queries(q_ref, tile)
    state = attend(q, online.initial(blocks.rows, tile.column.size))
    store_results(results, tile, state, num_rows)


@dispatch.shared("window", "scale", "early", "interpret", "blocks")
def sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: jax.Array,
    start: jax.Array,
    *,
    layer: int | jax.Array,
    count: jax.Array,
    valid: jax.Array | None = None,
    window: int = 0,
    scale: float,
    early: bool = False,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
) -> jax.Array:
    """See the public op, with rows [L,B,M] and count [L,B]; `blocks` overrides the choice for measurements."""
    batch, num_rows, heads, head_dim = q.shape
    kv_heads, listed = k.shape[2], rows.shape[2]
    if head_dim > 256:
        raise ValueError(f"q has head dim {head_dim}; the kernel allows at most 256 (backend 'xla' has no bound)")
    group = heads // kv_heads
    blocks = blocks or choose_block_sizes(batch, num_rows, kv_heads, group, listed, window, head_dim, q.dtype)
    shapes = result_shapes(batch, num_rows, heads, head_dim, q.dtype, blocks.num_splits)
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
