"""What the programs of attention kernels share: which queries one attends, and where its results go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import online
from pallas_kernels.tiling import ceil_div, power_of_two


class Tile(NamedTuple):
    """What one program attends: some (query, head) pairs of a kv head, and a split of the cache or of a list.

    Attributes:
      batch, kv_head, split: int32.
      row_tile: int32, which of the kv head's tiles.
      query, head: int32 [rows]; `query` is past the last one where the tile is padding.
      position: int32 [rows], of the queries.
      column: int32 [width], of a head; `in_head` masks those past the head dim.
    """

    batch: jax.Array
    kv_head: jax.Array
    split: jax.Array
    row_tile: jax.Array
    query: jax.Array
    head: jax.Array
    position: jax.Array
    column: jax.Array
    in_head: jax.Array


def tile_of(num_rows: int, group: int, head_dim: int, start_ref: Any, rows: int, *, last_first: bool = False) -> Tile:
    """This program's tile of `rows` pairs in a grid (kv heads x row tiles, splits, batch); query 0 is at start [B].

    `last_first` hands out the tiles of a kv head from the last one on.
    """
    row_tiles = ceil_div(num_rows * group, rows)
    batch, split = pl.program_id(2), pl.program_id(1)
    kv_head, row_tile = pl.program_id(0) // row_tiles, pl.program_id(0) % row_tiles
    if last_first:
        row_tile = row_tiles - 1 - row_tile
    tile_row = row_tile * rows + jnp.arange(rows, dtype=jnp.int32)
    # Padding keeps an index past the end: interpret mode drops such stores, the GPU masks them.
    query, head = tile_row // group, kv_head * group + tile_row % group
    column = jnp.arange(power_of_two(head_dim, 16), dtype=jnp.int32)
    position = start_ref[batch] + query
    return Tile(batch, kv_head, split, row_tile, query, head, position, column, column < head_dim)


def load_queries(q_ref: Any, tile: Tile) -> jax.Array:
    """The tile's queries [rows,H] of q [B,T,N,H]; zeros where it is padding."""
    return pltriton.load(
        q_ref.at[tile.batch, tile.query[:, None], tile.head[:, None], tile.column[None, :]],
        mask=(tile.query < q_ref.shape[1])[:, None] & tile.in_head[None, :],
        other=0.0,
    )


def result_shapes(
    batch: int, num_rows: int, heads: int, head_dim: int, dtype: jnp.dtype, num_splits: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What the programs write: the result with one split, else the parts that are to be merged."""
    if num_splits == 1:
        return (jax.ShapeDtypeStruct((batch, num_rows, heads, head_dim), dtype),)
    parts = (batch, num_splits, num_rows, heads)
    part = jax.ShapeDtypeStruct(parts, jnp.float32)
    return jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32), part, part


def store_results(results: Sequence[Any], tile: Tile, state: online.State, num_rows: int, lse_ref: Any = None) -> None:
    """Writes out [B,T,N,H] and, where it is wanted, lse [B,T,N]; or acc [B,C,T,N,H], top and total [B,C,T,N]."""
    in_tile = tile.query < num_rows
    where = in_tile[:, None] & tile.in_head[None, :]
    element = tile.query[:, None], tile.head[:, None], tile.column[None, :]
    if len(results) == 1:
        out, lse = online.finish(state)
        pltriton.store(results[0].at[tile.batch, *element], out.astype(results[0].dtype), mask=where)
        if lse_ref is not None:
            pltriton.store(lse_ref.at[tile.batch, tile.query, tile.head], lse, mask=in_tile)
    else:
        acc, top, total = state
        pltriton.store(results[0].at[tile.batch, tile.split, *element], acc, mask=where)
        pltriton.store(results[1].at[tile.batch, tile.split, tile.query, tile.head], top, mask=in_tile)
        pltriton.store(results[2].at[tile.batch, tile.split, tile.query, tile.head], total, mask=in_tile)
