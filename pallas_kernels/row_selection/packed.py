"""One program per row with two 16-bit keys per register, so that a multiprocessor holds two rows of 32K scores.

While one of its two programs waits, at a barrier of the search or for memory, the other one works. float32 keys are
searched in two halves: first the upper 16 bits of all keys, then the lower ones of those whose upper bits are the
threshold's.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.row_selection import keys, resident
from pallas_kernels.row_selection.blocks import BlockSizes

LOWEST = -(1 << 15)


def _pack(scores_ref: Any, row: jax.Array, length: jax.Array, tile: int, part: Any) -> jax.Array:
    """Words of part(key), from -2^15 to 2^15 - 1, of score i and of score i + tile / 2: both loads are contiguous."""
    index = jnp.arange(tile // 2, dtype=jnp.int32)
    low = part(keys.load(scores_ref, row, index, length))
    high = part(keys.load(scores_ref, row, tile // 2 + index, length))
    return (high << 16) | (low & 0xFFFF)


def _search(word: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The `wanted`-th largest of the packed keys, and how many are larger."""

    def step(i, state):
        low, above = state
        candidate = low + (jnp.int32(1) << (15 - i))
        # The lower key of a word cannot change how the word compares with a candidate in the upper half.
        shifted = candidate << 16
        reach = jnp.sum((word >= shifted).astype(jnp.int32) + ((word << 16) >= shifted).astype(jnp.int32))
        enough = reach >= wanted
        return jnp.where(enough, candidate, low), jnp.where(enough, above, reach)

    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(16), step, (jnp.int32(LOWEST), jnp.int32(0)))


def _kernel(scores_ref, length_ref, k_ref, rows_ref, count_ref, *, blocks: BlockSizes) -> None:
    """scores [R,S]; length, k [R] -> rows [R,W], count [R]."""
    size, width = scores_ref.shape[1], rows_ref.shape[1]
    row = pl.program_id(0)
    length = jnp.clip(length_ref[row], 0, size)
    narrow = keys.key_bits(scores_ref.dtype) == 16
    word = _pack(scores_ref, row, length, blocks.tile, (lambda key: key) if narrow else (lambda key: key >> 16))
    eligible = jnp.sum(((word >> 16) > LOWEST).astype(jnp.int32) + ((word << 16) > LOWEST << 16).astype(jnp.int32))
    wanted = jnp.clip(jnp.minimum(k_ref[row], eligible), 0, width)
    threshold, above = _search(word, wanted)
    if not narrow:
        upper, left = threshold, wanted - above
        # Keys that have the lowest lower half count as absent until nothing else is left, and ties take them in.
        half = lambda key: jnp.where((key >> 16) == upper, (key & 0xFFFF) + LOWEST, LOWEST)  # noqa: E731
        # Always the same row; a compiler that knew it would keep the scores in registers through the first search.
        word = _pack(scores_ref, row + jnp.minimum(left, 0), length, blocks.tile, half)
        lower, above_here = _search(word, left)
        threshold, above = (upper << 16) + (lower - LOWEST), above + above_here
    resident.write(scores_ref, rows_ref, count_ref, row, length, wanted, keys.Cut(threshold, wanted - above), blocks)


def row_selection(
    scores: jax.Array, length: jax.Array, k: jax.Array, *, width: int, blocks: BlockSizes, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See the public op. A row must fit a tile."""
    return resident.launch(_kernel, scores, length, k, width=width, blocks=blocks, interpret=interpret)
