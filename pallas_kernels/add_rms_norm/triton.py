"""Pallas-Triton kernel of `add_rms_norm`: one program per row, the whole row in registers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch
from pallas_kernels.early_launch import early_launch
from pallas_kernels.partial_sums import load_sum


def _kernel(*refs, size: int, eps: float, has_update: bool) -> None:
    """x [R,D], update [C,R,D], scale [D] -> sum [R,D] (with an update only), norm [R,D]."""
    x_ref, *update_ref, scale_ref = refs[: 2 + has_update]
    *sum_ref, norm_ref = refs[2 + has_update :]
    row = pl.program_id(0)
    column = jnp.arange(pl.next_power_of_2(size), dtype=jnp.int32)
    mask = column < size
    y = pltriton.load(x_ref.at[row, column], mask=mask, other=0.0)
    # interpret mode drops stores whose index is past the end, the GPU those that are masked
    at = jnp.where(mask, column, size)
    if has_update:
        update = load_sum(lambda part: update_ref[0].at[part, row, column], update_ref[0].shape[0], mask)
        y = (y.astype(jnp.float32) + update.astype(y.dtype).astype(jnp.float32)).astype(y.dtype)
        pltriton.store(sum_ref[0].at[row, at], y, mask=mask)
    y = y.astype(jnp.float32)
    scale = pltriton.load(scale_ref.at[column], mask=mask, other=0.0).astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.sum(y * y) / size + eps) * scale
    pltriton.store(norm_ref.at[row, at], y.astype(norm_ref.dtype), mask=mask)


@dispatch.shared("eps", "early", "interpret")
def add_rms_norm(
    x: jax.Array, update: jax.Array | None, scale: jax.Array, *, eps: float, early: bool = False, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See the public op."""
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    has_update = update is not None
    operands = [rows, update.reshape(-1, *rows.shape), scale] if has_update else [rows, scale]
    out = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    kernel = functools.partial(_kernel, size=size, eps=eps, has_update=has_update)
    results = pl.pallas_call(
        early_launch(kernel, early, interpret=interpret),
        out_shape=(out,) * (1 + has_update),
        grid=(rows.shape[0],),
        # 16 values per thread: enough loads in flight, few steps in the reduction
        compiler_params=pltriton.CompilerParams(
            num_warps=min(pl.next_power_of_2(max(size // 512, 1)), 16), num_stages=1
        ),
        interpret=interpret,
        name="add_rms_norm",
    )(*operands)
    y = results[0].reshape(x.shape) if has_update else x
    return y, results[-1].reshape(x.shape)
