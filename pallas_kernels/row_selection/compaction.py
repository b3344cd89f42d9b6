"""Looks up which index belongs in each slot of the output.

The other way round every score would need a scan to know its place, which is far more work than the scan of the groups
of 8 here. The counts through each group are in memory; a slot finds its group by bisection, counts within these 8
scores, and neighbouring slots are stored together.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.row_selection import keys, packed


def num_selected(words: jax.Array, ties: jax.Array) -> jax.Array:
    """How many of the scores counted in `words`, see `keys.words`, are selected if `ties` equal ones are at most."""
    return (words & 0xFFFF) + jnp.minimum(jax.lax.shift_right_logical(words, jnp.int32(16)), ties)


def write_tile(
    scores_ref: Any,
    through_ref: Any,
    row: jax.Array,
    tile: jax.Array | int,
    words: jax.Array,
    length: jax.Array,
    cut: keys.Cut,
    slots: int,
    num_slots: jax.Array | int,
    store: Any,
    interpret: bool,
) -> None:
    """Calls `store(slot, index)` for `slots` slots at a time.

    Args:
      scores_ref: [R,S].
      through_ref: [R,G], scratch for the counts through each group of 8 scores.
      row: which row.
      tile: which tile.
      words: int32 [N], the counts in each group of the tile, see `packed.group_words`.
      length: of the row.
      cut: what is selected of this tile.
      slots: how many slots at a time.
      num_slots: how many slots to fill; those past the last selected score get some index.
      store: what to do with the int32 [slots] slots, which count from the tile's first, and indices.
      interpret: as in `pallas_call`.
    """
    groups = words.shape[0]
    pltriton.store(through_ref.at[row, tile * groups + jnp.arange(groups, dtype=jnp.int32)], jnp.cumsum(words))
    if not interpret:
        # Other threads read these counts.
        pltriton.debug_barrier()

    def write(step, carry):
        slot = step * slots + jnp.arange(slots, dtype=jnp.int32)
        store(slot, _find(scores_ref, through_ref, row, tile, groups, length, cut, slot, interpret))
        return carry

    jax.lax.fori_loop(jnp.int32(0), jnp.int32(pl.cdiv(num_slots, slots)), write, jnp.int32(0))


def _find(scores_ref, through_ref, row, tile, groups, length, cut, slot, interpret) -> jax.Array:
    """int32 like slot [E]: the index of the selected score that has slot[e] selected ones before it in the tile."""
    # The first group through which more than `slot` are selected, and the counts before it.
    group = tile * groups + jnp.zeros_like(slot)
    before = jnp.zeros_like(slot)
    half = groups // 2
    while half:
        through = pltriton.load(through_ref.at[row, group + (half - 1)])
        later = num_selected(through, cut.ties) <= slot
        before = jnp.where(later, through, before)
        group = jnp.where(later, group + half, group)
        half //= 2
    first = group * packed.GROUP
    index = first[:, None] + jnp.arange(packed.GROUP, dtype=jnp.int32)[None, :]
    x = packed.load_eligible(scores_ref, row, index, length, inside=False)
    words = keys.words(*packed.above_and_equal(x, cut.threshold, interpret))
    through = before[:, None] + jnp.cumsum(words, axis=1)
    return first + jnp.sum((num_selected(through, cut.ties) <= slot[:, None]).astype(jnp.int32), axis=1)
