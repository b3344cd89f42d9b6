"""One program per row: the row stays in registers while a binary search over its keys finds the threshold."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.row_selection import keys
from pallas_kernels.row_selection.blocks import BlockSizes
from pallas_kernels.tiling import ceil_div


def _threshold(key: jax.Array, wanted: jax.Array, dtype: jnp.dtype, bits_per_pass: int) -> keys.Cut:
    """The `wanted`-th largest key, and how many keys equal to it are among the `wanted` largest."""
    bits = keys.key_bits(dtype)

    def search(step, state):
        low, above = state
        shift = bits - bits_per_pass * (step + 1)
        # Candidates rise, counts fall: the answer's next bits are the number of candidates that enough keys reach.
        new_low, new_above = low, above
        for digit in range(1, 1 << bits_per_pass):
            candidate = low + (jnp.int32(digit) << shift)
            reach = keys.count(key >= candidate)
            enough = reach >= wanted
            new_low = jnp.where(enough, candidate, new_low)
            # The first candidate that too few keys reach is the upper end of what is left to search.
            new_above = jnp.where(enough, new_above, jnp.maximum(new_above, reach))
        return new_low, new_above

    state = jnp.int32(keys.lowest(dtype)), jnp.int32(0)
    threshold, above = jax.lax.fori_loop(jnp.int32(0), jnp.int32(bits // bits_per_pass), search, state)
    return keys.Cut(threshold, wanted - above)


def _kernel(scores_ref, length_ref, k_ref, rows_ref, count_ref, *, blocks: BlockSizes) -> None:
    """scores [R,S]; length, k [R] -> rows [R,W], count [R]."""
    size, width = scores_ref.shape[1], rows_ref.shape[1]
    row = pl.program_id(0)
    length = jnp.clip(length_ref[row], 0, size)
    key = keys.load(scores_ref, row, jnp.arange(blocks.tile, dtype=jnp.int32), length)
    eligible = keys.count(key > keys.lowest(scores_ref.dtype))
    wanted = jnp.clip(jnp.minimum(k_ref[row], eligible), 0, width)
    cut = _threshold(key, wanted, scores_ref.dtype, blocks.bits_per_pass)

    write(scores_ref, rows_ref, count_ref, row, length, wanted, cut, blocks)


def write(
    scores_ref: Any,
    rows_ref: Any,
    count_ref: Any,
    row: jax.Array,
    length: jax.Array,
    wanted: jax.Array,
    cut: keys.Cut,
    blocks: BlockSizes,
) -> None:
    """Writes the selected indices of a row in order, the padding behind them, and their number."""
    width = rows_ref.shape[1]
    # In pieces, from memory again: the counts of a whole row do not fit beside its keys.
    piece = min(blocks.tile, blocks.per_thread * 32 * blocks.num_warps)

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


def launch(
    kernel: Any, scores: jax.Array, length: jax.Array, k: jax.Array, *, width: int, blocks: BlockSizes, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Runs `kernel`, a program for one row, or for as many as have their keys packed."""
    num_rows = scores.shape[0]
    return pl.pallas_call(
        functools.partial(kernel, blocks=blocks),
        out_shape=(
            jax.ShapeDtypeStruct((num_rows, width), jnp.int32),
            jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        ),
        grid=(ceil_div(num_rows, max(1, blocks.packed)),),
        compiler_params=pltriton.CompilerParams(num_warps=blocks.num_warps, num_stages=1),
        interpret=interpret,
        name="row_selection",
    )(scores, length, k)


def row_selection(
    scores: jax.Array, length: jax.Array, k: jax.Array, *, width: int, blocks: BlockSizes, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See the public op. A row must fit a tile."""
    return launch(_kernel, scores, length, k, width=width, blocks=blocks, interpret=interpret)
