"""Pallas-Triton kernels of `skinny_matmul` and `gated_matmul`: one tile holds all rows of x, weights are read once."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch
from pallas_kernels.skinny_matmul.blocks import BlockSizes, choose_block_sizes
from pallas_kernels.tiling import ceil_div


def _products(x_ref: Any, kernel_ref: Any, out_row: jax.Array, column: jax.Array, blocks: BlockSizes, members) -> list:
    """float32 [rows, block_n] per member: x[out_row] @ kernel[:, member, column], over this program's share of depth.

    x [R,D]; kernel [D,N], or [D,2,N] with members 0 and 1.
    """
    num_rows, depth = x_ref.shape
    columns = kernel_ref.shape[-1]
    steps = ceil_div(depth, blocks.block_k)
    split = pl.program_id(1)
    begin, end = steps * split // blocks.num_splits, steps * (split + 1) // blocks.num_splits
    in_rows, in_columns = (out_row < num_rows)[:, None], (column < columns)[None, :]
    even = depth % blocks.block_k == 0

    def step(index, sums):
        k = index * blocks.block_k + jnp.arange(blocks.block_k, dtype=jnp.int32)
        x_mask, kernel_mask = in_rows, None if columns % blocks.block_n == 0 else in_columns
        if not even:
            x_mask &= (k < depth)[None, :]
            kernel_mask = (k < depth)[:, None] & in_columns
        x = pltriton.load(x_ref.at[out_row[:, None], k[None, :]], mask=x_mask, other=0.0)
        at = (
            kernel_ref.at[k[:, None], column[None, :]]
            if member is None
            else kernel_ref.at[k[:, None], member, column[None, :]]
            for member in members
        )
        other = None if kernel_mask is None else 0.0
        # read once, unlike x
        tiles = [pltriton.load(ref, mask=kernel_mask, other=other, eviction_policy="evict_first") for ref in at]
        return [s + pltriton.dot(x, tile, allow_tf32=False) for s, tile in zip(sums, tiles, strict=True)]

    zeros = jnp.zeros((blocks.rows, blocks.block_n), jnp.float32)
    return jax.lax.fori_loop(begin, end, step, [zeros for _ in members])


def _indices(blocks: BlockSizes) -> tuple[jax.Array, jax.Array]:
    out_row = jnp.arange(blocks.rows, dtype=jnp.int32)
    return out_row, pl.program_id(0) * blocks.block_n + jnp.arange(blocks.block_n, dtype=jnp.int32)


def _skinny_kernel(x_ref, kernel_ref, out_ref, *, blocks: BlockSizes) -> None:
    """x [R,D], kernel [D,N] -> out [C,R,N]."""
    out_row, column = _indices(blocks)
    (product,) = _products(x_ref, kernel_ref, out_row, column, blocks, (None,))
    mask = (out_row < out_ref.shape[1])[:, None] & (column < out_ref.shape[2])[None, :]
    pltriton.store(out_ref.at[pl.program_id(1), out_row[:, None], column[None, :]], product, mask=mask)


def _gated_kernel(x_ref, kernel_ref, out_ref, *, blocks: BlockSizes) -> None:
    """x [R,D], kernel [D,2,I] -> out [R,I]."""
    out_row, column = _indices(blocks)
    products = _products(x_ref, kernel_ref, out_row, column, blocks, (0, 1))
    gate, up = (p.astype(out_ref.dtype).astype(jnp.float32) for p in products)
    mask = (out_row < out_ref.shape[0])[:, None] & (column < out_ref.shape[1])[None, :]
    hidden = gate * jax.nn.sigmoid(gate) * up
    pltriton.store(out_ref.at[out_row[:, None], column[None, :]], hidden.astype(out_ref.dtype), mask=mask)


def _call(
    kernel: Any, name: str, x: jax.Array, weight: jax.Array, out: Any, blocks: BlockSizes, interpret: bool
) -> Any:
    return pl.pallas_call(
        functools.partial(kernel, blocks=blocks),
        out_shape=out,
        grid=(ceil_div(weight.shape[-1], blocks.block_n), blocks.num_splits),
        compiler_params=pltriton.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name=name,
    )(x, weight)


@dispatch.shared("interpret", "blocks")
def skinny_matmul(
    x: jax.Array, kernel: jax.Array, *, interpret: bool = False, blocks: BlockSizes | None = None
) -> jax.Array:
    """See the public op; `blocks` overrides the choice for measurements."""
    blocks = blocks or choose_block_sizes(*x.shape, x.dtype)
    out = jax.ShapeDtypeStruct((blocks.num_splits, x.shape[0], kernel.shape[1]), jnp.float32)
    return _call(_skinny_kernel, "skinny_matmul", x, kernel, out, blocks, interpret)


@dispatch.shared("interpret", "blocks")
def gated_matmul(
    x: jax.Array, kernel: jax.Array, *, interpret: bool = False, blocks: BlockSizes | None = None
) -> jax.Array:
    """See the public op; `blocks` overrides the choice for measurements."""
    blocks = blocks or choose_block_sizes(*x.shape, x.dtype, gated=True)
    out = jax.ShapeDtypeStruct((x.shape[0], kernel.shape[2]), x.dtype)
    return _call(_gated_kernel, "gated_matmul", x, kernel, out, blocks, interpret)
