"""What a decoder is made of: norms, projections and the two sublayers of a block."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.models.config import ModelConfig
from jaxspec.types import Array, Collect, KVSelection, KVSelector, LayerCache
from pallas_kernels import (
    add_rms_norm,
    cached_attention,
    cached_step,
    gated_matmul,
    rope_and_cache,
    skinny_matmul,
    sparse_attention,
    sparse_step,
)
from pallas_kernels.dispatch import resolve
from pallas_kernels.partial_sums import sum_of_parts


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, after a residual addition."""

    size: int
    eps: float
    backend: str | None = None

    def setup(self) -> None:
        self.scale = self.param("scale", nn.initializers.ones, (self.size,))

    def __call__(self, x: Array, update: Array | None = None, *, early: bool = False) -> tuple[Array, Array]:
        """x + update and its norm, both [B, T, D]; the update may come as partial sums."""
        return add_rms_norm(x, update, self.scale, eps=self.eps, early=early, backend=self.backend)


class Projection(nn.Module):
    """Contraction of the last `len(inputs)` axes of x with a kernel [*inputs, *outputs], plus a bias [*outputs]."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    use_bias: bool
    backend: str | None = None

    def setup(self) -> None:
        axes = range(len(self.inputs))
        rest = range(len(axes), len(axes) + len(self.outputs))
        init = nn.initializers.lecun_normal(in_axis=tuple(axes), out_axis=tuple(rest))
        self.kernel = self.param("kernel", init, (*self.inputs, *self.outputs))
        if self.use_bias:
            self.bias = self.param("bias", nn.initializers.zeros, self.outputs)

    def __call__(self, x: Array, *, add_bias: bool = True) -> Array:
        n = len(self.inputs)
        contract = (tuple(range(x.ndim - n, x.ndim)), tuple(range(n)))
        out = jax.lax.dot_general(x, self.kernel, (contract, ((), ())), precision=precision_of(x))
        return out + self.bias if self.use_bias and add_bias else out

    def parts(self, x: Array, *, add_bias: bool = True, early: bool = False) -> Array:
        """The same for an op that takes partial sums, float32 [C, B, T, *outputs]: few rows come so."""
        n = len(self.inputs)
        if not _is_skinny(x, n, self.kernel, self.backend) or (self.use_bias and add_bias):
            return self(x, add_bias=add_bias)
        depth = math.prod(self.inputs)
        kernel = self.kernel.reshape(depth, -1)
        sums = skinny_matmul(x.reshape(-1, depth), kernel, early=early, backend=self.backend)
        return sums.reshape(-1, *x.shape[:-n], *self.outputs)


class Attention(nn.Module):
    """Grouped-query attention over a cache, or over selected rows of it."""

    config: ModelConfig
    layer: int
    backend: str | None

    def setup(self) -> None:
        c = self.config
        # one kernel for q, k and v, grouped by kv head: [D, K, G + 2, H] splits over a mesh by kv head
        members = (c.num_kv_heads, c.group_size + 2, c.head_dim)
        self.qkv = Projection((c.hidden_size,), members, c.qkv_bias, self.backend)
        self.out = Projection((c.num_heads, c.head_dim), (c.hidden_size,), c.out_bias, self.backend)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
            self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def is_skinny(self, x: Array) -> bool:
        """Whether kernels multiply all of x [B,T,D], and what comes of it."""
        kernels = self.qkv.kernel, self.out.kernel
        return not self.config.out_bias and all(_is_skinny(x, 1, kernel, self.backend) for kernel in kernels)

    def __call__(
        self,
        x: Array,
        cache: LayerCache,
        start: Array,
        attend_at: Array,
        rope: tuple[Array, Array],
        selection: KVSelection | KVSelector | None,
        collect: Collect,
        *,
        early: bool = False,
    ) -> tuple[Array, LayerCache, Array | None, Array | None]:
        """Returns the sublayer's output [B,T,D], perhaps as partial sums, the cache with this call's rows, q [B,T,N,H],
        which may be None unless `collect` names this layer's, and row scores.

        Keys and values go to rows `start` and on; the queries see what positions `attend_at` and on see.
        """
        c = self.config
        wanted = isinstance(selection, KVSelector) or self.layer in collect.queries or collect.scored_rows is not None
        one_step = x.shape[1] == 1 and not wanted
        # a step's large programs would start wherever the product's end first, and pile up there
        projected = self.qkv.parts(x, add_bias=False, early=early and not one_step)
        options = {
            "bias": self.qkv.bias if c.qkv_bias else None,
            "q_scale": self.q_norm.scale if c.qk_norm else None,
            "k_scale": self.k_norm.scale if c.qk_norm else None,
            "eps": c.rms_norm_eps,
        }
        attention = {"scale": c.head_dim**-0.5, "early": early, "backend": self.backend}
        listed = {}
        if isinstance(selection, KVSelection):
            layer = min(self.layer, selection.rows.shape[0] - 1)
            listed = {"layer": layer, "count": selection.count, "valid": selection.valid, "window": selection.window}
        if one_step:
            operands = (projected, *cache, *rope, start)
            if selection is None:
                out, *kv = cached_step(*operands, attend_at, **options, **attention)
            else:
                out, *kv = sparse_step(*operands, selection.rows, attend_at, **listed, **options, **attention)
            return self.out.parts(out, early=early), LayerCache(*kv), None, None
        # never early: methods read the cache by XLA, which may do so right after its rows are written
        q, *kv = rope_and_cache(projected, *cache, *rope, start, **options, backend=self.backend)
        cache = LayerCache(*kv)
        scores = None
        if selection is None:
            out, scores = cached_attention(
                q,
                *cache,
                attend_at,
                scored_rows=collect.scored_rows,
                score_mode=collect.score_mode,
                per_row=collect.per_row,
                **attention,
            )
        elif isinstance(selection, KVSelector):
            positions = attend_at[:, None] + jnp.arange(x.shape[1])
            rows = selection.select(self.layer, q, cache, positions, selection.state)
            listed = {"valid": selection.valid, "window": selection.window}
            out = sparse_attention(q, *cache, rows, attend_at, **listed, **attention)
        else:
            out = sparse_attention(q, *cache, selection.rows, attend_at, **listed, **attention)
        return self.out.parts(out, early=early), cache, q, scores


class MLP(nn.Module):
    """Gated MLP: down(silu(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202)."""

    config: ModelConfig
    backend: str | None = None

    def setup(self) -> None:
        c = self.config
        self.gate_up = Projection((c.hidden_size,), (2, c.intermediate_size), c.mlp_bias, self.backend)
        self.down = Projection((c.intermediate_size,), (c.hidden_size,), c.mlp_bias, self.backend)

    def is_skinny(self, x: Array) -> bool:
        """Whether kernels multiply all of x [B,T,D], and what comes of it: the second weight is the smaller one."""
        return not self.config.mlp_bias and _is_skinny(x, 1, self.gate_up.kernel, self.backend)

    def __call__(self, x: Array, *, early: bool = False) -> Array:
        """[B,T,D], perhaps as partial sums."""
        if self.is_skinny(x):
            hidden = gated_matmul(x.reshape(-1, x.shape[-1]), self.gate_up.kernel, early=early, backend=self.backend)
            return self.down.parts(hidden.reshape(*x.shape[:-1], -1), early=early)
        gate, up = jnp.moveaxis(self.gate_up(x), -2, 0)
        hidden = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
        return self.down(hidden.astype(x.dtype))


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)). Sublayers can be skipped.

    A sublayer takes the residual stream in two parts, x and the update of the sublayer before it, and returns their sum
    and an update of its own: the addition is part of the next norm's kernel, and so is adding up an update's partial
    sums.

    `early` says that nothing but a norm reads what a sublayer returns, besides the cache, the queries and the scores. A
    sublayer whose products are kernels then launches early, see `pallas_kernels.early_launch`.
    """

    config: ModelConfig
    layer: int
    backend: str | None

    def setup(self) -> None:
        c = self.config
        self.attention_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, self.backend)
        self.attention = Attention(c, self.layer, self.backend)
        self.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, self.backend)
        self.mlp = MLP(c, self.backend)

    def attend(
        self, x: Array, update: Array | None, cache: LayerCache, *args: Any, early: bool = False
    ) -> tuple[Array, Array, LayerCache, Array | None, Array | None]:
        """Attention sublayer: x, update, and what `Attention` returns besides."""
        early = early and self.attention.is_skinny(x)
        x, normed = self.attention_norm(x, update, early=early)
        return x, *self.attention(normed, cache, *args, early=early)

    def feed_forward(self, x: Array, update: Array | None, *, early: bool = False) -> tuple[Array, Array]:
        """MLP sublayer: x, update."""
        early = early and self.mlp.is_skinny(x)
        x, normed = self.mlp_norm(x, update, early=early)
        return x, self.mlp(normed, early=early)


def add_update(x: Array, update: Array | None) -> Array:
    """x + update, the residual stream [B, T, D] of which a sublayer returns both."""
    return x if update is None else x + sum_of_parts(update, x.ndim, x.dtype)


def _is_skinny(x: Array, inputs: int, kernel: Array, backend: str | None) -> bool:
    rows = math.prod(x.shape[: x.ndim - inputs])
    # float32 has no tensor cores to feed; with more rows or larger weights XLA's products are faster (docs/kernels.md)
    return x.dtype.itemsize == 2 and rows <= 32 and kernel.size <= 2**25 and resolve(backend) != "xla"


def precision_of(x: Array) -> jax.lax.Precision | None:
    """Of products with x. A float32 model means float32: the GPU's default would be TF32."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
