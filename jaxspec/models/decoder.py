"""The one decoder. Every method calls it with a selection, a layer mask or a collect request; none owns a copy."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.models.config import ModelConfig
from jaxspec.models.rope import rope_tables
from jaxspec.types import (
    Array,
    Collect,
    ForwardOut,
    KVCache,
    KVSelection,
    KVSelector,
    LayerCache,
    LayerMask,
    Params,
)
from pallas_kernels import (
    add_rms_norm,
    cached_attention,
    gated_matmul,
    rope_and_cache,
    skinny_matmul,
    sparse_attention,
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

    def __call__(self, x: Array, update: Array | None = None) -> tuple[Array, Array]:
        """x + update and its norm, both [B, T, D]; the update may come as partial sums."""
        return add_rms_norm(x, update, self.scale, eps=self.eps, backend=self.backend)


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
        out = jax.lax.dot_general(x, self.kernel, (contract, ((), ())), precision=_precision(x))
        return out + self.bias if self.use_bias and add_bias else out

    def parts(self, x: Array, *, add_bias: bool = True) -> Array:
        """The same for an op that takes partial sums, float32 [C, B, T, *outputs]: few rows come so."""
        n = len(self.inputs)
        if not _is_skinny(x, n, self.kernel, self.backend) or (self.use_bias and add_bias):
            return self(x, add_bias=add_bias)
        depth = math.prod(self.inputs)
        sums = skinny_matmul(x.reshape(-1, depth), self.kernel.reshape(depth, -1), backend=self.backend)
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

    def __call__(
        self,
        x: Array,
        cache: LayerCache,
        start: Array,
        attend_at: Array,
        rope: tuple[Array, Array],
        selection: KVSelection | KVSelector | None,
        collect: Collect,
    ) -> tuple[Array, LayerCache, Array, Array | None]:
        """Returns the sublayer's output [B,T,D], perhaps as partial sums, the cache with this call's rows, q [B,T,N,H]
        and row scores.

        Keys and values go to rows `start` and on; the queries see what positions `attend_at` and on see.
        """
        c = self.config
        q, *kv = rope_and_cache(
            self.qkv.parts(x, add_bias=False),
            *cache,
            *rope,
            start,
            bias=self.qkv.bias if c.qkv_bias else None,
            q_scale=self.q_norm.scale if c.qk_norm else None,
            k_scale=self.k_norm.scale if c.qk_norm else None,
            eps=c.rms_norm_eps,
            backend=self.backend,
        )
        cache = LayerCache(*kv)
        scale = c.head_dim**-0.5
        scores = None
        if selection is None:
            out, scores = cached_attention(
                q,
                *cache,
                attend_at,
                scale=scale,
                scored_rows=collect.scored_rows,
                score_mode=collect.score_mode,
                per_row=collect.per_row,
                backend=self.backend,
            )
        else:
            if isinstance(selection, KVSelector):
                positions = attend_at[:, None] + jnp.arange(x.shape[1])
                rows, layer, count = selection.select(self.layer, q, cache, positions, selection.state), None, None
            else:
                rows, layer, count = selection.rows, min(self.layer, selection.rows.shape[0] - 1), selection.count
            out = sparse_attention(
                q,
                *cache,
                rows,
                attend_at,
                layer=layer,
                count=count,
                valid=selection.valid,
                window=selection.window,
                scale=scale,
                backend=self.backend,
            )
        return self.out.parts(out), cache, q, scores


class MLP(nn.Module):
    """Gated MLP: down(silu(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202)."""

    config: ModelConfig
    backend: str | None = None

    def setup(self) -> None:
        c = self.config
        self.gate_up = Projection((c.hidden_size,), (2, c.intermediate_size), c.mlp_bias, self.backend)
        self.down = Projection((c.intermediate_size,), (c.hidden_size,), c.mlp_bias, self.backend)

    def __call__(self, x: Array) -> Array:
        """[B,T,D], perhaps as partial sums."""
        if _is_skinny(x, 1, self.gate_up.kernel, self.backend) and not self.config.mlp_bias:
            hidden = gated_matmul(x.reshape(-1, x.shape[-1]), self.gate_up.kernel, backend=self.backend)
            return self.down.parts(hidden.reshape(*x.shape[:-1], -1))
        gate, up = jnp.moveaxis(self.gate_up(x), -2, 0)
        hidden = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
        return self.down(hidden.astype(x.dtype))


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)). Sublayers can be skipped.

    A sublayer takes the residual stream in two parts, x and the update of the sublayer before it, and returns their sum
    and an update of its own: the addition is part of the next norm's kernel, and so is adding up an update's partial
    sums.
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
        self, x: Array, update: Array | None, cache: LayerCache, *args: Any
    ) -> tuple[Array, Array, LayerCache, Array, Array | None]:
        """Attention sublayer: x, update, and what `Attention` returns besides."""
        x, normed = self.attention_norm(x, update)
        return x, *self.attention(normed, cache, *args)

    def feed_forward(self, x: Array, update: Array | None) -> tuple[Array, Array]:
        """MLP sublayer: x, update."""
        x, normed = self.mlp_norm(x, update)
        return x, self.mlp(normed)


class Decoder(nn.Module):
    """A decoder-only transformer, functional: `Decoder(config).apply({'params': params}, tokens, cache, start)`.

    `backend` chooses the kernels, see `pallas_kernels.dispatch`; None means by platform.
    """

    config: ModelConfig
    backend: str | None = None

    def setup(self) -> None:
        c = self.config
        self.embedding = self.param("embedding", nn.initializers.normal(1.0), (c.vocab_size, c.hidden_size))
        self.layers = [Block(c, layer, self.backend) for layer in range(c.num_layers)]
        self.final_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, self.backend)
        if not c.tie_word_embeddings:
            # rows are tokens, as in the embedding, so that tied and untied heads are one contraction
            self.lm_head = self.param("lm_head", nn.initializers.lecun_normal(1, 0), (c.vocab_size, c.hidden_size))

    def __call__(
        self,
        tokens: Array,
        cache: KVCache,
        start: Array,
        *,
        selection: KVSelection | KVSelector | None = None,
        layers: LayerMask | None = None,
        collect: Collect | None = None,
        running: Array | None = None,
    ) -> ForwardOut:
        """Runs T tokens of each row and writes their K/V into the cache.

        Args:
            tokens: int32 [B, T].
            cache: one `LayerCache` of [B, S, K, H] per layer; rows start..start+T-1 are overwritten.
            start: int32 [B], the position of each row's first token, or [] when all rows share it.
            selection: attend to selected rows only; None attends to every row <= the query's position.
            layers: which sublayers run; a skipped attention does not write its cache rows.
            collect: what to hand out besides logits. Scores need full attention.
            running: bool [B], rows whose result is wanted. The queries of all others see nothing, which costs no
                attention: their logits are finite and mean nothing, their scores are -inf. None: all rows.

        Raises:
            ValueError: contradicting arguments or wrong shapes.
        """
        collect = collect or Collect()
        c = self.config
        if tokens.ndim != 2 or len(cache) != c.num_layers:
            raise ValueError(f"need tokens [B, T] and {c.num_layers} layer caches, got {tokens.shape} and {len(cache)}")
        if collect.scored_rows is not None and selection is not None:
            raise ValueError("row scores need full attention: collect.scored_rows and selection exclude each other")
        if layers is not None and collect.scored_rows is not None:
            raise ValueError("a layer mask excludes collecting scores: skipped layers have none")
        # indexing a traced array past its end would take its last entry instead
        if layers is not None and not len(layers.attn) == len(layers.mlp) == c.num_layers:
            raise ValueError(f"a layer mask needs {c.num_layers} entries, got {len(layers.attn)} and {len(layers.mlp)}")
        if isinstance(selection, KVSelection) and selection.rows.shape[0] not in (1, c.num_layers):
            raise ValueError(f"selection.rows must be [{c.num_layers} or 1, B, M], got shape {selection.rows.shape}")
        if not set(collect.queries) <= set(range(c.num_layers)):
            raise ValueError(f"collect.queries must name layers 0..{c.num_layers - 1}, got {collect.queries}")
        if layers is not None and not all(layers.attn[i] is True for i in collect.queries):
            raise ValueError(f"collect.queries must name layers that a static mask runs, got {collect.queries}")
        start = jnp.broadcast_to(start, tokens.shape[:1])
        positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        attend_at = start if running is None else jnp.where(running, start, -tokens.shape[1])
        context = (start, attend_at, rope_tables(c.rope, c.head_dim, positions), selection, collect)
        # the residual stream is x + update; the sum is left to the next norm's kernel where there is one
        x, update = self.embedding[tokens], None
        caches, scores, queries, hidden = [], [], {}, [x]
        for i, block in enumerate(self.layers):
            layer_cache = cache[i]
            run = layers is None or layers.attn[i]
            if run is True:
                x, update, layer_cache, queries[i], layer_scores = block.attend(x, update, layer_cache, *context)
                scores.append(layer_scores)
            elif run is not False:
                attend = partial(self._attend_alone, i, context)
                x, layer_cache = _run_if(run, attend, add_update(x, update), layer_cache)
                update = None
            caches.append(layer_cache)
            hidden.append(add_update(x, update))
            run = layers is None or layers.mlp[i]
            if run is True:
                x, update = block.feed_forward(x, update)
            elif run is not False:
                feed_forward = partial(self._feed_forward_alone, i)
                x, update = jax.lax.cond(run, feed_forward, lambda x: x, add_update(x, update)), None
            hidden.append(add_update(x, update))
        return ForwardOut(
            logits=self.logits(x, update),
            cache=tuple(caches),
            row_scores=None if collect.scored_rows is None else jnp.stack(scores),
            queries=tuple(queries[i] for i in collect.queries),
            hidden=jnp.stack(hidden) if collect.hidden else None,
        )

    def logits(self, x: Array, update: Array | None = None) -> Array:
        """float32 logits [B, T, V] of the residual stream x + update [B, T, D]."""
        _, x = self.final_norm(x, update)
        head = self.embedding if self.config.tie_word_embeddings else self.lm_head
        contract = (((x.ndim - 1,), (1,)), ((), ()))
        return jax.lax.dot_general(x, head, contract, precision=_precision(x), preferred_element_type=jnp.float32)

    def _attend_alone(self, layer: int, context: tuple[Any, ...], x: Array, cache: LayerCache) -> tuple[Any, ...]:
        x, update, cache, *_ = self._apply_block(layer, "attend", x, None, cache, *context)
        return add_update(x, update), cache

    def _feed_forward_alone(self, layer: int, x: Array) -> Array:
        return add_update(*self._apply_block(layer, "feed_forward", x, None))

    def _apply_block(self, layer: int, method: str, *args: Any) -> Any:
        # a stateless apply, because bound modules may not be called inside lax.cond
        block = Block(self.config, layer, self.backend, parent=None)
        return block.apply({"params": self.variables["params"][f"layers_{layer}"]}, *args, method=method)


def _run_if(run: Array, function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) or args, by a loop of one round or none: lax.cond would copy a cache where it is skipped."""
    body = lambda carry: (jnp.array(False), function(*carry[1]))  # noqa: E731
    return jax.lax.while_loop(lambda carry: carry[0], body, (jnp.asarray(run), args))[1]


def add_update(x: Array, update: Array | None) -> Array:
    """x + update, the residual stream [B, T, D] of which a sublayer returns both."""
    return x if update is None else x + sum_of_parts(update, x.ndim, x.dtype)


def _is_skinny(x: Array, inputs: int, kernel: Array, backend: str | None) -> bool:
    rows = math.prod(x.shape[: x.ndim - inputs])
    # float32 has no tensor cores to feed; with more rows or larger weights XLA's products are faster (docs/kernels.md)
    return x.dtype.itemsize == 2 and rows <= 32 and kernel.size <= 2**25 and resolve(backend) != "xla"


def _precision(x: Array) -> jax.lax.Precision | None:
    # a float32 model means float32: the GPU's default would be TF32
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def cache_capacity(rows: int) -> int:
    """`rows` rounded up to what caches are allocated in, 128."""
    return -(-rows // 128) * 128


def init_cache(config: ModelConfig, batch: int, capacity: int, dtype: Any) -> KVCache:
    """A zeroed cache of `capacity` rows for each of `batch` sequences."""
    shape = (batch, capacity, config.num_kv_heads, config.head_dim)
    return tuple(LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers))


def init_params(config: ModelConfig, key: Array, dtype: Any = jnp.float32) -> Params:
    """Random parameters, for tests and synthetic benchmarks."""
    model = Decoder(config, backend="xla")

    def init(key: Array) -> Params:
        params = model.init(key, jnp.zeros((1, 1), jnp.int32), init_cache(config, 1, 1, dtype), jnp.zeros(1, jnp.int32))
        return jax.tree.map(lambda x: x.astype(dtype), params["params"])

    return jax.jit(init)(key)


def param_shapes(config: ModelConfig) -> Any:
    """The parameters' tree of `jax.ShapeDtypeStruct`, float32; nothing is allocated."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
