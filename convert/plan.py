"""Which tensors make which parameter leaf, checked as a whole before anything is written."""

from collections import Counter
from typing import NamedTuple

import jax
import numpy as np

from convert.dtypes import target_dtype
from convert.errors import ConversionError
from convert.safetensors_file import FLOAT_TYPES
from convert.source import Source
from jaxspec.models import LeafSource, ModelConfig, ignored_tensor, leaf_sources, param_shapes

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class PlannedLeaf(NamedTuple):
    """One leaf of the parameter tree: where it goes, its shape there, and what it is made of."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    source: LeafSource


def plan_leaves(source: Source, config: ModelConfig) -> list[PlannedLeaf]:
    """Matches the tensors of `source` with the leaves of `config`'s parameter tree.

    Returns:
        Every leaf exactly once. Every tensor is used by one leaf, or is known to be redundant.

    Raises:
        ConversionError: missing, unexpected, duplicate or mis-shaped tensors and faults of the files, all in one
            message.
    """
    if config.num_layers > len(source.tensors):
        # a damaged config must not make us list millions of missing tensors
        raise ConversionError(f"{source.origin}: {config.num_layers} layers, but only {len(source.tensors)} tensors")
    sources = leaf_sources(config)
    problems = list(source.problems)
    missing, misshaped, other_types = [], [], []
    used: Counter[str] = Counter()
    for leaf in sources.values():
        used.update(leaf.names)
        for name, shape in zip(leaf.names, leaf.shapes, strict=True):
            info = source.tensors.get(name)
            if info is None:
                missing.append(name)
            elif info.shape != shape:
                misshaped.append(f"{name} is {list(info.shape)}, expected {list(shape)}")
            elif source.kind == "safetensors" and info.dtype not in FLOAT_TYPES:
                other_types.append(f"{name} is {info.dtype}, expected one of {', '.join(FLOAT_TYPES)}")
    extra = sorted(n for n in source.tensors if n not in used and not ignored_tensor(config, n))
    if config.tie_word_embeddings and _HEAD in extra:
        extra.remove(_HEAD)
        problems += _compare_tied(source)
    for title, names in (
        ("missing tensors", missing),
        ("unexpected tensors", extra),
        ("tensors needed by more than one leaf", sorted(n for n, times in used.items() if times > 1)),
        ("mis-shaped tensors", misshaped),
        ("tensors of an unsupported type", other_types),
    ):
        if names:
            problems.append(f"{title}: {', '.join(name[:300] for name in names)}")
    if problems:
        raise ConversionError(f"{source.origin}: {'; '.join(problems)}")
    shapes = {
        tuple(key.key for key in path): leaf.shape
        for path, leaf in jax.tree_util.tree_flatten_with_path(param_shapes(config))[0]
    }
    if shapes.keys() != sources.keys():
        raise ConversionError(
            f"the family of {config.model_type!r} describes other leaves than its decoder has: "
            f"{sorted(shapes.keys() ^ sources.keys())[:5]}"
        )
    return [PlannedLeaf(path, shapes[path], sources[path]) for path in sources]


def _compare_tied(source: Source) -> list[str]:
    """A tied model's head may be stored as well, but only as what it is tied to."""
    tied = f"the config ties {_HEAD} to {_EMBEDDING}"
    head, embedding = source.tensors[_HEAD], source.tensors.get(_EMBEDDING)
    if embedding is None:
        return []
    if head.shape == embedding.shape and (head.dtype in FLOAT_TYPES) == (embedding.dtype in FLOAT_TYPES):
        dtype = target_dtype(source.default_dtype)
        if np.array_equal(source.read(_HEAD, dtype), source.read(_EMBEDDING, dtype)):
            return []
    return [f"{tied}, but the two differ"]
