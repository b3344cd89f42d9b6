"""A Hugging Face config rebuilt from GGUF metadata."""

import math
from collections.abc import Container
from typing import Any

import numpy as np

from convert.errors import ConversionError
from convert.gguf_file import GGUFFile

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# llama.cpp's name for the factors that divide Llama 3.1's frequencies; the config states the rule instead
ROPE_FACTORS = "rope_freqs.weight"

# keys that say nothing which the other keys and the tensors do not say
_REDUNDANT = {"vocab_size", "rope.dimension_count", "attention.key_length", "attention.value_length"}
_REQUIRED = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
_ROPE_KEYS = {
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
# keys that only matter when they are set to something else than these values
_NEUTRAL: dict[str, Container[Any]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
}


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The config.json that the metadata and tensors of `file` describe.

    Raises:
        ConversionError: an architecture, key or value that is not supported, missing or contradictory.
    """
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise ConversionError(
            f"{file.path}: one part of a split GGUF file; join the parts first (llama-gguf-split --merge)"
        )
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise ConversionError(
            f"{file.path}: architecture {str(arch)[:40]!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    values = {k.removeprefix(f"{arch}."): v for k, v in file.metadata.items() if k.startswith(f"{arch}.")}
    _reject_unknown(file, arch, values)
    config: dict[str, Any] = {"architectures": [ARCHITECTURES[arch]], "model_type": arch, "hidden_act": "silu"}
    for name, key in _REQUIRED.items():
        config[name] = _integer(file, arch, values, key)
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = _integer(file, arch, values, "attention.head_count_kv", default=heads)
    config["head_dim"] = _head_dim(file, arch, values, config)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConversionError(f"{file.path}: tensor token_embd.weight is missing or no matrix")
    config["vocab_size"] = embedding.shape[0]
    if values.get("vocab_size", embedding.shape[0]) != embedding.shape[0]:
        raise ConversionError(
            f"{file.path}: {arch}.vocab_size is {values['vocab_size']}, token_embd.weight has {embedding.shape[0]} rows"
        )
    config["rms_norm_eps"] = _real(file, arch, values, "attention.layer_norm_rms_epsilon")
    # without an output matrix of its own the embedding serves as one; quantised apart, the two differ and both count
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    if arch != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if arch == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    config["rope_theta"] = _real(file, arch, values, "rope.freq_base", default=10_000.0)
    if scaling := _rope_scaling(file, arch, values, config):
        config["rope_scaling"] = scaling
    for name in ("bos", "eos"):
        token = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        config[f"{name}_token_id"] = token if type(token) is int else None
    return config


def _reject_unknown(file: GGUFFile, arch: str, values: dict[str, Any]) -> None:
    for key, allowed in _NEUTRAL.items():
        if key in values and values[key] not in allowed:
            raise ConversionError(f"{file.path}: {arch}.{key} = {str(values[key])[:60]} is not supported")
    known = {*_REQUIRED.values(), *_ROPE_KEYS, *_REDUNDANT, *_NEUTRAL}
    known |= {"attention.head_count_kv", "attention.layer_norm_rms_epsilon"}
    if unknown := sorted(set(values) - known):
        raise ConversionError(
            f"{file.path}: metadata that this converter does not know and that may change the model: "
            + ", ".join(f"{arch}.{key}" for key in unknown[:8])
        )


def _integer(file: GGUFFile, arch: str, values: dict[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key, default)
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]  # stated per layer, all alike
    if type(value) is not int or not 0 < value < 1 << 31:
        raise ConversionError(f"{file.path}: {arch}.{key} must be a positive integer, got {str(value)[:60]}")
    return value


def _real(file: GGUFFile, arch: str, values: dict[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key, default)
    # a bool is an int too
    if isinstance(value, bool) or not isinstance(value, int | float | np.float32) or not 0 < value < math.inf:
        raise ConversionError(f"{file.path}: {arch}.{key} must be a positive number, got {str(value)[:60]}")
    return float(str(value))  # the shortest decimal of the stored float32: 1e-05, not 9.999999747378752e-06


def _head_dim(file: GGUFFile, arch: str, values: dict[str, Any], config: dict[str, Any]) -> int:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = _integer(file, arch, values, "attention.key_length", default=max(1, hidden // heads))
    if "attention.key_length" not in values and hidden % heads:
        raise ConversionError(f"{file.path}: {hidden} channels do not divide into {heads} heads")
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.get(key, head_dim) != head_dim:
            raise ConversionError(f"{file.path}: {arch}.{key} is {values[key]}, the heads have {head_dim} dimensions")
    return head_dim


def _rope_scaling(file: GGUFFile, arch: str, values: dict[str, Any], config: dict[str, Any]) -> dict[str, Any] | None:
    kind = values.get("rope.scaling.type", "linear" if "rope.scale_linear" in values else "none")
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise ConversionError(f"{file.path}: both {ROPE_FACTORS} and {arch}.rope.scaling.type = {str(kind)[:40]}")
        return _llama3_scaling(file, config)
    if kind == "none":
        return None
    if kind == "linear":
        key = "rope.scaling.factor" if "rope.scaling.factor" in values else "rope.scale_linear"
        factor = _real(file, arch, values, key)
        return {"rope_type": "linear", "factor": factor} if factor != 1 else None
    if kind != "yarn":
        raise ConversionError(
            f"{file.path}: {arch}.rope.scaling.type = {str(kind)[:40]!r}; supported: none, linear, yarn"
        )
    original = _integer(file, arch, values, "rope.scaling.original_context_length")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": _real(file, arch, values, "rope.scaling.factor"),
        "original_max_position_embeddings": original,
    }
    for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if f"rope.scaling.{key}" in values:
            scaling[name] = _real(file, arch, values, f"rope.scaling.{key}")
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        # llama.cpp multiplies its own 1 + 0.1 ln(factor) by these
        if _real(file, arch, values, key, default=1.0) != 1.0:
            raise ConversionError(f"{file.path}: {arch}.{key} = {values[key]} is not supported; supported: 1")
    return scaling


def _llama3_scaling(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Finds the parameters of Llama 3.1's rule whose factors are those stored, and proves it.

    The rule depends on low_freq_factor and high_freq_factor over the original context only, so one of the three is
    free; every published model has low 1, high 4 and 8192 positions.
    """
    factors = file.read(ROPE_FACTORS, np.dtype(np.float32)).astype(np.float64).reshape(-1)
    half = config["head_dim"] // 2
    low, high, original = 1.0, 4.0, 8192
    if factors.shape == (half,):
        turns = original * config["rope_theta"] ** (-np.arange(half) / half) / (2 * math.pi)
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        factor = float(str(np.float32(factors.max())))
        if np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise ConversionError(
        f"{file.path}: {ROPE_FACTORS} holds frequency factors that are not those of Llama 3.1's scaling "
        f"(low {low:g}, high {high:g}, {original} positions); convert the Hugging Face checkpoint instead"
    )
