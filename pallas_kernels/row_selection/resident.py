"""One program per row, which holds the whole row in registers: one launch."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.row_selection import digits
from pallas_kernels.row_selection.blocks import BlockSizes


def _kernel(scores_ref, length_ref, k_ref, rows_ref, count_ref, *, blocks: BlockSizes) -> None:
    """scores [R,S]; length, k [R] -> rows [R,W], count [R]."""
    size, width = scores_ref.shape[1], rows_ref.shape[1]
    row = pl.program_id(0)
    depth, lanes = blocks.depth, blocks.lanes
    index = jnp.arange(depth, dtype=jnp.int32)[:, None] * lanes + jnp.arange(lanes, dtype=jnp.int32)[None, :]
    in_row = index < jnp.minimum(length_ref[row], size)
    scores = pltriton.load(scores_ref.at[row, index], mask=in_row, other=0.0)
    key, eligible = digits.keys(scores, in_row)

    shift = digits.key_bits(scores_ref.dtype) - digits.DIGIT_BITS
    totals = digits.count_digits(key, eligible, shift)
    wanted = jnp.minimum(jnp.maximum(k_ref[row], 0), jnp.minimum(jnp.sum(totals), width))
    cut, _ = digits.descend(digits.Cut(jnp.uint32(0), wanted), totals)
    while shift:
        shift -= digits.DIGIT_BITS
        totals = digits.count_digits(key, digits.matches(key, cut.prefix, shift), shift)
        cut, _ = digits.descend(cut, totals)

    selected, place = digits.places(key, cut, (jnp.int32(0), jnp.int32(0)))
    # Interpret mode drops stores past the end, the GPU masks them.
    pltriton.store(rows_ref.at[row, jnp.where(selected, place, width)], index, mask=selected)
    block = min(lanes, 1024)

    def pad(step, carry):
        slot = wanted + step * block + jnp.arange(block, dtype=jnp.int32)
        pltriton.store(rows_ref.at[row, slot], jnp.full((block,), -1, jnp.int32), mask=slot < width)
        return carry

    jax.lax.fori_loop(jnp.int32(0), pl.cdiv(width - wanted, jnp.int32(block)), pad, jnp.int32(0))
    count_ref[row] = wanted


def row_selection(
    scores: jax.Array, length: jax.Array, k: jax.Array, *, width: int, blocks: BlockSizes, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See the public op. A row must fit a tile of `blocks`."""
    num_rows = scores.shape[0]
    return pl.pallas_call(
        functools.partial(_kernel, blocks=blocks),
        out_shape=(
            jax.ShapeDtypeStruct((num_rows, width), jnp.int32),
            jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        ),
        grid=(num_rows,),
        compiler_params=pltriton.CompilerParams(num_warps=blocks.num_warps, num_stages=1),
        interpret=interpret,
        name="row_selection",
    )(scores, length, k)
