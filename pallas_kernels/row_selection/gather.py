"""One program per row of bfloat16 scores, which stays in registers while a binary search finds the threshold.

As `resident`, but the search compares two scores an instruction, and the indices are looked up slot by slot instead of
written score by score.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.row_selection import compaction, keys, packed
from pallas_kernels.row_selection.blocks import BlockSizes
from pallas_kernels.row_selection.launch import launch


def _kernel(
    scores_ref, length_ref, k_ref, rows_ref, count_ref, through_ref, *, blocks: BlockSizes, interpret: bool
) -> None:
    """scores [R,S]; length, k [R] -> rows [R,W], count [R], scratch [R,tile/8]."""
    size, width = scores_ref.shape[1], rows_ref.shape[1]
    row = pl.program_id(0)
    length = length_ref[row]
    x = packed.load_eligible(scores_ref, row, packed.tile_index(0, blocks.tile), length, inside=size == blocks.tile)
    eligible = packed.count_reaching(x, packed.NEGATIVE_INFINITY, interpret)
    wanted = jnp.clip(jnp.minimum(k_ref[row], eligible), 0, width)
    cut = keys.search(lambda key: packed.count_reaching(x, key, interpret), wanted, scores_ref.dtype)

    def store(slot, index):
        pltriton.store(rows_ref.at[row, slot], jnp.where(slot < wanted, index, -1), mask=slot < width)

    words = packed.group_words(x, cut.threshold, interpret)
    slots = 32 * blocks.num_warps
    compaction.write_tile(scores_ref, through_ref, row, 0, words, length, cut, slots, width, store, interpret)
    count_ref[row] = wanted


def row_selection(
    scores: jax.Array, length: jax.Array, k: jax.Array, *, width: int, blocks: BlockSizes, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See the public op. A row must fit a tile, and a tile hold 8 scores a thread."""
    num_rows, size = scores.shape
    assert size <= blocks.tile >= 256 * blocks.num_warps, blocks
    shapes = (
        jax.ShapeDtypeStruct((num_rows, width), jnp.int32),
        jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        jax.ShapeDtypeStruct((num_rows, blocks.tile // packed.GROUP), jnp.int32),
    )
    kernel = partial(_kernel, interpret=interpret)
    operands = (scores, length, k)
    rows, count, _ = launch(kernel, "row_selection", (num_rows,), shapes, *operands, blocks=blocks, interpret=interpret)
    return rows, count
