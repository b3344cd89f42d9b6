"""Pallas-Triton kernels of `skinny_matmul` and `gated_matmul`: one tile holds all rows of x, weights are read once.

The products are those of the transposes: with the weight as left operand, whose tiles are wide enough, a warp group
multiplies right from shared memory.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch
from pallas_kernels.early_launch import early_launch
from pallas_kernels.skinny_matmul.blocks import BlockSizes, choose_block_sizes
from pallas_kernels.tiling import ceil_div


def _products(x_ref: Any, kernel_ref: Any, blocks: BlockSizes, members: tuple[int | None, ...]) -> list[jax.Array]:
    """float32 [block_n, rows] per member: (x @ kernel[:, member]).T, this program's columns and part of the depth.

    x [R,D]; kernel [D,N], or [D,2,N] with members 0 and 1.
    """
    num_rows, depth = x_ref.shape
    out_row, column = _indices(blocks)
    steps = ceil_div(depth, blocks.block_k)
    split = pl.program_id(1)
    begin, end = steps * split // blocks.num_splits, steps * (split + 1) // blocks.num_splits
    x_mask, mask = (out_row < num_rows)[:, None], (column < kernel_ref.shape[-1])[None, :]
    even = depth % blocks.block_k == 0

    def step(index, sums):
        k = index * blocks.block_k + jnp.arange(blocks.block_k, dtype=jnp.int32)
        x_here = x_mask if even else x_mask & (k < depth)[None, :]
        here = mask if even else mask & (k < depth)[:, None]
        x = pltriton.load(x_ref.at[out_row[:, None], k[None, :]], mask=x_here, other=0.0)
        at = (
            kernel_ref.at[k[:, None], column[None, :]]
            if member is None
            else kernel_ref.at[k[:, None], member, column[None, :]]
            for member in members
        )
        # read once, unlike x
        tiles = [pltriton.load(ref, mask=here, other=0.0, eviction_policy="evict_first") for ref in at]
        product = functools.partial(pltriton.dot, trans_a=True, trans_b=True, allow_tf32=False)
        return [total + product(tile, x) for total, tile in zip(sums, tiles, strict=True)]

    zeros = jnp.zeros((blocks.block_n, blocks.rows), jnp.float32)
    return jax.lax.fori_loop(begin, end, step, [zeros for _ in members])


def _indices(blocks: BlockSizes) -> tuple[jax.Array, jax.Array]:
    """This program's rows [rows] and columns [block_n]."""
    row = jnp.arange(blocks.rows, dtype=jnp.int32)
    return row, pl.program_id(0) * blocks.block_n + jnp.arange(blocks.block_n, dtype=jnp.int32)


def _store(ref: Any, part: tuple[Any, ...], product: jax.Array, blocks: BlockSizes) -> None:
    """Writes product [block_n, rows] into ref[part], [R, N]."""
    rows, columns = ref.shape[-2:]
    row, column = _indices(blocks)
    mask = (column < columns)[:, None] & (row < rows)[None, :]
    pltriton.store(ref.at[*part, row[None, :], column[:, None]], product.astype(ref.dtype), mask=mask)


def _skinny_kernel(x_ref, kernel_ref, out_ref, *, blocks: BlockSizes) -> None:
    """x [R,D], kernel [D,N] -> out [C,R,N]."""
    (product,) = _products(x_ref, kernel_ref, blocks, (None,))
    _store(out_ref, (pl.program_id(1),), product, blocks)


def _gated_kernel(x_ref, kernel_ref, out_ref, *, blocks: BlockSizes) -> None:
    """x [R,D], kernel [D,2,I] -> out [R,I]."""
    products = _products(x_ref, kernel_ref, blocks, (0, 1))
    gate, up = (p.astype(out_ref.dtype).astype(jnp.float32) for p in products)
    _store(out_ref, (), gate * jax.nn.sigmoid(gate) * up, blocks)


def _call(
    kernel: Any, name: str, x: jax.Array, weight: jax.Array, out: Any, blocks: BlockSizes, early: bool, interpret: bool
) -> Any:
    return pl.pallas_call(
        early_launch(functools.partial(kernel, blocks=blocks), early, interpret=interpret),
        out_shape=out,
        grid=(ceil_div(weight.shape[-1], blocks.block_n), blocks.num_splits),
        compiler_params=pltriton.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name=name,
    )(x, weight)


@dispatch.shared("early", "interpret", "blocks")
def skinny_matmul(
    x: jax.Array,
    kernel: jax.Array,
    *,
    early: bool = False,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
) -> jax.Array:
    """See the public op; `blocks` overrides the choice for measurements."""
    blocks = blocks or choose_block_sizes(*x.shape, x.dtype)
    out = jax.ShapeDtypeStruct((blocks.num_splits, x.shape[0], kernel.shape[1]), jnp.float32)
    return _call(_skinny_kernel, "skinny_matmul", x, kernel, out, blocks, early, interpret)


@dispatch.shared("early", "interpret", "blocks")
def gated_matmul(
    x: jax.Array,
    kernel: jax.Array,
    *,
    early: bool = False,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
) -> jax.Array:
    """See the public op; `blocks` overrides the choice for measurements."""
    blocks = blocks or choose_block_sizes(*x.shape, x.dtype, gated=True)
    out = jax.ShapeDtypeStruct((x.shape[0], kernel.shape[2]), x.dtype)
    return _call(_gated_kernel, "gated_matmul", x, kernel, out, blocks, early, interpret)
