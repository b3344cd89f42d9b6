"""Softmax weights of a few queries over all cache rows: stored step by step, then normalised and summed.

The log-sum-exp is known only after the last step. Each step therefore stores the weights relative to the step's own
largest logit, in the cache's dtype, beside that logit; a second kernel multiplies by exp2(largest - log-sum-exp) and
sums. Unlike stored logits, these keep the relative precision of the dtype.

The stored tiles lie in memory in the order in which programs write and read them: 2 KB of a step at once, not 128
bytes each from 16 far places.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.online import LOWEST
from pallas_kernels.tiling import MULTIPROCESSORS, ceil_div

SUM_ELEMENTS = 8192


def column_chunk(columns: int, keys_first: bool, itemsize: int) -> int:
    """Returns how many of the columns, one per (query, head), share a product with a tile of keys."""
    if itemsize == 4:
        return 16
    # 64 query rows would make the product one of a warp group, which wants the keys laid out in another way than the
    # smaller product of the attention pass.
    return min(columns, 64 if keys_first else 32)


def shapes(
    batch: int, capacity: int, kv_heads: int, columns: int, block_s: int, keys_first: bool, dtype: jnp.dtype
) -> dict[str, jax.ShapeDtypeStruct]:
    """The attention pass's results, named weights and step_top."""
    steps = ceil_div(capacity, block_s)
    tile = (block_s, columns) if keys_first else (columns, block_s)
    return {
        "weights": jax.ShapeDtypeStruct((batch, steps, kv_heads, *tile), dtype),
        "step_top": jax.ShapeDtypeStruct((batch, steps, kv_heads, columns), jnp.float32),
    }


def multiply(queries: jax.Array, keys: jax.Array, keys_first: bool) -> jax.Array:
    """Logits [s,c] with keys first, else [c,s].

    Keys come first where the attention pass multiplies whole warp groups: the product then reads the very tile in
    shared memory that the attention pass reads. Queries come first where it does not, for the same reason.
    """
    if keys_first:
        return pltriton.dot(keys, queries, trans_b=True, allow_tf32=False)
    return pltriton.dot(queries, keys, trans_b=True, allow_tf32=False)


def weigh(
    queries: jax.Array, position: jax.Array, keys: jax.Array, row: jax.Array, scale: float, keys_first: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns weights [s,c] or [c,s] relative to `top` [c]; queries [c,H] at position [c], keys [s,H] of cache rows."""
    logits = multiply(queries, keys, keys_first) * scale
    axis = 0 if keys_first else 1
    visible = jnp.expand_dims(row, 1 - axis) <= jnp.expand_dims(position, axis)
    logits = jnp.where(visible, logits, -jnp.inf)
    top = jnp.maximum(jnp.max(logits, axis=axis), LOWEST)
    return jnp.exp2(logits - jnp.expand_dims(top, axis)), top


def store_step(
    weights_ref: Any,
    top_ref: Any,
    at: tuple[jax.Array, jax.Array, jax.Array],
    column: jax.Array,
    weights: jax.Array,
    top: jax.Array,
    keys_first: bool,
    mask: jax.Array | None,
) -> None:
    """Stores a step's weights and tops at (batch row, step, kv head)."""
    tile_row = jnp.arange(weights.shape[0 if keys_first else 1], dtype=jnp.int32)
    index = (tile_row[:, None], column[None, :]) if keys_first else (column[:, None], tile_row[None, :])
    tile_mask = None if mask is None else jnp.broadcast_to(mask, weights.shape)
    top_mask = None if mask is None else jnp.broadcast_to(mask, top.shape)
    pltriton.store(weights_ref.at[(*at, *index)], weights.astype(weights_ref.dtype), mask=tile_mask)
    pltriton.store(top_ref.at[(*at, column)], top, mask=top_mask)


def _sum_kernel(
    weights_ref,
    top_ref,
    written_ref,
    visible_ref,
    *refs,
    load_lse: Callable[..., jax.Array],
    keys_first: bool,
    used: int,
    per_out: int,
    per_program: int,
    factor: float,
) -> None:
    """Sums the weights of `per_program` steps over kv heads and columns: weights [B,steps,K,s,c] or [B,steps,K,c,s]."""
    *lse_refs, out_ref = refs
    out, batch = pl.program_id(1), pl.program_id(2)
    steps, kv_heads, columns = top_ref.shape[1:]
    block_s = weights_ref.shape[3 if keys_first else 4]
    capacity = out_ref.shape[2]
    tile_row = jnp.arange(block_s, dtype=jnp.int32)
    items = kv_heads * columns
    # A divisor, so that no load needs a mask: within a step that ran, every weight was stored, zeros for padding.
    chunk = min(items & -items, SUM_ELEMENTS // block_s)
    first = out * per_out
    written, visible = written_ref[batch], visible_ref[batch]
    item_axis = 1 if keys_first else 0

    def load(at, runs, shape):
        if runs is None:
            return pltriton.load(at)
        return pltriton.load(at, mask=jnp.broadcast_to(runs, shape), other=0.0)

    def load_items(i):
        item = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        # Not // and %, whose sign corrections hide from the compiler that the columns of an item are adjacent.
        kv_head, column = jax.lax.div(item, columns), jax.lax.rem(item, columns)
        # The other columns belong to another output or are padding.
        there = (column >= first) & (column < jnp.minimum(first + per_out, used))
        return kv_head, column, there, load_lse(*lse_refs, batch, kv_head, column, there)

    def add(items, step, total, runs=None):
        kv_head, column, there, lse = items
        index = (kv_head[None, :], tile_row[:, None], column[None, :])
        if not keys_first:
            index = (kv_head[:, None], column[:, None], tile_row[None, :])
        weights = load(
            weights_ref.at[(batch, step, *index)], runs, (block_s, chunk) if keys_first else (chunk, block_s)
        )
        top = load(top_ref.at[batch, step, kv_head, column], runs, (chunk,))
        share = jnp.where(there, jnp.exp2(top - lse), 0.0)
        return total + jnp.sum(jnp.expand_dims(share, 1 - item_axis) * weights.astype(jnp.float32), axis=item_axis)

    def sum_step(step, items_of_all):
        # Steps past the written rows hold nothing.
        runs = (step < steps) & (step * block_s < written)
        total = jnp.zeros((block_s,), jnp.float32)
        if items_of_all is not None:
            total = add(items_of_all, step, total, runs)
        else:
            chunks = jnp.where(runs, jnp.int32(items // chunk), jnp.int32(0))
            total = jax.lax.fori_loop(jnp.int32(0), chunks, lambda i, t: add(load_items(i), step, t), total)
        row = step * block_s + tile_row
        score = jnp.where(row < visible, total * factor, -jnp.inf)
        pltriton.store(out_ref.at[batch, out, row], score, mask=row < capacity)

    items_of_all = load_items(0) if items == chunk else None
    for i in range(per_program):
        sum_step(pl.program_id(0) * per_program + i, items_of_all)


def sum_weights(
    weights: jax.Array,
    step_top: jax.Array,
    written: jax.Array,
    visible: jax.Array,
    lse_operands: Sequence[jax.Array],
    load_lse: Callable[..., jax.Array],
    *,
    capacity: int,
    keys_first: bool,
    used: int,
    num_out: int,
    factor: float,
    interpret: bool,
    name: str,
    per_program: int | None = None,
) -> jax.Array:
    """Returns scores [B,num_out,S]: output i sums columns i * used/num_out and on, over all kv heads.

    Args:
      weights, step_top: what the attention pass stored.
      written: int32 [B], rows below which it stored anything; later rows count as 0.
      visible: int32 [B], rows below which a score is handed out; later rows hold -inf.
      lse_operands, load_lse: load_lse(*refs, batch, kv_head, column, mask) gives the log-sum-exp per item.
      used: columns that are not padding.
      factor: on every score.
      per_program: steps that a program sums; None chooses.
    """
    batch, steps = weights.shape[:2]
    if per_program is None:
        # A program of one step would wait longer for its first byte than for the rest, but there must be enough.
        per_program = max(4, 2 * SUM_ELEMENTS // math.prod(weights.shape[2:]))
        per_program = max(1, min(per_program, steps * batch * num_out // (4 * MULTIPROCESSORS)))
    kernel = functools.partial(
        _sum_kernel,
        load_lse=load_lse,
        keys_first=keys_first,
        used=used,
        per_out=used // num_out,
        per_program=per_program,
        factor=factor,
    )
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((batch, num_out, capacity), jnp.float32),
        grid=(ceil_div(steps, per_program), num_out, batch),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name=name,
    )(weights, step_top, written, visible, *lse_operands)
