"""Independent references: tiny random checkpoints under Hugging Face's names, and a decoder in float64 numpy.

Nothing here uses the decoder under test. PyTorch is imported only by `torch_model`, so that what is compared with the
numpy decoder runs without it; that the numpy decoder equals PyTorch's models is itself a test.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxspec.models import Decoder, ModelConfig, config_from_hf, leaf_sources

NEAR_TIE = 1e-4  # float32 programs of different shape may order logits that are closer than this differently

TINY = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_config(model_type: str = "llama", **overrides: Any) -> dict[str, Any]:
    """The contents of a config.json."""
    return {"model_type": model_type, **TINY, **overrides}


def random_weights(hf: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors under Hugging Face's names. Logits are of order 1 to 10; biases and norm scales are random,
    because with zeros and ones a dropped bias or norm would not show."""
    rng = np.random.default_rng(seed)
    d, f, h = hf["hidden_size"], hf["intermediate_size"], hf["head_dim"]
    heads, kv_heads = hf["num_attention_heads"], hf["num_key_value_heads"]
    family, attention_bias = hf["model_type"], hf.get("attention_bias", False)
    weights: dict[str, np.ndarray] = {}

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0, bias: bool = False) -> None:
        weights[f"{name}.weight"] = rng.normal(0, gain / np.sqrt(columns), (rows, columns))
        if bias:
            weights[f"{name}.bias"] = rng.normal(0, 0.5, rows)

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"] = rng.uniform(0.5, 1.5, size)

    weights["model.embed_tokens.weight"] = rng.normal(0, 1, (hf["vocab_size"], d))
    for layer in range(hf["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norm(f"{prefix}.input_layernorm", d)
        norm(f"{prefix}.post_attention_layernorm", d)
        qkv_bias = attention_bias or family == "qwen2"
        # a gain above 1 makes attention peaked, so that a wrong position or row shows
        matrix(f"{prefix}.self_attn.q_proj", heads * h, d, 1.5, qkv_bias)
        matrix(f"{prefix}.self_attn.k_proj", kv_heads * h, d, 1.5, qkv_bias)
        matrix(f"{prefix}.self_attn.v_proj", kv_heads * h, d, 1.0, qkv_bias)
        matrix(f"{prefix}.self_attn.o_proj", d, heads * h, 1.0, attention_bias)
        if family == "qwen3":
            norm(f"{prefix}.self_attn.q_norm", h)
            norm(f"{prefix}.self_attn.k_norm", h)
        mlp_bias = hf.get("mlp_bias", False)
        matrix(f"{prefix}.mlp.gate_proj", f, d, 1.0, mlp_bias)
        matrix(f"{prefix}.mlp.up_proj", f, d, 1.0, mlp_bias)
        matrix(f"{prefix}.mlp.down_proj", d, f, 1.0, mlp_bias)
    norm("model.norm", d)
    if hf["tie_word_embeddings"]:
        weights["model.embed_tokens.weight"] *= 3 / np.sqrt(d)
    else:
        matrix("lm_head", hf["vocab_size"], d, 3.0)
    return {name: tensor.astype(np.float32) for name, tensor in weights.items()}


def jax_model(hf: dict[str, Any], weights: dict[str, np.ndarray], dtype: Any = jnp.float32) -> tuple[Decoder, Any]:
    """The model under test and its parameters."""
    config = config_from_hf(hf)
    params: dict[str, Any] = {}
    for path, source in leaf_sources(config).items():
        node = params
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = jnp.asarray(source.assemble([weights[name] for name in source.names])).astype(dtype)
    return Decoder(config), params


def tiny_model(model_type: str = "llama", seed: int = 0, **overrides: Any) -> tuple[Decoder, Any]:
    """A float32 model with random weights."""
    hf = tiny_config(model_type, **overrides)
    return jax_model(hf, random_weights(hf, seed))


def torch_model(hf: dict[str, Any], weights: dict[str, np.ndarray], dtype: str = "float32") -> Any:
    """transformers' model with these weights, attention computed eagerly."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {name: value for name, value in hf.items() if name != "model_type"}
    config = AutoConfig.for_model(hf["model_type"], **values)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict({n: torch.from_numpy(w) for n, w in weights.items()}, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= ({"lm_head.weight"} if hf["tie_word_embeddings"] else set()), missing
    return model.to(getattr(torch, dtype)).eval()


class Trace(NamedTuple):
    """What the numpy decoder computes for one sequence of T tokens; float64."""

    logits: np.ndarray  # [T, V]
    hidden: np.ndarray  # [2L + 1, T, D]
    queries: np.ndarray  # [L, T, N, H], after rope
    raw: np.ndarray  # [L, N, T, T]: scaled attention logits
    attention: np.ndarray  # [L, N, T, T]: softmax over the visible rows


def decoder(
    hf: dict[str, Any],
    weights: dict[str, np.ndarray],
    tokens: np.ndarray,
    *,
    visible: np.ndarray | None = None,
    attn: tuple[bool, ...] | None = None,
    mlp: tuple[bool, ...] | None = None,
) -> Trace:
    """A decoder in float64 for default rope.

    Args:
        visible: bool [L, T, T], which rows each query attends to; None: every row up to its own.
        attn: sublayers that run; None: all.
        mlp: likewise.
    """
    w = {name: tensor.astype(np.float64) for name, tensor in weights.items()}
    num_layers, h = hf["num_hidden_layers"], hf["head_dim"]
    group = hf["num_attention_heads"] // hf["num_key_value_heads"]
    count = len(tokens)
    angle = np.outer(np.arange(count), hf.get("rope_theta", 10_000.0) ** -(np.arange(0, h, 2) / h))
    if visible is None:
        visible = np.broadcast_to(np.tril(np.ones((count, count), bool)), (num_layers, count, count))

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + hf["rms_norm_eps"]) * w[f"{name}.weight"]

    def heads(x: np.ndarray, prefix: str, name: str) -> np.ndarray:
        x = linear(x, f"{prefix}.{name}_proj").reshape(count, -1, h)
        if name == "v":
            return x
        if hf["model_type"] == "qwen3":
            x = norm(x, f"{prefix}.{name}_norm")
        turned = (x[..., : h // 2] + 1j * x[..., h // 2 :]) * np.exp(1j * angle)[:, None]
        return np.concatenate([turned.real, turned.imag], axis=-1)

    x = w["model.embed_tokens.weight"][tokens]
    hidden, queries, raws, attentions = [x], [], [], []
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        normed = norm(x, f"{prefix}.input_layernorm")
        q, k, v = (heads(normed, f"{prefix}.self_attn", name) for name in "qkv")
        raw = np.einsum("tnh,snh->nts", q, np.repeat(k, group, axis=1)) / np.sqrt(h)
        seen = np.where(visible[layer], raw, -np.inf)
        attention = np.exp(seen - seen.max(axis=-1, keepdims=True))
        attention /= attention.sum(axis=-1, keepdims=True)
        if attn is None or attn[layer]:
            out = np.einsum("nts,snh->tnh", attention, np.repeat(v, group, axis=1)).reshape(count, -1)
            x = x + linear(out, f"{prefix}.self_attn.o_proj")
        hidden.append(x)
        if mlp is None or mlp[layer]:
            normed = norm(x, f"{prefix}.post_attention_layernorm")
            gate = linear(normed, f"{prefix}.mlp.gate_proj")
            x = x + linear(
                gate / (1 + np.exp(-gate)) * linear(normed, f"{prefix}.mlp.up_proj"), f"{prefix}.mlp.down_proj"
            )
        hidden.append(x)
        queries.append(q)
        raws.append(raw)
        attentions.append(attention)
    head = w["model.embed_tokens.weight" if hf["tie_word_embeddings"] else "lm_head.weight"]
    logits = norm(x, "model.norm") @ head.T
    return Trace(logits, *(np.stack(parts) for parts in (hidden, queries, raws, attentions)))


def assert_same_greedy(ours: np.ndarray, expected: np.ndarray, expected_logits: np.ndarray) -> bool:
    """Asserts that two greedy continuations are equal token for token.

    They may part where the two largest of `expected_logits` [n, V] are closer than `NEAR_TIE`, and nowhere else:
    float32 programs of different shape round differently. Returns whether they did; the place is printed.
    """
    ours, expected = np.asarray(ours), np.asarray(expected)
    assert ours.shape == expected.shape
    differing = np.flatnonzero(ours != expected)
    if not differing.size:
        return False
    top = np.sort(expected_logits[differing[0]])[-2:]
    gap = float(top[1] - top[0])
    assert gap < NEAR_TIE, f"token {differing[0]}: {ours[differing[0]]}, expected {expected[differing[0]]}; gap {gap:g}"
    print(f"continuations part at token {differing[0]}, where the two largest logits are {gap:.1e} apart")
    return True


def replace_config(model: Decoder, **changes: Any) -> Decoder:
    """The model with other config fields."""
    config: ModelConfig = dataclasses.replace(model.config, **changes)
    return Decoder(config, model.backend)
