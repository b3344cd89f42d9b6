"""What both row selection kernels are made of: order-preserving keys, digit counts of a radix search, compaction.

The threshold, the k-th largest key, is found four bits at a time. Counting one digit is the whole cost, so sixteen
counters live in two registers: an element adds 1 << 4 * digit, a thread adds up at most 15 elements before the counters
are widened to 16 bits, and only then do threads and warps add up theirs. That is about 2 instructions per element and
bit, as one comparison per bit, for a quarter of the reductions across the program.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

DIGIT_BITS = 4
BINS = 1 << DIGIT_BITS
# A counter of 16 bits must hold a tile, one of 4 bits a column of it.
MAX_TILE = 1 << 15
MAX_DEPTH = 8


class Cut(NamedTuple):
    """Where the search stands: keys above the prefix are selected, `left` of those with the prefix will be."""

    prefix: jax.Array
    left: jax.Array


def key_bits(dtype: jnp.dtype) -> int:
    return 8 * jnp.dtype(dtype).itemsize


def keys(scores: jax.Array, in_row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """uint32 keys in the order of the scores, and which are eligible; the others get 0, below the key of -inf."""
    bits = key_bits(scores.dtype)
    scores = scores.astype(jnp.float32)
    eligible = in_row & (scores == scores)
    # Not by adding zero, which a compiler may drop.
    scores = jnp.where(scores == 0.0, 0.0, scores)
    pattern = jax.lax.bitcast_convert_type(scores, jnp.int32)
    # Negative numbers order by their complement, positive ones come after them.
    pattern = pattern ^ ((pattern >> 31) | jnp.int32(-(2**31)))
    key = jax.lax.bitcast_convert_type(pattern, jnp.uint32) >> jnp.uint32(32 - bits)
    return jnp.where(eligible, key, jnp.uint32(0)), eligible


def count_digits(key: jax.Array, counted: jax.Array, shift: int) -> jax.Array:
    """int32 [16]: how many of the `counted` keys [D,L] have each value of the digit at bit `shift`."""
    u32 = jnp.uint32
    digit = (key >> u32(shift)) & u32(BINS - 1)
    one = u32(1) << ((digit & u32(7)) * u32(4))
    low = jnp.sum(jnp.where(counted & (digit < 8), one, u32(0)), axis=0, dtype=u32)
    high = jnp.sum(jnp.where(counted & (digit >= 8), one, u32(0)), axis=0, dtype=u32)
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


def descend(cut: Cut, totals: jax.Array) -> tuple[Cut, jax.Array]:
    """Adds the next digit, given how many keys have each value of it; also returns that digit."""
    value = jnp.arange(BINS, dtype=jnp.int32)
    from_here = jnp.sum(jnp.where(value[None, :] >= value[:, None], totals[None, :], 0), axis=1)
    digit = jnp.sum((from_here >= cut.left).astype(jnp.int32)) - 1
    above = jnp.sum(jnp.where(value > digit, totals, 0))
    prefix = (cut.prefix << jnp.uint32(DIGIT_BITS)) | digit.astype(jnp.uint32)
    return Cut(prefix, cut.left - above), digit


def matches(key: jax.Array, prefix: jax.Array, shift: int) -> jax.Array:
    """Whether the bits above the digit at `shift` are the prefix."""
    return (key >> jnp.uint32(shift + DIGIT_BITS)) == prefix


def places(key: jax.Array, cut: Cut, before: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Which keys [D,L] of a tile are selected, and where in the output; `cut.prefix` is the whole threshold.

    `before` are the numbers of keys above the threshold and equal to it in earlier tiles. The first `cut.left` of the
    equal ones are selected. A tile is in row-major order.
    """
    above, equal = key > cut.prefix, key == cut.prefix
    # Both counts of a tile fit one word, so that one scan makes both.
    word = above.astype(jnp.int32) + (equal.astype(jnp.int32) << 16)
    inclusive = jnp.cumsum(word, axis=1)
    row_total = jnp.sum(word, axis=1)
    row = jnp.arange(key.shape[0], dtype=jnp.int32)
    earlier = jnp.sum(jnp.where(row[None, :] < row[:, None], row_total[None, :], 0), axis=1)
    exclusive = inclusive - word + earlier[:, None]
    num_above = before[0] + (exclusive & 0xFFFF)
    num_equal = before[1] + (exclusive >> 16)
    selected = above | (equal & (num_equal < cut.left))
    return selected, num_above + jnp.minimum(num_equal, cut.left)
