"""Several programs per row of bfloat16 scores: a radix search whose two digits are counted in histograms of 256 bins.

Three launches: the first digit's histogram of every tile; the second digit's, among scores with the threshold's first
digit; the indices. Every program adds up what the launch before left for all tiles of its row, and so knows the next
digit without a launch of its own for it, and the last launch knows how many the tiles before its own select.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.row_selection import compaction, keys, packed
from pallas_kernels.row_selection.blocks import MAX_RADIX_SIZE, BlockSizes
from pallas_kernels.row_selection.histogram import histogram
from pallas_kernels.row_selection.launch import launch
from pallas_kernels.tiling import ceil_div, power_of_two

BINS = 256


def _bins() -> jax.Array:
    return jnp.arange(BINS, dtype=jnp.int32)


class _Bits(NamedTuple):
    """The bits of a tile's scores, both zeros as 0, int32 [tile] each; and which may be selected."""

    upper: jax.Array
    lower: jax.Array
    eligible: jax.Array


def _bits(scores_ref, row, tile, length, blocks: BlockSizes) -> _Bits:
    index = tile * blocks.tile + jnp.arange(blocks.tile, dtype=jnp.int32)
    size = scores_ref.shape[1]
    x = packed.load(scores_ref, row, index, inside=size % blocks.tile == 0)
    bits = jax.lax.bitcast_convert_type(x, jnp.int16).astype(jnp.int32) & 0xFFFF
    bits = jnp.where(bits == 0x8000, 0, bits)
    return _Bits(bits >> 8, bits & 0xFF, (index < jnp.minimum(length, size)) & (x == x))


def _ascending(upper: jax.Array) -> jax.Array:
    """The first digit of scores with these upper bits."""
    return jnp.where(upper < 128, 128 + upper, 255 - upper)


def _upper(digit: jax.Array) -> jax.Array:
    """The upper bits of scores with this first digit."""
    return jnp.where(digit < 128, 255 - digit, digit - 128)


def _descend(counts: jax.Array, left: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The bin of counts [256] with the `left`-th score from above, and how many are in higher bins; the last for 0."""
    reach = jnp.sum(counts) - jnp.cumsum(counts) + counts
    # Both in one sum: the bins that `left` scores reach, and the scores in all others.
    word = jnp.sum(jnp.where(reach >= left, 1, counts << 9))
    return (word & 0x1FF) - 1, word >> 9


def _load_counts(counts_ref, row) -> tuple[jax.Array, jax.Array]:
    """counts [R,C,256] of a row, [C',256] padded with zeros, and the tile index [C',1]."""
    tiles = counts_ref.shape[1]
    tile = jnp.arange(power_of_two(tiles), dtype=jnp.int32)[:, None]
    mask = jnp.broadcast_to(tile < tiles, (tile.size, BINS))
    return pltriton.load(counts_ref.at[row, tile, _bins()[None, :]], mask=mask, other=0), tile


def _first_kernel(scores_ref, length_ref, counts_ref, *, blocks: BlockSizes, interpret: bool) -> None:
    """scores [R,S], length [R] -> counts [R,C,256] of the first digit of scores that may be selected."""
    tile, row = pl.program_id(0), pl.program_id(1)
    bits = _bits(scores_ref, row, tile, length_ref[row], blocks)
    counts = histogram(bits.upper, bits.eligible, bins=BINS, interpret=interpret)
    pltriton.store(counts_ref.at[row, tile, _ascending(_bins())], counts)


def _second_kernel(
    scores_ref,
    length_ref,
    k_ref,
    first_ref,
    counts_ref,
    state_ref,
    above_ref,
    *,
    blocks: BlockSizes,
    width: int,
    interpret: bool,
) -> None:
    """scores [R,S]; length, k [R]; counts of the first digit [R,C,256] -> counts of the second, state and above.

    state [R,3]: the threshold's first digit, how many are to be selected of those that have it, and of all.
    above [R,C]: how many scores of a tile have a higher first digit.
    """
    tile, row = pl.program_id(0), pl.program_id(1)
    bits = _bits(scores_ref, row, tile, length_ref[row], blocks)
    totals = jnp.sum(_load_counts(first_ref, row)[0], axis=0)
    wanted = jnp.clip(jnp.minimum(k_ref[row], jnp.sum(totals)), 0, width)
    digit, above = _descend(totals, wanted)
    own = pltriton.load(first_ref.at[row, tile, _bins()])
    above_ref[row, tile] = jnp.sum(jnp.where(_bins() > digit, own, 0))
    # Every program of a row stores the same three words.
    state_ref[row, 0] = digit
    state_ref[row, 1] = wanted - above
    state_ref[row, 2] = wanted
    here = bits.eligible & (bits.upper == _upper(digit))
    counts = histogram(bits.lower, here, bins=BINS, interpret=interpret)
    pltriton.store(counts_ref.at[row, tile, jnp.where(digit < 128, 255 - _bins(), _bins())], counts)


def _write_kernel(
    scores_ref,
    length_ref,
    counts_ref,
    state_ref,
    above_ref,
    rows_ref,
    count_ref,
    through_ref,
    *,
    blocks: BlockSizes,
    interpret: bool,
) -> None:
    """Writes the selected indices of one tile: counts [R,C,256] of the second digit -> rows [R,W], count [R]."""
    size, width, num_tiles = scores_ref.shape[1], rows_ref.shape[1], counts_ref.shape[1]
    tile, row = pl.program_id(0), pl.program_id(1)
    length = length_ref[row]
    x = packed.load_eligible(
        scores_ref, row, packed.tile_index(tile, blocks.tile), length, inside=size % blocks.tile == 0
    )
    first, left, wanted = state_ref[row, 0], state_ref[row, 1], state_ref[row, 2]
    counts, tiles = _load_counts(counts_ref, row)
    digit, above = _descend(jnp.sum(counts, axis=0), left)
    code = first << 8 | digit
    # Between the digits of negative scores and those of others there is room for -0.0, in the keys there is not.
    threshold = jnp.where(first < 128, code + 1, code) + keys.lowest(scores_ref.dtype)

    before = jnp.sum(jnp.where(tiles < tile, counts, 0), axis=0)
    all_tiles = jnp.arange(power_of_two(num_tiles), dtype=jnp.int32)
    above_before = jnp.sum(pltriton.load(above_ref.at[row, all_tiles], mask=all_tiles < tile, other=0))
    above_before += jnp.sum(jnp.where(_bins() > digit, before, 0))
    equal_before = jnp.sum(jnp.where(_bins() == digit, before, 0))
    all_ties = left - above
    cut = keys.Cut(threshold, jnp.maximum(all_ties - equal_before, 0))
    begin = above_before + jnp.minimum(equal_before, all_ties)

    words = packed.group_words(x, cut.threshold, interpret)
    count = compaction.num_selected(jnp.sum(words), cut.ties)
    slots = 32 * blocks.num_warps

    def store(slot, index):
        # Interpret mode drops stores past the end, the GPU masks them.
        place = jnp.where(slot < count, begin + slot, width)
        pltriton.store(rows_ref.at[row, place], index, mask=slot < count)

    compaction.write_tile(scores_ref, through_ref, row, tile, words, length, cut, slots, count, store, interpret)

    share = ceil_div(width, num_tiles)

    def pad(step, carry):
        offset = step * slots + jnp.arange(slots, dtype=jnp.int32)
        slot = tile * share + offset
        padding = (offset < share) & (slot >= wanted) & (slot < width)
        pltriton.store(rows_ref.at[row, jnp.where(padding, slot, width)], jnp.full_like(slot, -1), mask=padding)
        return carry

    begin = jnp.clip(wanted - tile * share, 0, share) // slots
    jax.lax.fori_loop(begin, jnp.int32(ceil_div(share, slots)), pad, jnp.int32(0))
    count_ref[row] = wanted


def row_selection(
    scores: jax.Array, length: jax.Array, k: jax.Array, *, width: int, blocks: BlockSizes, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See the public op. A row holds at most 2^20 scores: counts and bins share a word, see `_descend`."""
    num_rows, size = scores.shape
    assert size <= MAX_RADIX_SIZE, size
    tiles = ceil_div(size, blocks.tile)

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_rows, *shape), jnp.int32)

    def run(kernel: Any, name: str, shapes: Any, *operands: jax.Array, **options: int) -> Any:
        kernel = partial(kernel, interpret=interpret, **options)
        return launch(kernel, name, (tiles, num_rows), shapes, *operands, blocks=blocks, interpret=interpret)

    counts = array(tiles, BINS)
    first = run(_first_kernel, "row_selection_first", counts, scores, length)
    outputs = (counts, array(3), array(tiles))
    second = run(_second_kernel, "row_selection_second", outputs, scores, length, k, first, width=width)
    outputs = (array(width), array(), array(tiles * blocks.tile // packed.GROUP))
    rows, count, _ = run(_write_kernel, "row_selection", outputs, scores, length, *second)
    return rows, count
