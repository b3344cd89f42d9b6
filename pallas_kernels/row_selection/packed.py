"""Two 16-bit keys per register, so that the registers of a multiprocessor hold two rows of 32K scores.

The two rows share a program: each step of the search then costs them one reduction, and their work fills the time that
a single row's threads wait at its barriers. float32 keys are searched in two halves: first the upper 16 bits of all
keys, then the lower ones of those whose upper bits are the threshold's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.row_selection import keys, resident
from pallas_kernels.row_selection.blocks import BlockSizes

LOWEST = -(1 << 15)


def _pack(
    scores_ref: Any, row: jax.Array, length: jax.Array, tile: int, part: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Words [P,tile/2] of part(key), from -2^15 to 2^15 - 1, of scores i and i + tile / 2 of rows [P]: both loads are
    contiguous."""
    lane = jnp.arange(tile // 2, dtype=jnp.int32)[None, :]

    def add(step, word):
        key = keys.load(scores_ref, row[:, None], step * (tile // 2) + lane, length[:, None])
        return (word << 16) | (part(key) & 0xFFFF)

    # A loop, so that the scores of one half have left the registers before those of the other come.
    halves = jnp.where(jnp.max(length) > tile // 2, jnp.int32(2), jnp.int32(1))
    return jax.lax.fori_loop(jnp.int32(0), halves, add, jnp.full((row.size, tile // 2), LOWEST & 0xFFFF, jnp.int32))


def _search(word: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The wanted[p]-th largest of each row of packed keys, and how many are larger."""

    def step(i, state):
        low, above = state
        candidate = low + (jnp.int32(1) << (15 - i))
        # The lower key of a word cannot change how the word compares with a candidate in the upper half.
        shifted = (candidate << 16)[:, None]
        reach = jnp.sum((word >= shifted).astype(jnp.int32) + ((word << 16) >= shifted).astype(jnp.int32), axis=1)
        enough = reach >= wanted
        return jnp.where(enough, candidate, low), jnp.where(enough, above, reach)

    state = jnp.full_like(wanted, LOWEST), jnp.zeros_like(wanted)
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(16), step, state)


def _kernel(scores_ref, length_ref, k_ref, rows_ref, count_ref, *, blocks: BlockSizes) -> None:
    """scores [R,S]; length, k [R] -> rows [R,W], count [R]."""
    (num_rows, size), width = scores_ref.shape, rows_ref.shape[1]
    first = pl.program_id(0) * blocks.packed
    slot = jnp.arange(blocks.packed, dtype=jnp.int32)
    # The second row of the last program may not exist; it searches the one before it and writes nothing.
    row = jnp.minimum(first + slot, num_rows - 1)
    length = jnp.clip(pltriton.load(length_ref.at[row]), 0, size)
    k = pltriton.load(k_ref.at[row])
    narrow = keys.key_bits(scores_ref.dtype) == 16
    word = _pack(scores_ref, row, length, blocks.tile, (lambda key: key) if narrow else (lambda key: key >> 16))
    present = ((word >> 16) > LOWEST).astype(jnp.int32) + ((word << 16) > LOWEST << 16).astype(jnp.int32)
    wanted = jnp.clip(jnp.minimum(k, jnp.sum(present, axis=1)), 0, width)
    threshold, above = _search(word, wanted)
    if not narrow:
        upper, left = threshold[:, None], wanted - above
        # Keys that have the lowest lower half count as absent until nothing else is left, and ties take them in.
        half = lambda key: jnp.where((key >> 16) == upper, (key & 0xFFFF) + LOWEST, LOWEST)  # noqa: E731
        # Always the same row; a compiler that knew it would keep the scores in registers through the first search.
        word = _pack(scores_ref, row + jnp.minimum(left, 0), length, blocks.tile, half)
        lower, above_here = _search(word, left)
        threshold, above = (threshold << 16) + (lower - LOWEST), above + above_here
    for p in range(blocks.packed):
        pick = lambda x, p=p: jnp.sum(jnp.where(slot == p, x, 0))  # noqa: E731
        cut = keys.Cut(pick(threshold), pick(wanted - above))

        @pl.when(first + p < num_rows)
        def _(p=p, cut=cut, pick=pick):
            resident.write(scores_ref, rows_ref, count_ref, first + p, pick(length), pick(wanted), cut, blocks)


def row_selection(
    scores: jax.Array, length: jax.Array, k: jax.Array, *, width: int, blocks: BlockSizes, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See the public op. A row must fit a tile."""
    return resident.launch(_kernel, scores, length, k, width=width, blocks=blocks, interpret=interpret)
