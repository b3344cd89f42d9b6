"""Llama 2, 3, 3.1, 3.2, SmolLM2, and what shares the architecture (Mistral without sliding windows)."""

from typing import Any

from jaxspec.models.config import ModelConfig, flag, read_config
from jaxspec.models.families import llama_leaf_sources

MODEL_TYPES = ("llama", "mistral")


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """See `Family.config_from_hf`."""
    if hf["model_type"] == "mistral":
        # what transformers assumes where a Mistral config is silent
        hf = {"sliding_window": 4096, "num_key_value_heads": 8, **hf}
    bias = flag(hf, "attention_bias")
    return read_config(hf, qkv_bias=bias, out_bias=bias, mlp_bias=flag(hf, "mlp_bias"))


leaf_sources = llama_leaf_sources
