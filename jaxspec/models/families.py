"""What a family file provides, and the layout shared by the families whose checkpoints look like Llama's."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxspec.models.config import ModelConfig

Path = tuple[str, ...]


@dataclass(frozen=True)
class LeafSource:
    """Where one parameter leaf comes from.

    Attributes:
        names: Hugging Face tensor names, in the order that `assemble` takes them.
        shapes: the shape each of them must have.
        assemble: builds the leaf from the tensors; a pure function of numpy arrays.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    assemble: Callable[[list[np.ndarray]], np.ndarray]


class Family(Protocol):
    """A module that teaches jaxspec one architecture. Put the file into `jaxspec/models` and it is found."""

    MODEL_TYPES: tuple[str, ...]  # values of `model_type` in config.json

    def config_from_hf(self, hf: dict[str, Any]) -> ModelConfig:
        """Reads config.json. Raises ValueError for anything the decoder does not do."""
        ...

    def leaf_sources(self, config: ModelConfig) -> dict[Path, LeafSource]:
        """Every leaf of the parameter tree, exactly once."""
        ...


def llama_leaf_sources(config: ModelConfig) -> dict[Path, LeafSource]:
    """The leaves of checkpoints named like Llama's, with the biases and norms that `config` switches on."""
    c = config
    leaves: dict[Path, LeafSource] = {
        ("embedding",): _copy("model.embed_tokens.weight", (c.vocab_size, c.hidden_size)),
        ("final_norm", "scale"): _copy("model.norm.weight", (c.hidden_size,)),
    }
    if not c.tie_word_embeddings:
        leaves[("lm_head",)] = _copy("lm_head.weight", (c.vocab_size, c.hidden_size))
    for layer in range(c.num_layers):
        for path, source in _layer(c, f"model.layers.{layer}."):
            leaves[(f"layers_{layer}", *path)] = source
    return leaves


def _layer(c: ModelConfig, prefix: str) -> Iterator[tuple[Path, LeafSource]]:
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    qkv = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
    out, gate_up = f"{prefix}self_attn.o_proj", [f"{prefix}mlp.{name}_proj" for name in ("gate", "up")]
    down = f"{prefix}mlp.down_proj"

    def group(tensors: list[np.ndarray]) -> np.ndarray:
        """q, k and v with the heads first -> [K, G + 2, H, ...]: each kv head beside its query heads."""
        heads = [t.reshape(c.num_kv_heads, -1, c.head_dim, *t.shape[1:]) for t in tensors]
        return np.concatenate(heads, axis=1)

    yield ("attention_norm", "scale"), _copy(f"{prefix}input_layernorm.weight", (c.hidden_size,))
    yield ("mlp_norm", "scale"), _copy(f"{prefix}post_attention_layernorm.weight", (c.hidden_size,))
    yield (
        ("attention", "qkv", "kernel"),
        LeafSource(
            tuple(f"{name}.weight" for name in qkv),
            tuple((size, c.hidden_size) for size in (q_size, kv_size, kv_size)),
            lambda tensors: np.moveaxis(group(tensors), -1, 0),
        ),
    )
    yield (
        ("attention", "out", "kernel"),
        LeafSource(
            (f"{out}.weight",), ((c.hidden_size, q_size),), lambda t: t[0].T.reshape(c.num_heads, c.head_dim, -1)
        ),
    )
    yield (
        ("mlp", "gate_up", "kernel"),
        LeafSource(
            tuple(f"{name}.weight" for name in gate_up),
            ((c.intermediate_size, c.hidden_size),) * 2,
            lambda tensors: np.stack([t.T for t in tensors], axis=1),
        ),
    )
    yield (
        ("mlp", "down", "kernel"),
        LeafSource((f"{down}.weight",), ((c.hidden_size, c.intermediate_size),), lambda t: t[0].T),
    )
    if c.qkv_bias:
        names = tuple(f"{name}.bias" for name in qkv)
        yield ("attention", "qkv", "bias"), LeafSource(names, ((q_size,), (kv_size,), (kv_size,)), group)
    if c.out_bias:
        yield ("attention", "out", "bias"), _copy(f"{out}.bias", (c.hidden_size,))
    if c.mlp_bias:
        names = tuple(f"{name}.bias" for name in gate_up)
        yield ("mlp", "gate_up", "bias"), LeafSource(names, ((c.intermediate_size,),) * 2, np.stack)
        yield ("mlp", "down", "bias"), _copy(f"{down}.bias", (c.hidden_size,))
    if c.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield ("attention", name, "scale"), _copy(f"{prefix}self_attn.{name}.weight", (c.head_dim,))


def _copy(name: str, shape: tuple[int, ...]) -> LeafSource:
    return LeafSource((name,), (shape,), lambda tensors: tensors[0])
