"""Several programs per row: one launch per digit, which counts it in each tile, and one that writes the rows.

Every program of a launch adds up the counts that the launch before left for all tiles of its row, and so knows the next
digit without a launch of its own for it. Counts are kept per tile: nothing has to be zeroed, nothing is atomic, and the
last launch knows how many rows the tiles before its own select.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.row_selection import digits
from pallas_kernels.row_selection.blocks import BlockSizes
from pallas_kernels.tiling import ceil_div, power_of_two


def _load_keys(scores_ref, length, row, tile, blocks: BlockSizes) -> tuple[jax.Array, jax.Array, jax.Array]:
    depth, lanes = blocks.depth, blocks.lanes
    lane = jnp.arange(lanes, dtype=jnp.int32)[None, :]
    index = tile * (depth * lanes) + jnp.arange(depth, dtype=jnp.int32)[:, None] * lanes + lane
    in_row = index < jnp.minimum(length, scores_ref.shape[1])
    scores = pltriton.load(scores_ref.at[row, index], mask=in_row, other=0.0)
    return *digits.keys(scores, in_row), index


def _load_counts(counts_ref, row, tiles: int) -> tuple[jax.Array, jax.Array]:
    """counts [R,C,16] of a row, [C',16] padded with zeros, and the tile index [C',1]."""
    tile = jnp.arange(power_of_two(tiles), dtype=jnp.int32)[:, None]
    value = jnp.arange(digits.BINS, dtype=jnp.int32)[None, :]
    mask = jnp.broadcast_to(tile < tiles, (tile.size, digits.BINS))
    return pltriton.load(counts_ref.at[row, tile, value], mask=mask, other=0), tile


def _next_cut(state_ref, k_ref, row, counts, width) -> tuple[digits.Cut, jax.Array]:
    """The cut after the digit that `counts` is about. state [R,2] is the cut before it; None before the first digit."""
    totals = jnp.sum(counts, axis=0)
    if state_ref is None:
        wanted = jnp.minimum(jnp.maximum(k_ref[row], 0), jnp.minimum(jnp.sum(totals), width))
        cut = digits.Cut(jnp.uint32(0), wanted)
    else:
        prefix = jax.lax.bitcast_convert_type(state_ref[row, 0], jnp.uint32)
        cut = digits.Cut(prefix, state_ref[row, 1])
    return digits.descend(cut, totals)


def _first_kernel(scores_ref, length_ref, counts_ref, *, blocks: BlockSizes) -> None:
    """scores [R,S], length [R] -> counts [R,C,16] of the first digit among eligible scores."""
    tile, row = pl.program_id(0), pl.program_id(1)
    key, eligible, _ = _load_keys(scores_ref, length_ref[row], row, tile, blocks)
    shift = digits.key_bits(scores_ref.dtype) - digits.DIGIT_BITS
    counts = digits.count_digits(key, eligible, shift)
    pltriton.store(counts_ref.at[row, tile, jnp.arange(digits.BINS, dtype=jnp.int32)], counts)


def _digit_kernel(*refs, blocks: BlockSizes, width: int, shift: int, first: bool) -> None:
    """Counts one more digit.

    scores [R,S]; length, k [R]; old counts [R,C,16]; unless first, state [R,2] and above [R,C] -> new counts, state and
    above, which is how many keys of a tile are above the prefix.
    """
    scores_ref, length_ref, k_ref, old_ref, *rest = refs
    old_state_ref, old_above_ref = (None, None) if first else rest[:2]
    counts_ref, state_ref, above_ref = rest[-3:]
    tile, row = pl.program_id(0), pl.program_id(1)
    key, _, _ = _load_keys(scores_ref, length_ref[row], row, tile, blocks)
    counts, tiles = _load_counts(old_ref, row, counts_ref.shape[1])
    cut, digit = _next_cut(old_state_ref, k_ref, row, counts, width)

    value = jnp.arange(digits.BINS, dtype=jnp.int32)[None, :]
    above = jnp.sum(jnp.where((tiles == tile) & (value > digit), counts, 0))
    above_ref[row, tile] = above if first else above + old_above_ref[row, tile]
    # Every program of a row stores the same two words.
    state_ref[row, 0] = jax.lax.bitcast_convert_type(cut.prefix, jnp.int32)
    state_ref[row, 1] = cut.left
    counts = digits.count_digits(key, digits.matches(key, cut.prefix, shift), shift)
    pltriton.store(counts_ref.at[row, tile, jnp.arange(digits.BINS, dtype=jnp.int32)], counts)


def _write_kernel(
    scores_ref, length_ref, k_ref, counts_ref, state_ref, above_ref, rows_ref, count_ref, *, blocks: BlockSizes
) -> None:
    """Writes the selected rows of one tile: counts [R,C,16] of the last digit -> rows [R,W], count [R]."""
    width, num_tiles = rows_ref.shape[1], counts_ref.shape[1]
    tile, row = pl.program_id(0), pl.program_id(1)
    key, _, index = _load_keys(scores_ref, length_ref[row], row, tile, blocks)
    counts, tiles = _load_counts(counts_ref, row, num_tiles)
    cut, digit = _next_cut(state_ref, k_ref, row, counts, width)

    value = jnp.arange(digits.BINS, dtype=jnp.int32)[None, :]
    all_tiles = jnp.arange(power_of_two(num_tiles), dtype=jnp.int32)
    above_prefix = pltriton.load(above_ref.at[row, all_tiles], mask=all_tiles < num_tiles, other=0)
    last_digit = jnp.where(value > digit, counts, 0)
    total_above = jnp.sum(above_prefix) + jnp.sum(last_digit)
    before_above = jnp.sum(jnp.where(all_tiles < tile, above_prefix, 0)) + jnp.sum(
        jnp.where(tiles < tile, last_digit, 0)
    )
    before_equal = jnp.sum(jnp.where((tiles < tile) & (value == digit), counts, 0))
    selected, place = digits.places(key, cut, (before_above, before_equal))
    # Interpret mode drops stores past the end, the GPU masks them.
    pltriton.store(rows_ref.at[row, jnp.where(selected, place, width)], index, mask=selected)

    count = total_above + cut.left
    share = ceil_div(width, num_tiles)
    block = min(power_of_two(share), 1024)
    for begin in range(0, share, block):
        offset = begin + jnp.arange(block, dtype=jnp.int32)
        slot = tile * share + offset
        padding = (offset < share) & (slot >= count) & (slot < width)
        slot = jnp.where(padding, slot, width)
        pltriton.store(rows_ref.at[row, slot], jnp.full((block,), -1, jnp.int32), mask=padding)
    count_ref[row] = count


def row_selection(
    scores: jax.Array, length: jax.Array, k: jax.Array, *, width: int, blocks: BlockSizes, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See the public op."""
    num_rows, size = scores.shape
    tiles = ceil_div(size, blocks.depth * blocks.lanes)
    counts_shape = jax.ShapeDtypeStruct((num_rows, tiles, digits.BINS), jnp.int32)
    state_shape = jax.ShapeDtypeStruct((num_rows, 2), jnp.int32)
    above_shape = jax.ShapeDtypeStruct((num_rows, tiles), jnp.int32)

    def launch(kernel: Any, name: str, shapes: Any, *operands: jax.Array) -> Any:
        return pl.pallas_call(
            functools.partial(kernel, blocks=blocks),
            out_shape=shapes,
            grid=(tiles, num_rows),
            compiler_params=pltriton.CompilerParams(num_warps=blocks.num_warps, num_stages=1),
            interpret=interpret,
            name=name,
        )(*operands)

    shift = digits.key_bits(scores.dtype) - digits.DIGIT_BITS
    counts = launch(_first_kernel, "row_selection_first", counts_shape, scores, length)
    state = ()
    while shift:
        shift -= digits.DIGIT_BITS
        kernel = functools.partial(_digit_kernel, width=width, shift=shift, first=not state)
        shapes = (counts_shape, state_shape, above_shape)
        counts, *state = launch(kernel, "row_selection_digit", shapes, scores, length, k, counts, *state)
    rows_shape = jax.ShapeDtypeStruct((num_rows, width), jnp.int32)
    count_shape = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    return launch(_write_kernel, "row_selection", (rows_shape, count_shape), scores, length, k, counts, *state)
