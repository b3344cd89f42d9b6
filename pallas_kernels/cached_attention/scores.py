"""Scores of chosen queries as a by-product of the attention pass.

weight: the chosen queries are multiplied with each tile of keys a second time, in a small product of their own, and
their weights are stored (see `row_weights`). Taking them out of the big tile instead moves all of it through shared
memory.

logit: logits are linear in the query, so the sum over heads and queries is the logit of one summed query. It is split
in two parts of the cache's dtype, which keeps about twice the dtype's precision, and rides along as the same small
product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import row_weights
from pallas_kernels.cached_attention.blocks import BlockSizes
from pallas_kernels.tiling import ceil_div, power_of_two


class Refs(NamedTuple):
    """The attention kernel's operands and results by name; None where a call has none."""

    start: Any
    q: Any
    k: Any
    v: Any
    scored: Any = None
    out: Any = None
    lse: Any = None
    acc: Any = None
    top: Any = None
    total: Any = None
    weights: Any = None
    step_top: Any = None
    logits: Any = None


@dataclasses.dataclass(frozen=True)
class Request:
    """Which scores to make of R queries of G heads per kv head, as in the public op."""

    num_scored: int
    group: int
    mode: str
    per_row: bool

    @property
    def columns(self) -> int:
        """Query rows of the small product: one per query and head, or two parts per summed query."""
        if self.mode == "weight":
            return power_of_two(self.num_scored * self.group, 16)
        return power_of_two(2 * self.num_out, 16)

    @property
    def num_out(self) -> int:
        """Rows of scores per batch row in the result."""
        return self.num_scored if self.per_row else 1

    def factor(self) -> int:
        """What summed queries are divided by, so that the sum of many stays in range."""
        # A power of two is exact, and keeps a sum of many queries inside float16's range.
        return power_of_two(self.group * (1 if self.per_row else self.num_scored))

    def outputs(self, k: jax.Array, blocks: BlockSizes) -> dict[str, jax.ShapeDtypeStruct]:
        """The attention kernel's extra results."""
        batch, capacity, kv_heads, _ = k.shape
        first = keys_first(blocks, k.dtype)
        if self.mode == "weight":
            return row_weights.shapes(batch, capacity, kv_heads, self.columns, blocks.block_s, first, k.dtype)
        if not self.per_row:
            return {"logits": jax.ShapeDtypeStruct((batch, kv_heads, capacity), jnp.float32)}
        padded = ceil_div(capacity, blocks.block_s) * blocks.block_s
        return {"logits": jax.ShapeDtypeStruct((batch, kv_heads, padded, self.columns), jnp.float32)}

    def finish(
        self,
        results: dict[str, jax.Array],
        lse: jax.Array | None,
        scored: jax.Array,
        start: jax.Array,
        capacity: int,
        scale: float,
        blocks: BlockSizes,
        interpret: bool,
    ) -> jax.Array:
        """Turns the attention kernel's extra results into scores, [B,S] or [B,R,S]."""
        visible = start + jnp.min(scored, axis=1) + 1
        if self.mode == "weight":
            scores = row_weights.sum_weights(
                results["weights"],
                results["step_top"],
                visible,
                visible,
                (lse, scored),
                self._load_lse,
                capacity=capacity,
                keys_first=keys_first(blocks, results["weights"].dtype),
                used=self.num_scored * self.group,
                num_out=self.num_out,
                factor=1.0,
                interpret=interpret,
                name="cached_attention_scores",
            )
            return scores if self.per_row else scores[:, 0]
        summed = jnp.sum(results["logits"], axis=1) * (scale * self.factor())
        if self.per_row:
            count = self.num_scored
            summed = jnp.swapaxes(summed[:, :capacity, :count] + summed[:, :capacity, count : 2 * count], 1, 2)
        visible = visible.reshape(-1, *(1,) * (summed.ndim - 1))
        return jnp.where(jnp.arange(capacity) < visible, summed, -jnp.inf)

    def _load_lse(self, lse_ref, scored_ref, batch, kv_head, column, mask):
        slot, head = column // self.group, kv_head * self.group + column % self.group
        query = pltriton.load(scored_ref.at[batch, slot], mask=mask, other=0)
        return pltriton.load(lse_ref.at[batch, query, head], mask=mask, other=0.0)


def keys_first(blocks: BlockSizes, dtype: jnp.dtype) -> bool:
    """Whether the attention pass multiplies whole warp groups, see `row_weights.multiply`."""
    return blocks.rows >= 64 and blocks.block_s >= 64 and jnp.dtype(dtype).itemsize == 2


def make_step(
    refs: Refs,
    request: Request | None,
    batch: jax.Array,
    kv_head: jax.Array,
    last_tile: jax.Array | None,
    dim: jax.Array,
    scale: float,
    blocks: BlockSizes,
) -> Callable[..., None] | None:
    """Returns what one step of the attention kernel does for the scores, or None.

    Only the last row tile is known to reach every visible row; `last_tile` says whether this is it, None if it must be.
    """
    if request is None:
        return None
    first = keys_first(blocks, refs.k.dtype)
    if request.mode == "weight":
        return _weight_step(refs, request, batch, kv_head, last_tile, dim, scale, first)
    return _logit_step(refs, request, batch, kv_head, last_tile, dim, first)


def _load_queries(refs, request, batch, kv_head, slot, head_in_group, dim):
    """The chosen queries in `slot` [n], head `head_in_group` [n] of the kv head; slots past the end are zeros."""
    there = (slot < request.num_scored) & (head_in_group < request.group)
    query = pltriton.load(refs.scored.at[batch, slot], mask=there, other=0)
    tile = pltriton.load(
        refs.q.at[batch, query[:, None], (kv_head * request.group + head_in_group)[:, None], dim[None, :]],
        mask=there[:, None] & (dim < refs.q.shape[3])[None, :],
        other=0.0,
    )
    return tile, jnp.where(there, query, -1)


def _weight_step(refs, request, batch, kv_head, last_tile, dim, scale, first):
    chunk = row_weights.column_chunk(request.columns, first, refs.k.dtype.itemsize)
    start = refs.start[batch]
    tiles = []
    for begin in range(0, request.columns, chunk):
        column = begin + jnp.arange(chunk, dtype=jnp.int32)
        queries, query = _load_queries(
            refs, request, batch, kv_head, column // request.group, column % request.group, dim
        )
        # A padding column sees nothing.
        tiles.append((column, queries, jnp.where(query < 0, -1, start + query)))

    def step_weights(step, row, k):
        for column, queries, position in tiles:
            weights, top = row_weights.weigh(queries, position, k, row, scale, first)
            at = (batch, step, kv_head)
            row_weights.store_step(refs.weights, refs.step_top, at, column, weights, top, first, last_tile)

    return step_weights


def _logit_step(refs, request, batch, kv_head, last_tile, dim, first):
    dtype = refs.k.dtype
    part = jnp.arange(request.columns, dtype=jnp.int32)[:, None]
    head = jnp.arange(power_of_two(request.group), dtype=jnp.int32)
    queries = jnp.zeros((request.columns, dim.size), jnp.float32)
    summed = jnp.zeros((dim.size,), jnp.float32)
    for slot in range(request.num_scored):
        tile, _ = _load_queries(refs, request, batch, kv_head, jnp.full_like(head, slot), head, dim)
        added = jnp.sum(tile.astype(jnp.float32), axis=0) / request.factor()
        summed = added if request.per_row else summed + added
        if request.per_row or slot == request.num_scored - 1:
            out = slot if request.per_row else 0
            high = summed.astype(dtype).astype(jnp.float32)
            queries = jnp.where(part == out, high[None, :], queries)
            queries = jnp.where(part == request.num_out + out, (summed - high)[None, :], queries)
    queries = queries.astype(dtype)

    def step_logits(step, row, k):
        logits = row_weights.multiply(queries, k, first)
        if request.per_row:
            logits = logits if first else logits.T
            mask = None if last_tile is None else jnp.broadcast_to(last_tile, logits.shape)
            at = refs.logits.at[batch, kv_head, row[:, None], part[:, 0][None, :]]
            pltriton.store(at, logits, mask=mask)
        else:
            capacity = refs.logits.shape[2]
            mask = row < capacity
            if last_tile is not None:
                mask &= last_tile
            pltriton.store(refs.logits.at[batch, kv_head, row], jnp.sum(logits, axis=1 if first else 0), mask=mask)

    return step_logits
