"""Several programs per row: one launch per digit of a radix search, and one that writes the rows.

Every program of a launch adds up the counts that the launch before left for all tiles of its row, and so knows the next
digit without a launch of its own for it. Counts are kept per tile: nothing has to be zeroed, nothing is atomic, and the
last launch knows how many rows the tiles before its own select.

Sixteen counters live in two registers: an element adds 1 << 4 * digit, a column of at most 15 elements is added up
within a thread, and only then are the counters widened to 16 bits and added across the program.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.row_selection import keys
from pallas_kernels.row_selection.blocks import BlockSizes
from pallas_kernels.row_selection.launch import launch
from pallas_kernels.tiling import ceil_div, power_of_two

DIGIT_BITS = 4
BINS = 1 << DIGIT_BITS


class Prefix(NamedTuple):
    """Where the search stands: larger keys are selected, `left` of those with these leading bits will be."""

    bits: jax.Array
    left: jax.Array


def _unsigned(key: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """uint32 keys in the same order, the lowest 0."""
    return jax.lax.bitcast_convert_type(key - jnp.int32(keys.lowest(dtype)), jnp.uint32)


def _count_digits(key: jax.Array, counted: jax.Array | None, prefix: jax.Array, shift: int) -> jax.Array:
    """int32 [16]: how many keys [D,L] with the prefix above bit `shift` + 4 have each value of the digit at `shift`."""
    u32 = jnp.uint32
    digit = (key >> u32(shift)) - (prefix << u32(DIGIT_BITS))
    one = u32(1) << ((digit << u32(2)) & u32(28))
    is_low, is_high = digit < 8, (digit >= 8) & (digit < 16)
    if counted is not None:
        is_low, is_high = is_low & counted, is_high & counted
    low = jnp.sum(jnp.where(is_low, one, u32(0)), axis=0, dtype=u32)
    high = jnp.sum(jnp.where(is_high, one, u32(0)), axis=0, dtype=u32)
    # Nibbles j and j + 4 move to the two halves of a word.
    place = (jnp.arange(4, dtype=jnp.int32) * 4).astype(u32)[:, None]
    low = jnp.sum((low[None, :] >> place) & u32(0x000F000F), axis=1, dtype=u32)
    high = jnp.sum((high[None, :] >> place) & u32(0x000F000F), axis=1, dtype=u32)
    value = jnp.arange(BINS, dtype=jnp.int32)[:, None]
    words = jnp.where(value < 8, low[None, :], high[None, :])
    words = jnp.where((value & 3) == jnp.arange(4, dtype=jnp.int32)[None, :], words, u32(0))
    word = jnp.sum(words, axis=1, dtype=u32)
    upper = (jnp.arange(BINS, dtype=jnp.int32) & 4) > 0
    return jnp.where(upper, word >> u32(16), word & u32(0xFFFF)).astype(jnp.int32)


def _descend(prefix: Prefix, totals: jax.Array) -> tuple[Prefix, jax.Array]:
    """Adds the next digit, given how many keys have each value of it; also returns that digit."""
    value = jnp.arange(BINS, dtype=jnp.int32)
    from_here = jnp.sum(jnp.where(value[None, :] >= value[:, None], totals[None, :], 0), axis=1)
    digit = keys.count(from_here >= prefix.left) - 1
    above = jnp.sum(jnp.where(value > digit, totals, 0))
    bits = (prefix.bits << jnp.uint32(DIGIT_BITS)) | digit.astype(jnp.uint32)
    return Prefix(bits, prefix.left - above), digit


def _load_counts(counts_ref, row, tiles: int) -> tuple[jax.Array, jax.Array]:
    """counts [R,C,16] of a row, [C',16] padded with zeros, and the tile index [C',1]."""
    tile = jnp.arange(power_of_two(tiles), dtype=jnp.int32)[:, None]
    value = jnp.arange(BINS, dtype=jnp.int32)[None, :]
    mask = jnp.broadcast_to(tile < tiles, (tile.size, BINS))
    return pltriton.load(counts_ref.at[row, tile, value], mask=mask, other=0), tile


def _next_prefix(state_ref, k_ref, row, counts, width) -> tuple[Prefix, jax.Array]:
    """The prefix with the digit that `counts` is about. state [R,2] is the one before; None before the first digit."""
    totals = jnp.sum(counts, axis=0)
    if state_ref is None:
        wanted = jnp.clip(jnp.minimum(k_ref[row], jnp.sum(totals)), 0, width)
        prefix = Prefix(jnp.uint32(0), wanted)
    else:
        prefix = Prefix(jax.lax.bitcast_convert_type(state_ref[row, 0], jnp.uint32), state_ref[row, 1])
    return _descend(prefix, totals)


def _tile_index(tile, blocks: BlockSizes) -> jax.Array:
    lane = jnp.arange(blocks.tile // blocks.depth, dtype=jnp.int32)[None, :]
    return tile * blocks.tile + jnp.arange(blocks.depth, dtype=jnp.int32)[:, None] * lane.size + lane


def _first_kernel(scores_ref, length_ref, counts_ref, *, blocks: BlockSizes) -> None:
    """scores [R,S], length [R] -> counts [R,C,16] of the first digit among eligible scores."""
    tile, row = pl.program_id(0), pl.program_id(1)
    dtype = scores_ref.dtype
    key = _unsigned(keys.load(scores_ref, row, _tile_index(tile, blocks), length_ref[row]), dtype)
    counts = _count_digits(key, key > 0, jnp.uint32(0), keys.key_bits(dtype) - DIGIT_BITS)
    pltriton.store(counts_ref.at[row, tile, jnp.arange(BINS, dtype=jnp.int32)], counts)


def _digit_kernel(*refs, blocks: BlockSizes, width: int, shift: int, first: bool) -> None:
    """Counts one more digit.

    scores [R,S]; length, k [R]; old counts [R,C,16]; unless first, state [R,2] and above [R,C] -> new counts, state and
    above, which is how many keys of a tile are larger than all that have the prefix.
    """
    scores_ref, length_ref, k_ref, old_ref, *rest = refs
    old_state_ref, old_above_ref = (None, None) if first else rest[:2]
    counts_ref, state_ref, above_ref = rest[-3:]
    tile, row = pl.program_id(0), pl.program_id(1)
    key = keys.load(scores_ref, row, _tile_index(tile, blocks), length_ref[row])
    counts, tiles = _load_counts(old_ref, row, counts_ref.shape[1])
    prefix, digit = _next_prefix(old_state_ref, k_ref, row, counts, width)

    value = jnp.arange(BINS, dtype=jnp.int32)[None, :]
    above = jnp.sum(jnp.where((tiles == tile) & (value > digit), counts, 0))
    above_ref[row, tile] = above if first else above + old_above_ref[row, tile]
    # Every program of a row stores the same two words.
    state_ref[row, 0] = jax.lax.bitcast_convert_type(prefix.bits, jnp.int32)
    state_ref[row, 1] = prefix.left
    # A prefix of zeros also counts what is not eligible, in the digit 0, which nothing asks for.
    counts = _count_digits(_unsigned(key, scores_ref.dtype), None, prefix.bits, shift)
    pltriton.store(counts_ref.at[row, tile, jnp.arange(BINS, dtype=jnp.int32)], counts)


def _write_kernel(
    scores_ref, length_ref, k_ref, counts_ref, state_ref, above_ref, rows_ref, count_ref, *, blocks: BlockSizes
) -> None:
    """Writes the selected rows of one tile: counts [R,C,16] of the last digit -> rows [R,W], count [R]."""
    width, num_tiles = rows_ref.shape[1], counts_ref.shape[1]
    tile, row = pl.program_id(0), pl.program_id(1)
    index = tile * blocks.tile + jnp.arange(blocks.tile, dtype=jnp.int32)
    key = keys.load(scores_ref, row, index, length_ref[row])
    counts, tiles = _load_counts(counts_ref, row, num_tiles)
    prefix, digit = _next_prefix(state_ref, k_ref, row, counts, width)
    threshold = jax.lax.bitcast_convert_type(prefix.bits, jnp.int32) + jnp.int32(keys.lowest(scores_ref.dtype))

    value = jnp.arange(BINS, dtype=jnp.int32)[None, :]
    all_tiles = jnp.arange(power_of_two(num_tiles), dtype=jnp.int32)
    above = pltriton.load(above_ref.at[row, all_tiles], mask=all_tiles < num_tiles, other=0)
    last_digit = jnp.where(value > digit, counts, 0)
    total_above = jnp.sum(above) + jnp.sum(last_digit)
    above_before = jnp.sum(jnp.where(all_tiles < tile, above, 0)) + jnp.sum(jnp.where(tiles < tile, last_digit, 0))
    equal_before = jnp.sum(jnp.where((tiles < tile) & (value == digit), counts, 0))
    selected, place, _, _ = keys.places(key, keys.Cut(threshold, prefix.left), above_before, equal_before)
    # Interpret mode drops stores past the end, the GPU masks them.
    pltriton.store(rows_ref.at[row, jnp.where(selected, place, width)], index, mask=selected)

    count = total_above + prefix.left
    share = ceil_div(width, num_tiles)
    block = min(power_of_two(share), 1024)
    for begin in range(0, share, block):
        offset = begin + jnp.arange(block, dtype=jnp.int32)
        slot = tile * share + offset
        padding = (offset < share) & (slot >= count) & (slot < width)
        pltriton.store(rows_ref.at[row, jnp.where(padding, slot, width)], jnp.full_like(slot, -1), mask=padding)
    count_ref[row] = count


def row_selection(
    scores: jax.Array, length: jax.Array, k: jax.Array, *, width: int, blocks: BlockSizes, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See the public op."""
    num_rows, size = scores.shape
    tiles = ceil_div(size, blocks.tile)
    counts_shape = jax.ShapeDtypeStruct((num_rows, tiles, BINS), jnp.int32)
    state_shape = jax.ShapeDtypeStruct((num_rows, 2), jnp.int32)
    above_shape = jax.ShapeDtypeStruct((num_rows, tiles), jnp.int32)

    def run(kernel: Any, name: str, shapes: Any, *operands: jax.Array) -> Any:
        return launch(kernel, name, (tiles, num_rows), shapes, *operands, blocks=blocks, interpret=interpret)

    shift = keys.key_bits(scores.dtype) - DIGIT_BITS
    counts = run(_first_kernel, "row_selection_first", counts_shape, scores, length)
    state = ()
    while shift:
        shift -= DIGIT_BITS
        kernel = functools.partial(_digit_kernel, width=width, shift=shift, first=not state)
        shapes = (counts_shape, state_shape, above_shape)
        counts, *state = run(kernel, "row_selection_digit", shapes, scores, length, k, counts, *state)
    rows_shape = jax.ShapeDtypeStruct((num_rows, width), jnp.int32)
    count_shape = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    return run(_write_kernel, "row_selection", (rows_shape, count_shape), scores, length, k, counts, *state)
