"""One program per row: the row stays in registers while a binary search over its keys finds the threshold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.row_selection import keys
from pallas_kernels.row_selection.blocks import BlockSizes
from pallas_kernels.row_selection.launch import launch


def _kernel(scores_ref, length_ref, k_ref, rows_ref, count_ref, *, blocks: BlockSizes) -> None:
    """scores [R,S]; length, k [R] -> rows [R,W], count [R]."""
    size, width = scores_ref.shape[1], rows_ref.shape[1]
    row = pl.program_id(0)
    length = jnp.clip(length_ref[row], 0, size)
    key = keys.load(scores_ref, row, jnp.arange(blocks.tile, dtype=jnp.int32), length)
    eligible = keys.count(key > keys.lowest(scores_ref.dtype))
    wanted = jnp.clip(jnp.minimum(k_ref[row], eligible), 0, width)
    cut = keys.search(lambda low: keys.count(key >= low), wanted, scores_ref.dtype)

    # In pieces, from memory again: the counts of a whole row do not fit beside its keys.
    piece = min(blocks.tile, 256 * blocks.num_warps)

    def write_piece(step, before):
        index = step * piece + jnp.arange(piece, dtype=jnp.int32)
        selected, place, *before = keys.places(keys.load(scores_ref, row, index, length), cut, *before)
        # Interpret mode drops stores past the end, the GPU masks them.
        pltriton.store(rows_ref.at[row, jnp.where(selected, place, width)], index, mask=selected)
        return tuple(before)

    def pad(step, carry):
        slot = wanted + step * piece + jnp.arange(piece, dtype=jnp.int32)
        pltriton.store(rows_ref.at[row, slot], jnp.full((piece,), -1, jnp.int32), mask=slot < width)
        return carry

    pieces = jnp.where(wanted > 0, pl.cdiv(length, jnp.int32(piece)), 0)
    jax.lax.fori_loop(jnp.int32(0), pieces, write_piece, (jnp.int32(0), jnp.int32(0)))
    jax.lax.fori_loop(jnp.int32(0), pl.cdiv(width - wanted, jnp.int32(piece)), pad, jnp.int32(0))
    count_ref[row] = wanted


def row_selection(
    scores: jax.Array, length: jax.Array, k: jax.Array, *, width: int, blocks: BlockSizes, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See the public op. A row must fit a tile."""
    num_rows = scores.shape[0]
    shapes = (jax.ShapeDtypeStruct((num_rows, width), jnp.int32), jax.ShapeDtypeStruct((num_rows,), jnp.int32))
    operands = (scores, length, k)
    return launch(_kernel, "row_selection", (num_rows,), shapes, *operands, blocks=blocks, interpret=interpret)
