"""Known model sizes with random weights, for measuring time without a checkpoint."""

import os
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.models.decoder import param_shapes
from jaxspec.types import KVCache, LayerCache, Params

POSITIONS = 1 << 20  # no shape is refused a context for its positions: nothing is learned here


def _qwen2(vocab: int, width: int, inner: int, layers: int, heads: int, kv: int, head: int, tied: bool) -> ModelConfig:
    rope = RopeConfig(1e6)
    return ModelConfig(
        "qwen2", vocab, width, inner, layers, heads, kv, head, POSITIONS, rope, tie_word_embeddings=tied, qkv_bias=True
    )


def _llama(width: int, inner: int, layers: int, heads: int) -> ModelConfig:
    return ModelConfig("llama", 128256, width, inner, layers, heads, 8, 128, POSITIONS, RopeConfig(5e5))


def _qwen3(width: int, inner: int, layers: int, heads: int, tied: bool) -> ModelConfig:
    rope = RopeConfig(1e6)
    return ModelConfig(
        "qwen3", 151936, width, inner, layers, heads, 8, 128, POSITIONS, rope, tie_word_embeddings=tied, qk_norm=True
    )


# sizes as in the models' own config.json
SHAPES = {
    "qwen2.5-0.5b": _qwen2(151936, 896, 4864, 24, 14, 2, 64, True),
    "qwen2.5-1.5b": _qwen2(151936, 1536, 8960, 28, 12, 2, 128, True),
    "qwen2.5-7b": _qwen2(152064, 3584, 18944, 28, 28, 4, 128, False),
    "qwen2.5-32b": _qwen2(152064, 5120, 27648, 64, 40, 8, 128, False),
    "qwen2.5-72b": _qwen2(152064, 8192, 29568, 80, 64, 8, 128, False),
    "llama3.1-8b": _llama(4096, 14336, 32, 32),
    "llama3.1-70b": _llama(8192, 28672, 80, 64),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, False),
    "tiny": _qwen2(512, 64, 128, 4, 4, 2, 16, True),
}
# the tiny one only tries commands out
OFFERED = tuple(name for name in SHAPES if name != "tiny")


def random_params(config: ModelConfig, dtype: Any = jnp.bfloat16) -> Params:
    """Weights of the model's sizes, drawn on the device leaf by leaf."""
    leaves, tree = jax.tree.flatten(param_shapes(config))
    return jax.tree.unflatten(tree, [_normal(i, leaf.shape, dtype, 0.02) for i, leaf in enumerate(leaves)])


def random_cache(config: ModelConfig, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> KVCache:
    """A cache of random rows: zeros would run faster than data."""
    shape = (batch, capacity, config.num_kv_heads, config.head_dim)
    k, v = ([_normal(2 * i + j, shape, dtype, 1.0) for i in range(config.num_layers)] for j in (0, 1))
    return tuple(map(LayerCache, k, v))


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(seed: int, shape: tuple[int, ...], dtype: Any, scale: float) -> jax.Array:
    # the key is made in here: a program of its own otherwise, and one more for every way to derive others from it
    return jax.random.normal(jax.random.key(seed), shape, dtype) * scale


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of the parameters."""
    # all layers are alike, and tracing eighty of them takes seconds
    shallow, deep = (_num_params(replace(config, num_layers=n)) for n in (1, 2))
    return (shallow + (config.num_layers - 1) * (deep - shallow)) * itemsize


@cache
def _num_params(config: ModelConfig) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(param_shapes(config)))


def cache_bytes(config: ModelConfig, batch: int, capacity: int, itemsize: int) -> int:
    """Bytes of the K/V cache."""
    return 2 * config.num_layers * batch * capacity * config.num_kv_heads * config.head_dim * itemsize


def step_bytes(config: ModelConfig, batch: int, context: int, itemsize: int) -> int:
    """Bytes that a plain decode step must read: every weight but the embedding table, of which it reads a row per
    sequence, and the valid cache rows. A tied table is read as the head."""
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * itemsize
    return weight_bytes(config, itemsize) - embedding + cache_bytes(config, batch, context, itemsize)


def check_memory(name: str, config: ModelConfig, batch: int, capacity: int, itemsize: int) -> None:
    """Raises ValueError where weights and cache alone exceed the device's memory."""
    weights, cache = weight_bytes(config, itemsize), cache_bytes(config, batch, capacity, itemsize)
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if weights + cache > limit:
        sizes = [f"{size / 2**30:.1f} GiB" for size in (weights, cache, weights + cache, limit)]
        raise ValueError(
            f"{name} at batch {batch} and {capacity} cache rows needs {sizes[0]} of weights + {sizes[1]} of cache = "
            f"{sizes[2]}; the device has {sizes[3]}. Lower the batch, the context or the number of new tokens"
        )
