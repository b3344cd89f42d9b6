"""Integer keys in the order of the scores, and the places of selected keys: what every path is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

# A word holds two counts of a tile.
MAX_TILE = 1 << 15


class Cut(NamedTuple):
    """Selected are the keys above `threshold`, and the first `ties` of those equal to it."""

    threshold: jax.Array
    ties: jax.Array


def key_bits(dtype: jnp.dtype) -> int:
    """Bits that tell keys of this dtype apart."""
    return 8 * jnp.dtype(dtype).itemsize


def lowest(dtype: jnp.dtype) -> int:
    """The key of what may not be selected; every score's is higher."""
    return -(1 << (key_bits(dtype) - 1))


def make(scores: jax.Array, in_row: jax.Array) -> jax.Array:
    """int32 keys: equal where the scores are equal, the lowest for NaN and outside the row."""
    integer = jnp.int16 if scores.dtype == jnp.bfloat16 else jnp.int32
    pattern = jax.lax.bitcast_convert_type(scores, integer).astype(jnp.int32)
    infinity = 0x7F80 if integer == jnp.int16 else 0x7F800000
    # A sign and a magnitude become a two's complement, in which -0.0 and 0.0 are one number.
    sign = pattern >> 31
    magnitude = pattern & (0x7FFF if integer == jnp.int16 else 0x7FFFFFFF)
    key = (magnitude ^ sign) - sign
    return jnp.where(in_row & (magnitude <= infinity), key, lowest(scores.dtype))


def load(scores_ref: Any, row: jax.Array, index: jax.Array, length: jax.Array) -> jax.Array:
    """Keys of scores[row, index]."""
    size = scores_ref.shape[1]
    # The length is left out of the load's mask: a mask that may end anywhere would make every load as small as a score.
    scores = pltriton.load(scores_ref.at[row, index], mask=index < size, other=0.0)
    return make(scores, index < jnp.minimum(length, size))


def count(condition: jax.Array) -> jax.Array:
    """How many elements of `condition` hold, int32 []."""
    return jnp.sum(condition.astype(jnp.int32))


def search(reaching: Callable[[jax.Array], jax.Array], wanted: jax.Array, dtype: jnp.dtype) -> Cut:
    """Finds the `wanted`-th largest key bit by bit; `reaching(key)` is how many keys are at least `key`, int32 []."""
    bits = key_bits(dtype)

    def step(i, state):
        low, above = state
        candidate = low + (jnp.int32(1) << (bits - 1 - i))
        reach = reaching(candidate)
        enough = reach >= wanted
        # A candidate that too few keys reach is the upper end of what is left to search.
        return jnp.where(enough, candidate, low), jnp.where(enough, above, reach)

    state = jnp.int32(lowest(dtype)), jnp.int32(0)
    threshold, above = jax.lax.fori_loop(jnp.int32(0), jnp.int32(bits), step, state)
    return Cut(threshold, wanted - above)


def words(above: jax.Array, equal: jax.Array) -> jax.Array:
    """int32: 1 above the threshold, 2^16 where equal, so that a sum holds both counts of at most `MAX_TILE` scores."""
    return jnp.where(above, jnp.int32(1), jnp.where(equal, jnp.int32(1 << 16), jnp.int32(0)))


def places(
    key: jax.Array, cut: Cut, above_before: jax.Array, equal_before: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Which keys [E] of a tile are selected, where they go, and the counts that the next tile starts with.

    The counts are of keys above the threshold and equal to it in the tiles before.
    """
    above, equal = key > cut.threshold, key == cut.threshold
    # One scan makes both counts.
    word = words(above, equal)
    through = jnp.cumsum(word)
    total = jnp.sum(word)
    num_above = above_before + (through & 0xFFFF)
    num_equal = equal_before + (through >> 16)
    selected = above | (equal & (num_equal <= cut.ties))
    # A selected key's own count is in the sum.
    place = num_above + jnp.minimum(num_equal, cut.ties) - 1
    return selected, place, above_before + (total & 0xFFFF), equal_before + (total >> 16)
