"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from typing import Any

from jaxspec.models.config import ModelConfig, read_config
from jaxspec.models.families import llama_leaf_sources

MODEL_TYPES = ("qwen2",)


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """See `Family.config_from_hf`."""
    # Qwen2 switches its sliding window off unless told otherwise
    return read_config({"use_sliding_window": False, **hf}, qkv_bias=True)


leaf_sources = llama_leaf_sources
