"""Pallas-Triton kernel of `rope_and_cache`: one program per token and kv head, caches updated in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch
from pallas_kernels.partial_sums import load_sum


def _kernel(
    qkv_ref, cos_ref, sin_ref, start_ref, bias_ref, q_scale_ref, k_scale_ref, q_out, k_out, v_out, *, eps: float
) -> None:  # fmt: skip
    """qkv [C,B,T,K,G+2,H], cos and sin [B,T,H/2], start [B] -> q_out [B,T,N,H], rows of k_out and v_out [B,S,K,H]."""
    token, kv_head, batch = (pl.program_id(axis) for axis in range(3))
    group, head_dim = qkv_ref.shape[4] - 2, qkv_ref.shape[5]
    dtype = q_out.dtype
    pair = jnp.arange(pl.next_power_of_2(head_dim // 2), dtype=jnp.int32)
    in_half = pair < head_dim // 2
    columns = (pair, pair + head_dim // 2)
    cos = pltriton.load(cos_ref.at[batch, token, pair], mask=in_half, other=0.0)
    sin = pltriton.load(sin_ref.at[batch, token, pair], mask=in_half, other=0.0)

    def read(member, mask, column):
        return read_projection(qkv_ref, bias_ref, (batch, token, kv_head), member, column, mask, dtype)

    def norm_and_rotate(low, high, scale_ref):
        low, high = low.astype(jnp.float32), high.astype(jnp.float32)
        if scale_ref is not None:
            square_sum = jnp.sum(low * low + high * high, axis=-1, keepdims=True)
            factor = jax.lax.rsqrt(square_sum / head_dim + eps)
            scales = (pltriton.load(scale_ref.at[column], mask=in_half, other=0.0) for column in columns)
            low, high = (
                (x * factor * scale.astype(jnp.float32)).astype(dtype).astype(jnp.float32)
                for x, scale in zip((low, high), scales, strict=True)
            )
        return low * cos - high * sin, high * cos + low * sin

    def write(ref, index, mask, column, x):
        # interpret mode drops stores whose index is past the end, the GPU those that are masked
        column = jnp.where(mask, column, head_dim)
        pltriton.store(ref.at[*index, column], x.astype(dtype), mask=mask)

    row = start_ref[batch] + token
    k = norm_and_rotate(*(read(group, in_half, column) for column in columns), k_scale_ref)
    v = [read(group + 1, in_half, column) for column in columns]
    for ref, halves in ((k_out, k), (v_out, v)):
        for column, x in zip(columns, halves, strict=True):
            write(ref, (batch, row, kv_head), in_half, column, x)

    member = jnp.arange(pl.next_power_of_2(group), dtype=jnp.int32)[:, None]
    mask = (member < group) & in_half[None, :]
    q = norm_and_rotate(*(read(member, mask, column[None, :]) for column in columns), q_scale_ref)
    for column, x in zip(columns, q, strict=True):
        write(q_out, (batch, token, kv_head * group + member), mask, column[None, :], x)


def read_projection(
    qkv_ref: Any,
    bias_ref: Any,
    of: tuple[Any, Any, Any],
    member: Any,
    column: jax.Array,
    mask: jax.Array,
    dtype: jnp.dtype,
) -> jax.Array:
    """Columns of members of qkv [C,B,T,K,G+2,H]: added up over C, rounded, and with bias [K,G+2,H], or None, added.

    `of` is a batch row, token and kv head.
    """
    x = load_sum(lambda part: qkv_ref.at[part, *of, member, column], qkv_ref.shape[0], mask).astype(dtype)
    if bias_ref is None:
        return x
    bias = pltriton.load(bias_ref.at[of[-1], member, column], mask=mask, other=0.0)
    return (x.astype(jnp.float32) + bias.astype(jnp.float32)).astype(dtype)


@dispatch.shared("eps", "interpret")
def rope_and_cache(
    qkv: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    start: jax.Array,
    *,
    bias: jax.Array | None,
    q_scale: jax.Array | None,
    k_scale: jax.Array | None,
    eps: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See the public op."""
    qkv = qkv if qkv.ndim == 6 else qkv[None]
    _, batch, num_rows, kv_heads, members, head_dim = qkv.shape
    dtype = k_cache.dtype
    optional = [bias, q_scale, k_scale]
    operands = [qkv, cos, sin, start, *(x for x in optional if x is not None)]

    def kernel(*refs):
        inputs = iter(refs[: len(operands)])
        required = [next(inputs) for _ in range(4)]
        _kernel(*required, *(None if x is None else next(inputs) for x in optional), *refs[-3:], eps=eps)

    return pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((batch, num_rows, kv_heads * (members - 2), head_dim), dtype),
            jax.ShapeDtypeStruct(k_cache.shape, k_cache.dtype),
            jax.ShapeDtypeStruct(v_cache.shape, v_cache.dtype),
        ),
        # tokens first: the other grid axes hold 65,535 programs at most
        grid=(num_rows, kv_heads, batch),
        input_output_aliases={len(operands): 1, len(operands) + 1: 2},
        compiler_params=pltriton.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="rope_and_cache",
    )(*operands, k_cache, v_cache)
