"""`ModelConfig`, and what is common to reading Hugging Face configs."""

from dataclasses import dataclass
from typing import Any

from jaxspec.models.rope import RopeConfig, rope_config


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a decoder. Hashable: it is static under jit."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope: RopeConfig
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of every query and key head before rope

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def capacity_limit(self) -> int:
        """The most positions a sequence may take."""
        return min(self.max_positions, self.rope.limit or self.max_positions)


def read_config(hf: dict[str, Any], **family: Any) -> ModelConfig:
    """Builds a `ModelConfig` from a Hugging Face config dict; `family` holds the fields that the family fixes.

    Raises:
        ValueError: a required field is missing, of the wrong type or out of range, the fields contradict each other,
            or the config uses something that is not supported.
    """
    _reject_unsupported(hf)

    def size(name: str, default: int | None = None) -> int:
        value = hf.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise ValueError(f"config field {name} must be a positive integer, got {value!r}")
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads, head_dim = size("num_key_value_heads", heads), size("head_dim", max(hidden // heads, 1))
    if hf.get("head_dim") is None and hidden % heads:
        raise ValueError(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, and there is no head_dim"
        )
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary embeddings, got {head_dim}")
    eps = hf.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < 1:
        raise ValueError(f"config field rms_norm_eps must lie between 0 and 1, got {eps!r}")
    return ModelConfig(
        model_type=hf["model_type"],
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_layers=size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=size("max_position_embeddings"),
        rope=rope_config(hf),
        rms_norm_eps=float(eps),
        tie_word_embeddings=flag(hf, "tie_word_embeddings"),
        **family,
    )


def flag(hf: dict[str, Any], name: str) -> bool:
    """A boolean config field, False when absent. Raises ValueError for anything but a boolean."""
    value = hf.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"config field {name} must be true or false, got {value!r}")
    return bool(value)


def _reject_unsupported(hf: dict[str, Any]) -> None:
    for name in ("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok"):
        if hf.get(name):
            raise ValueError(f"mixture-of-experts models are not supported ({name} = {hf[name]}); dense models are")
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"activation {hf['hidden_act']!r} is not supported; supported: silu")
    if hf.get("quantization_config"):
        raise ValueError("quantized Hugging Face checkpoints are not supported; use the unquantized one or a GGUF file")
    for name in ("attention_sinks", "attn_logit_softcapping", "final_logit_softcapping", "attention_chunk_size"):
        if hf.get(name):
            raise ValueError(f"{name} = {hf[name]!r} is not supported; plain softmax attention is")
    # `sliding_window` may be set and unused: Qwen2 and Qwen3 switch it with `use_sliding_window`
    if hf.get("sliding_window") is not None and hf.get("use_sliding_window", True):
        raise ValueError(f"sliding_window = {hf['sliding_window']} is in use and not supported; full attention is")
    for layer_type in _list(hf, "layer_types"):
        if layer_type != "full_attention":
            raise ValueError(f"layer type {layer_type!r} (layer_types) is not supported; supported: full_attention")
    if not all(_list(hf, "no_rope_layers")):
        raise ValueError("layers without rope (no_rope_layers) are not supported")


def _list(hf: dict[str, Any], name: str) -> list[Any]:
    value = hf.get(name)
    if value is not None and not isinstance(value, list):
        raise ValueError(f"config field {name} must be a list, got {value!r}")
    return value or []
