"""skinny_matmul and gated_matmul in the sublayers that they are for, beside XLA's matrix products."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from kernels_timing import Run, brief, loop, num_sets, random

from pallas_kernels.add_rms_norm.triton import add_rms_norm
from pallas_kernels.rope_and_cache.triton import rope_and_cache
from pallas_kernels.skinny_matmul import triton
from pallas_kernels.skinny_matmul.blocks import choose_block_sizes

# name, rows, D, K, G, H, I
CASES = (
    ("1.5B, 32 rows", 32, 1536, 2, 6, 128, 8960),
    ("0.5B, 16 rows", 16, 896, 2, 7, 64, 4864),
    ("7B, 16 rows", 16, 3584, 4, 7, 128, 18944),
    ("7B, 1 row", 1, 3584, 4, 7, 128, 18944),
)
TINY_CASES = (("tiny", 4, 64, 2, 2, 16, 96),)


def _xla(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


def _xla_gated(x: jax.Array, kernel: jax.Array) -> jax.Array:
    gate, up = jnp.moveaxis(_xla(x, kernel).astype(jnp.float32), -2, 0)
    return (jax.nn.silu(gate) * up).astype(x.dtype)


def time_sublayers(run: Run, case: tuple) -> None:
    """Norm, products and what reads their partial sums; the attention sublayer without its attention."""
    name, rows, size, kv_heads, group, head_dim, inner = case
    heads, members = kv_heads * group, group + 2
    shapes = {
        "MLP": ((size, 2, inner), (inner, size)),
        "projections": ((size, kv_heads * members * head_dim), (heads * head_dim, size)),
    }
    norm = functools.partial(add_rms_norm, scale=jnp.ones(size, jnp.bfloat16), eps=1e-6, interpret=run.tiny)
    x = random(1, (rows, 1, size))
    cache = jnp.zeros((rows, 16, kv_heads, head_dim), jnp.bfloat16)
    tables = jnp.ones((rows, 1, head_dim // 2)), jnp.zeros((rows, 1, head_dim // 2)), jnp.zeros(rows, jnp.int32)

    def heads_of(qkv: jax.Array) -> jax.Array:
        qkv = qkv.reshape(*qkv.shape[:-1], kv_heads, members, head_dim)
        options = {"bias": None, "q_scale": None, "k_scale": None, "eps": 1e-6, "interpret": run.tiny}
        return rope_and_cache(qkv, cache, cache, *tables, **options)[0].reshape(rows, 1, -1)

    def product(blocks, x, kernel):
        sums = triton.skinny_matmul(x.reshape(rows, -1), kernel, blocks=blocks, interpret=run.tiny)
        return sums[:, :, None]

    def gated(blocks, x, kernel):
        return triton.gated_matmul(x.reshape(rows, -1), kernel, blocks=blocks, interpret=run.tiny)[:, None]

    for sublayer, (first, second) in shapes.items():
        nbytes = 2 * (math.prod(first) + math.prod(second))
        sets = [(random(2 * i, first) * size**-0.5, random(2 * i + 1, second) * second[0] ** -0.5)
                for i in range(num_sets(nbytes))]  # fmt: skip
        print(f"\n{sublayer} {name}: x {[rows, size]} kernels {list(first)}, {list(second)}", flush=True)
        entries: list[tuple[str, Callable]] = []

        def report(label, into, out, sets=sets, nbytes=nbytes, entries=entries):
            def step(x, a, b):
                return norm(x, out(into(norm(x, None)[1], a), b))[0]

            entries.append((label, lambda: loop(step, x, sets, nbytes)))

        if sublayer == "MLP":
            inward, outward = (
                choose_block_sizes(rows, size, x.dtype, gated=True),
                choose_block_sizes(rows, inner, x.dtype),
            )
            ours = lambda a, b: (functools.partial(gated, a), functools.partial(product, b))  # noqa: E731
            report("XLA", _xla_gated, _xla)
        else:
            inward, outward = choose_block_sizes(rows, size, x.dtype), choose_block_sizes(rows, second[0], x.dtype)
            ours = lambda a, b: (lambda x, k: heads_of(product(a, x, k)), functools.partial(product, b))  # noqa: E731
            report("XLA", lambda x, k: heads_of(_xla(x, k)), _xla)
        report(f"ours {brief(inward)} | {brief(outward)}", *ours(inward, outward))
        for change in ({"num_splits": outward.num_splits + 2}, {"num_warps": 8}) if run.candidates else ():
            other = dataclasses.replace(outward, **change)
            report(f"  second {brief(other)}", *ours(inward, other))
        run.measure("skinny_matmul", f"{sublayer} {name}", entries, nbytes)


def bench(run: Run) -> None:
    for case in TINY_CASES if run.tiny else CASES:
        run.attempt(case[0], lambda case=case: time_sublayers(run, case))
