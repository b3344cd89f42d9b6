"""The one decoder. Every method calls it with a selection, a layer mask or a collect request; none owns a copy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import Block, RMSNorm, add_update, precision_of
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
        # XLA reads the residual stream where it is handed out, and around a sublayer that runs conditionally
        static = layers is None or all(isinstance(run, bool) for run in (*layers.attn, *layers.mlp))
        early = static and not collect.hidden
        caches, scores, queries, hidden = [], [], {}, [x]
        for i, block in enumerate(self.layers):
            layer_cache = cache[i]
            run = layers is None or layers.attn[i]
            if run is True:
                x, update, layer_cache, queries[i], layer_scores = block.attend(
                    x, update, layer_cache, *context, early=early
                )
                scores.append(layer_scores)
            elif run is not False:
                attend = partial(self._attend_alone, i, context)
                x, layer_cache = _run_if(run, attend, add_update(x, update), layer_cache)
                update = None
            caches.append(layer_cache)
            hidden.append(add_update(x, update))
            run = layers is None or layers.mlp[i]
            if run is True:
                x, update = block.feed_forward(x, update, early=early)
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
        return jax.lax.dot_general(x, head, contract, precision=precision_of(x), preferred_element_type=jnp.float32)

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
