"""Models: one decoder, one small file per family, found by Hugging Face's `model_type`."""

import importlib
import pkgutil
from functools import cache
from typing import Any

from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder, cache_capacity, init_cache, init_params, param_shapes
from jaxspec.models.families import Family, LeafSource, Path
from jaxspec.models.rope import RopeConfig

__all__ = [
    "Decoder",
    "LeafSource",
    "ModelConfig",
    "RopeConfig",
    "cache_capacity",
    "config_from_hf",
    "ignored_tensor",
    "init_cache",
    "init_params",
    "leaf_sources",
    "param_shapes",
    "supported_model_types",
]


@cache
def _families() -> dict[str, Family]:
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    return {name: module for module in modules for name in getattr(module, "MODEL_TYPES", ())}


def supported_model_types() -> tuple[str, ...]:
    """The values of `model_type` that can be converted."""
    return tuple(sorted(_families()))


def _family(model_type: Any) -> Family:
    if not isinstance(model_type, str) or model_type not in _families():
        raise ValueError(f"model_type {model_type!r} is not supported; supported: {', '.join(supported_model_types())}")
    return _families()[model_type]


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """`ModelConfig` of a Hugging Face config dict (the contents of config.json).

    Raises:
        ValueError: the model type, or something the config switches on, is not supported, or the config is malformed.
    """
    if not isinstance(hf, dict):
        raise ValueError(f"a model config must be a JSON object, got {type(hf).__name__}")
    return _family(hf.get("model_type")).config_from_hf(hf)


def leaf_sources(config: ModelConfig) -> dict[Path, LeafSource]:
    """For every leaf of the parameter tree, by path, the Hugging Face tensors it is made of."""
    return _family(config.model_type).leaf_sources(config)


def ignored_tensor(config: ModelConfig, name: str) -> bool:
    """Whether a checkpoint may hold tensor `name` although no leaf uses it: rope tables, which are recomputed.

    A tied model's `lm_head.weight` is not among them: it may be dropped only if it equals the embedding.
    """
    return name.endswith("rotary_emb.inv_freq")
