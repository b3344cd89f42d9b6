"""Scores of chosen queries as a by-product of the attention pass.

weight: the tile's scored rows come first, and each step stores their unnormalised weights in the cache's dtype beside
the running maximum they were taken against. A second kernel multiplies by exp2(maximum - log-sum-exp) and sums. Unlike
stored logits, these keep the relative precision of the dtype.

logit: logits are linear in the query, so the sum over heads and queries is the logit of one summed query. It is split
in two parts of the cache's dtype, which keeps about twice the dtype's precision, and rides along as a 16-row product.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.cached_attention.blocks import BlockSizes, ceil_div, power_of_two


class Refs(NamedTuple):
    """The attention kernel's operands and results by name; None where a call has none."""

    start: Any
    q: Any
    k: Any
    v: Any
    order: Any = None
    summed: Any = None
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
    """Which queries to score and how.

    Attributes:
      scored: int32 [B,R], clipped to [0,T).
      order: int32 [B,T], every query once, the scored ones first; None where no tile needs it.
      count: float32 [B,R'], how often the query in each of the first R' = min(R,T) slots is scored.
      slot: int32 [B,R], where each scored query is in the order.
      mode, per_row: as in the public op.
    """

    scored: jax.Array
    order: jax.Array
    count: jax.Array
    slot: jax.Array
    mode: str
    per_row: bool

    @classmethod
    def create(cls, scored_rows: jax.Array, num_rows: int, mode: str, per_row: bool) -> Request:
        scored = jnp.clip(scored_rows, 0, num_rows - 1)
        query = jnp.arange(num_rows, dtype=jnp.int32)
        count = jnp.sum(scored[:, :, None] == query, axis=1)  # [B,T]
        # Stable: scored queries first. Rank by counting, which is one small fused loop where a sort is not.
        before = query[:, None] > query[None, :]
        is_scored = count > 0
        ahead = (is_scored[:, None, :] & (~is_scored[:, :, None] | before)) | (
            ~is_scored[:, None, :] & ~is_scored[:, :, None] & before
        )
        rank = jnp.sum(ahead, axis=2, dtype=jnp.int32)  # [B,T], the slot of each query
        order = jnp.sum(jnp.where(rank[:, :, None] == query, query[:, None], 0), axis=1, dtype=jnp.int32)
        slots = min(scored_rows.shape[1], num_rows)
        return cls(
            scored=scored,
            order=order,
            count=jnp.take_along_axis(count, order[:, :slots], axis=1).astype(jnp.float32),
            slot=jnp.take_along_axis(rank, scored, axis=1),
            mode=mode,
            per_row=per_row,
        )

    @property
    def num_slots(self) -> int:
        return self.count.shape[1]

    @property
    def num_parts(self) -> int:
        return 2 * (self.scored.shape[1] if self.per_row else 1)

    def _factor(self, group: int) -> int:
        # A power of two is exact, and keeps a sum of many queries inside float16's range.
        return power_of_two(group * (1 if self.per_row else self.scored.shape[1]))

    def operands(self, q: jax.Array, kv_heads: int) -> dict[str, jax.Array]:
        """The attention kernel's extra operands."""
        if self.mode == "weight":
            return {"order": self.order}
        batch, num_rows, heads, head_dim = q.shape
        grouped = jnp.sum(q.reshape(batch, num_rows, kv_heads, -1, head_dim).astype(jnp.float32), axis=3)
        summed = jnp.take_along_axis(grouped, self.scored[:, :, None, None], axis=1)  # [B,R,K,H]
        if not self.per_row:
            summed = jnp.sum(summed, axis=1, keepdims=True)
        summed = jnp.swapaxes(summed, 1, 2) / self._factor(heads // kv_heads)
        high = summed.astype(q.dtype)
        low = (summed - high.astype(jnp.float32)).astype(q.dtype)
        padding = power_of_two(self.num_parts, 16) - self.num_parts
        return {"summed": jnp.pad(jnp.concatenate([high, low], axis=2), ((0, 0), (0, 0), (0, padding), (0, 0)))}

    def outputs(self, k: jax.Array, group: int, blocks: BlockSizes) -> dict[str, jax.ShapeDtypeStruct]:
        """The attention kernel's extra results."""
        batch, capacity, kv_heads, _ = k.shape
        if self.mode == "weight":
            rows, steps = self.num_slots * group, ceil_div(capacity, blocks.block_s)
            return {
                "weights": jax.ShapeDtypeStruct((batch, kv_heads, rows, capacity), k.dtype),
                "step_top": jax.ShapeDtypeStruct((batch, kv_heads, rows, steps), jnp.float32),
            }
        parts = 1 if blocks.sum_logits and not self.per_row else self.num_parts
        return {"logits": jax.ShapeDtypeStruct((batch, kv_heads, parts, capacity), jnp.float32)}

    def finish(
        self,
        results: dict[str, jax.Array],
        lse: jax.Array,
        start: jax.Array,
        group: int,
        scale: float,
        blocks: BlockSizes,
        interpret: bool,
    ) -> jax.Array:
        """Turns the attention kernel's extra results into scores, [B,S] or [B,R,S]."""
        visible = start + jnp.min(self.scored, axis=1) + 1
        if self.mode == "weight":
            weights, tops = results["weights"], results["step_top"]
            return _sum_weights(self, weights, tops, lse, visible, group, blocks.block_s, interpret)
        summed = jnp.sum(results["logits"], axis=1) * (scale * self._factor(group))
        batch, parts, capacity = summed.shape
        if parts > 1:
            summed = jnp.sum(summed.reshape(batch, 2, parts // 2, capacity), axis=1)
        scores = summed if self.per_row else summed[:, 0]
        visible = visible.reshape(batch, *(1,) * (scores.ndim - 1))
        return jnp.where(jnp.arange(capacity) < visible, scores, -jnp.inf)


def make_step(
    refs: Refs,
    batch: jax.Array,
    kv_head: jax.Array,
    row_tile: jax.Array,
    tile_row: jax.Array,
    column: jax.Array,
    head_dim: int,
    block_s: int,
) -> Callable[..., None] | None:
    """Returns what one step of the attention kernel does for the scores, or None."""
    if refs.weights is not None:
        rows, capacity = refs.weights.shape[2:]
        scored = tile_row < rows

        def store_weights(step, row, k, weights, top):
            del k
            mask = scored[:, None]
            if capacity % block_s:
                mask &= (row < capacity)[None, :]
            pltriton.store(refs.weights.at[batch, kv_head, tile_row[:, None], row[None, :]], weights, mask=mask)
            pltriton.store(refs.step_top.at[batch, kv_head, tile_row, step], top, mask=scored)

        return store_weights

    if refs.logits is not None:
        parts, capacity = refs.logits.shape[2:]
        part = jnp.arange(refs.summed.shape[2], dtype=jnp.int32)
        query = pltriton.load(
            refs.summed.at[batch, kv_head, part[:, None], column[None, :]],
            mask=(column < head_dim)[None, :],
            other=0.0,
        )

        def store_logits(step, row, k, weights, top):
            del step, weights, top
            logits = pltriton.dot(query, k, trans_b=True, allow_tf32=False)
            mask = (row < capacity) & (row_tile == 0)
            if parts == 1:
                pltriton.store(refs.logits.at[batch, kv_head, 0, row], jnp.sum(logits, axis=0), mask=mask)
            else:
                at = refs.logits.at[batch, kv_head, part[:, None], row[None, :]]
                pltriton.store(at, logits, mask=(part < parts)[:, None] & mask[None, :])

        return store_logits
    return None


def _sum_weights_kernel(
    weights_ref, top_ref, lse_ref, order_ref, count_ref, slot_ref, visible_ref, out_ref, *, group, per_row, block_s
) -> None:
    """Sums one step's weights over heads and queries: weights [B,K,R'*G,S], top [B,K,R'*G,C], lse [B,T,N]."""
    step, scored, batch = (pl.program_id(axis) for axis in range(3))
    _, kv_heads, rows, capacity = weights_ref.shape
    row = step * block_s + jnp.arange(block_s, dtype=jnp.int32)
    per_head = group if per_row else rows
    num = kv_heads * per_head
    chunk = min(32, power_of_two(num))
    visible = visible_ref[batch]
    base = slot_ref[batch, scored] * group if per_row else 0

    def add(i, total):
        item = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        there = item < num
        kv_head, source = item // per_head, base + item % per_head
        slot, head = source // group, kv_head * group + source % group
        query = pltriton.load(order_ref.at[batch, slot], mask=there, other=0)
        lse = pltriton.load(lse_ref.at[batch, query, head], mask=there, other=jnp.inf)
        top = pltriton.load(top_ref.at[batch, kv_head, source, step], mask=there, other=0.0)
        factor = jnp.exp2(top - lse)
        if not per_row:
            factor = factor * pltriton.load(count_ref.at[batch, slot], mask=there, other=0.0)
        weights = pltriton.load(
            weights_ref.at[batch, kv_head[:, None], source[:, None], row[None, :]],
            mask=there[:, None] & (row < visible)[None, :],
            other=0.0,
        )
        return total + jnp.sum(factor[:, None] * weights.astype(jnp.float32), axis=0)

    # Steps past the visible rows were never written.
    chunks = jnp.where(step * block_s < visible, jnp.int32(ceil_div(num, chunk)), jnp.int32(0))
    total = jax.lax.fori_loop(jnp.int32(0), chunks, add, jnp.zeros((block_s,), jnp.float32))
    score = jnp.where(row < visible, total, -jnp.inf)
    pltriton.store(out_ref.at[batch, scored, row], score, mask=row < capacity)


def _sum_weights(request, weights, tops, lse, visible, group, block_s, interpret):
    batch, _, _, capacity = weights.shape
    num_out = request.scored.shape[1] if request.per_row else 1
    scores = pl.pallas_call(
        functools.partial(_sum_weights_kernel, group=group, per_row=request.per_row, block_s=block_s),
        out_shape=jax.ShapeDtypeStruct((batch, num_out, capacity), jnp.float32),
        grid=(ceil_div(capacity, block_s), num_out, batch),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="cached_attention_scores",
    )(weights, tops, lse, request.order, request.count, request.slot, visible)
    return scores if request.per_row else scores[:, 0]
