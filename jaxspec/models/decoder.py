"""The one decoder. Every method calls it with a selection, a layer mask or a collect request; none owns a copy."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.models.config import ModelConfig
from jaxspec.models.rope import apply_rope, rope_tables
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
from pallas_kernels import cached_attention, sparse_attention


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, float32 inside (Zhang and Sennrich, arXiv 1910.07467)."""

    size: int
    eps: float

    def setup(self) -> None:
        self.scale = self.param("scale", nn.initializers.ones, (self.size,))

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * self.scale.astype(jnp.float32)).astype(x.dtype)


class Projection(nn.Module):
    """Contraction of the last `len(inputs)` axes of x with a kernel [*inputs, *outputs], plus a bias [*outputs]."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    use_bias: bool

    def setup(self) -> None:
        axes = range(len(self.inputs))
        rest = range(len(axes), len(axes) + len(self.outputs))
        init = nn.initializers.lecun_normal(in_axis=tuple(axes), out_axis=tuple(rest))
        self.kernel = self.param("kernel", init, (*self.inputs, *self.outputs))
        if self.use_bias:
            self.bias = self.param("bias", nn.initializers.zeros, self.outputs)

    def __call__(self, x: Array) -> Array:
        n = len(self.inputs)
        contract = (tuple(range(x.ndim - n, x.ndim)), tuple(range(n)))
        out = jax.lax.dot_general(x, self.kernel, (contract, ((), ())), precision=_precision(x))
        return out + self.bias if self.use_bias else out


class Attention(nn.Module):
    """Grouped-query attention over a cache, or over selected rows of it."""

    config: ModelConfig
    layer: int
    backend: str | None

    def setup(self) -> None:
        c = self.config
        # one kernel for q, k and v, grouped by kv head: [D, K, G + 2, H] splits over a mesh by kv head
        self.qkv = Projection((c.hidden_size,), (c.num_kv_heads, c.group_size + 2, c.head_dim), c.qkv_bias)
        self.out = Projection((c.num_heads, c.head_dim), (c.hidden_size,), c.out_bias)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
            self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def __call__(
        self,
        x: Array,
        cache: LayerCache,
        start: Array,
        rope: tuple[Array, Array],
        selection: KVSelection | KVSelector | None,
        collect: Collect,
    ) -> tuple[Array, LayerCache, Array, Array | None]:
        """Returns the sublayer's output [B,T,D], the cache with this call's rows, q [B,T,N,H] and row scores."""
        c = self.config
        batch, num_rows, _ = x.shape
        qkv = self.qkv(x)
        q, k, v = qkv[:, :, :, : c.group_size], qkv[:, :, :, c.group_size], qkv[:, :, :, c.group_size + 1]
        q = q.reshape(batch, num_rows, c.num_heads, c.head_dim)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        cache = LayerCache(write_rows(cache.k, k, start), write_rows(cache.v, v, start))
        start = jnp.broadcast_to(start, (batch,))
        scale = c.head_dim**-0.5
        scores = None
        if selection is None:
            out, scores = cached_attention(
                q,
                *cache,
                start,
                scale=scale,
                scored_rows=collect.scored_rows,
                score_mode=collect.score_mode,
                per_row=collect.per_row,
                backend=self.backend,
            )
        else:
            if isinstance(selection, KVSelector):
                positions = start[:, None] + jnp.arange(num_rows)
                rows = selection.select(self.layer, q, cache, positions, selection.state)
            else:
                rows = selection.rows[min(self.layer, selection.rows.shape[0] - 1)]
            out = sparse_attention(
                q,
                *cache,
                rows,
                start,
                valid=selection.valid,
                window=selection.window,
                scale=scale,
                backend=self.backend,
            )
        return self.out(out), cache, q, scores


class MLP(nn.Module):
    """Gated MLP: down(silu(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202)."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        self.gate_up = Projection((c.hidden_size,), (2, c.intermediate_size), c.mlp_bias)
        self.down = Projection((c.intermediate_size,), (c.hidden_size,), c.mlp_bias)

    def __call__(self, x: Array) -> Array:
        gate, up = jnp.moveaxis(self.gate_up(x), -2, 0)
        hidden = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
        return self.down(hidden.astype(x.dtype))


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)). Sublayers can be skipped."""

    config: ModelConfig
    layer: int
    backend: str | None

    def setup(self) -> None:
        c = self.config
        self.attention_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attention = Attention(c, self.layer, self.backend)
        self.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def attend(self, x: Array, cache: LayerCache, *args: Any) -> tuple[Array, LayerCache, Array, Array | None]:
        """Attention sublayer with its residual."""
        out, cache, q, scores = self.attention(self.attention_norm(x), cache, *args)
        return x + out, cache, q, scores

    def feed_forward(self, x: Array) -> Array:
        """MLP sublayer with its residual."""
        return x + self.mlp(self.mlp_norm(x))


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
        self.final_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
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
    ) -> ForwardOut:
        """Runs T tokens of each row and writes their K/V into the cache.

        Args:
            tokens: int32 [B, T].
            cache: one `LayerCache` of [B, S, K, H] per layer; rows start..start+T-1 are overwritten.
            start: int32 [B], the position of each row's first token, or [] when all rows share it.
            selection: attend to selected rows only; None attends to every row <= the query's position.
            layers: which sublayers run; a skipped attention does not write its cache rows.
            collect: what to hand out besides logits. Scores need full attention.

        Raises:
            ValueError: contradicting arguments or wrong shapes.
        """
        collect = collect or Collect()
        c = self.config
        if tokens.ndim != 2 or len(cache) != c.num_layers:
            raise ValueError(f"need tokens [B, T] and {c.num_layers} layer caches, got {tokens.shape} and {len(cache)}")
        if collect.scored_rows is not None and selection is not None:
            raise ValueError("row scores need full attention: collect.scored_rows and selection exclude each other")
        if layers is not None and (collect.scored_rows is not None or collect.queries):
            raise ValueError("a layer mask excludes collecting scores or queries: skipped layers have none")
        # indexing a traced array past its end would take its last entry instead
        if layers is not None and not len(layers.attn) == len(layers.mlp) == c.num_layers:
            raise ValueError(f"a layer mask needs {c.num_layers} entries, got {len(layers.attn)} and {len(layers.mlp)}")
        if isinstance(selection, KVSelection) and selection.rows.shape[0] not in (1, c.num_layers):
            raise ValueError(f"selection.rows must be [{c.num_layers} or 1, B, M], got shape {selection.rows.shape}")
        if not set(collect.queries) <= set(range(c.num_layers)):
            raise ValueError(f"collect.queries must name layers 0..{c.num_layers - 1}, got {collect.queries}")
        positions = jnp.atleast_1d(start)[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(positions, tokens.shape)
        rope = rope_tables(c.rope, c.head_dim, positions)
        x = self.embedding[tokens]
        caches, scores, queries, hidden = [], [], {}, [x]
        for i, block in enumerate(self.layers):
            attend = layers is None or layers.attn[i]
            if attend is True:
                x, layer_cache, q, layer_scores = block.attend(x, cache[i], start, rope, selection, collect)
                scores.append(layer_scores)
                queries[i] = q
            else:
                x, layer_cache = _maybe(
                    attend,
                    lambda x, kv, i=i: self._sublayer(i, "attend", x, kv, start, rope, selection, collect)[:2],
                    x,
                    cache[i],
                )
            caches.append(layer_cache)
            hidden.append(x)
            run_mlp = layers is None or layers.mlp[i]
            if run_mlp is True:
                x = block.feed_forward(x)
            else:
                (x,) = _maybe(run_mlp, lambda x, i=i: (self._sublayer(i, "feed_forward", x),), x)
            hidden.append(x)
        return ForwardOut(
            logits=self.logits(x),
            cache=tuple(caches),
            row_scores=None if collect.scored_rows is None else jnp.stack(scores),
            queries=tuple(queries[i] for i in collect.queries),
            hidden=jnp.stack(hidden) if collect.hidden else None,
        )

    def _sublayer(self, layer: int, method: str, *args: Any) -> Any:
        # a stateless apply, because bound modules may not be called inside lax.cond
        block = Block(self.config, layer, self.backend, parent=None)
        return block.apply({"params": self.variables["params"][f"layers_{layer}"]}, *args, method=method)

    def logits(self, x: Array) -> Array:
        """float32 logits [..., V] of residual-stream rows [..., D]."""
        head = self.embedding if self.config.tie_word_embeddings else self.lm_head
        contract = (((x.ndim - 1,), (1,)), ((), ()))
        x = self.final_norm(x)
        return jax.lax.dot_general(x, head, contract, precision=_precision(x), preferred_element_type=jnp.float32)


def _precision(x: Array) -> jax.lax.Precision | None:
    # a float32 model means float32: the GPU's default would be TF32
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def _maybe(run: Array | bool, sublayer: Callable[..., tuple[Any, ...]], *args: Any) -> tuple[Any, ...]:
    if isinstance(run, bool):
        return sublayer(*args) if run else args
    return jax.lax.cond(run, sublayer, lambda *args: args, *args)


def write_rows(cache: Array, rows: Array, start: Array) -> Array:
    """Writes rows [B, T, K, H] into cache [B, S, K, H] at start (int32 [B], or [] when shared). Never clamps silently:
    the caller's capacity must hold start + T."""
    rows = rows.astype(cache.dtype)
    if start.ndim == 0 or cache.shape[0] == 1:
        return jax.lax.dynamic_update_slice(cache, rows, (0, start.reshape(-1)[0] if start.ndim else start, 0, 0))
    return jax.vmap(lambda c, r, s: jax.lax.dynamic_update_slice(c, r, (s, 0, 0)))(cache, rows, start)


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
