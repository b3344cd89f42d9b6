"""Softmax attention one tile of keys at a time, and the merge of programs that each saw a part of the keys.

Softmax works in base 2: the factor log2(e) belongs into the scale. A state is (acc [rows,H], top [rows], total [rows]):
the weighted sum of values, the largest logit, and the sum of weights relative to it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.early_launch import early_launch
from pallas_kernels.tiling import ceil_div, power_of_two

# Lower than any logit, and finite: the difference of two of them is 0 where that of two -inf is NaN.
LOWEST = float(jnp.finfo(jnp.float32).min)
MERGE_ELEMENTS = 8192

State = tuple[jax.Array, jax.Array, jax.Array]


def in_registers(q: jax.Array) -> jax.Array:
    """The same queries [rows,H] as a product with the identity, which is exact.

    A warp group's product takes its left operand from registers if that is itself a product, else from shared memory.
    Those 16 KB of 64 queries decide whether a multiprocessor holds two programs.
    """
    rows, width = q.shape
    if rows < 64 or q.dtype.itemsize != 2:
        return q
    column = jnp.arange(width, dtype=jnp.int32)
    identity = (column[:, None] == column[None, :]).astype(q.dtype)
    return pltriton.dot(q, identity, allow_tf32=False).astype(q.dtype)


def initial(rows: int, width: int) -> State:
    """The state of `rows` queries that have seen no key, for values of `width` columns."""
    return (
        jnp.zeros((rows, width), jnp.float32),
        jnp.full((rows,), LOWEST, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )


def update(state: State, logits: jax.Array, load_values: Any) -> State:
    """Adds a tile: logits [rows,keys], -inf where invisible; `load_values()` gives [keys,H], after the softmax."""
    acc, top, total = state
    new_top = jnp.maximum(top, jnp.max(logits, axis=1))
    weights = jnp.exp2(logits - new_top[:, None])
    shrink = jnp.exp2(top - new_top)
    total = total * shrink + jnp.sum(weights, axis=1)
    values = load_values()
    acc = acc * shrink[:, None] + pltriton.dot(weights.astype(values.dtype), values, allow_tf32=False)
    return acc, new_top, total


def finish(state: State) -> tuple[jax.Array, jax.Array]:
    """Returns the output [rows,H], zeros where no key was seen, and the base-2 log-sum-exp [rows], there +inf."""
    acc, top, total = state
    seen = total > 0.0
    total = jnp.where(seen, total, 1.0)
    return acc / total[:, None], jnp.where(seen, top + jnp.log2(total), jnp.inf)


def _merge_kernel(acc_ref, top_ref, total_ref, out_ref, *lse_ref, splits: int, head_block: int) -> None:
    """Merges the parts of some heads of one query: acc [B,C,T,N,H], top and total [B,C,T,N]."""
    head_tile, query, batch = (pl.program_id(axis) for axis in range(3))
    heads, head_dim = out_ref.shape[2:]
    width = power_of_two(head_dim, 16)
    column = jnp.arange(width, dtype=jnp.int32)
    # Padding keeps an index past the end: interpret mode drops such stores, the GPU masks them.
    head = head_tile * head_block + jnp.arange(head_block, dtype=jnp.int32)
    in_heads = head < heads
    chunk = min(power_of_two(splits), max(1, MERGE_ELEMENTS // (head_block * width)))

    def add(step, state):
        acc, top, total = state
        part = step * chunk + jnp.arange(chunk, dtype=jnp.int32)
        there = (part < splits)[:, None] & in_heads[None, :]
        # All three loads are independent, so that a merge of few parts takes one trip to memory.
        parts = pltriton.load(
            acc_ref.at[batch, part[:, None, None], query, head[None, :, None], column[None, None, :]],
            mask=there[:, :, None] & (column < head_dim)[None, None, :],
            other=0.0,
        )
        tops = pltriton.load(top_ref.at[batch, part[:, None], query, head[None, :]], mask=there, other=LOWEST)
        totals = pltriton.load(total_ref.at[batch, part[:, None], query, head[None, :]], mask=there, other=0.0)
        new_top = jnp.maximum(top, jnp.max(tops, axis=0))
        factor, shrink = jnp.exp2(tops - new_top[None, :]), jnp.exp2(top - new_top)
        acc = acc * shrink[:, None] + jnp.sum(factor[:, :, None] * parts, axis=0)
        return acc, new_top, total * shrink + jnp.sum(factor * totals, axis=0)

    state = initial(head_block, width)
    chunks = ceil_div(splits, chunk)
    state = add(0, state) if chunks == 1 else jax.lax.fori_loop(jnp.int32(0), jnp.int32(chunks), add, state)
    out, lse = finish(state)
    mask = in_heads[:, None] & (column < head_dim)[None, :]
    at = out_ref.at[batch, query, head[:, None], column[None, :]]
    pltriton.store(at, out.astype(out_ref.dtype), mask=mask)
    if lse_ref:
        pltriton.store(lse_ref[0].at[batch, query, head], lse, mask=in_heads)


def merge(
    acc: jax.Array,
    top: jax.Array,
    total: jax.Array,
    dtype: jnp.dtype,
    *,
    want_lse: bool,
    early: bool = False,
    interpret: bool,
    name: str,
) -> tuple[jax.Array, jax.Array | None]:
    """Merges parts acc [B,C,T,N,H], top and total [B,C,T,N] into out [B,T,N,H] and lse [B,T,N]."""
    batch, splits, num_rows, heads, head_dim = acc.shape
    row_elements = power_of_two(splits) * power_of_two(head_dim, 16)
    # Small programs spread a short merge over the card; where there are many rows, heads share a program.
    spread = batch * num_rows * heads <= 1024
    head_block = 1 if spread else min(power_of_two(heads), max(1, 4096 // row_elements))
    elements = min(MERGE_ELEMENTS, head_block * row_elements)
    shapes = [jax.ShapeDtypeStruct((batch, num_rows, heads, head_dim), dtype)]
    if want_lse:
        shapes.append(jax.ShapeDtypeStruct((batch, num_rows, heads), jnp.float32))
    kernel = functools.partial(_merge_kernel, splits=splits, head_block=head_block)
    out, *lse = pl.pallas_call(
        early_launch(kernel, early, interpret=interpret),
        out_shape=tuple(shapes),
        grid=(ceil_div(heads, head_block), num_rows, batch),
        compiler_params=pltriton.CompilerParams(num_warps=max(1, min(8, elements // 512)), num_stages=1),
        interpret=interpret,
        name=name,
    )(acc, top, total)
    return out, lse[0] if lse else None
