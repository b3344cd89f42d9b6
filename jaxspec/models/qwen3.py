"""Qwen3 (dense): Llama with RMS norms on the query and key heads before rope."""

from typing import Any

from jaxspec.models.config import ModelConfig, flag, read_config
from jaxspec.models.families import llama_leaf_sources

MODEL_TYPES = ("qwen3",)


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """See `Family.config_from_hf`."""
    bias = flag(hf, "attention_bias")
    # head_dim is 128 in Qwen3 unless the config says otherwise, whatever hidden_size / num_attention_heads
    hf = {"use_sliding_window": False, "head_dim": 128, **hf}
    return read_config(hf, qkv_bias=bias, out_bias=bias, qk_norm=True)


leaf_sources = llama_leaf_sources
