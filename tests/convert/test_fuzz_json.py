"""Damaged configs, indices and tokenizers: converted into a model that loads, or refused with a clear error."""

import copy
import json
import shutil

import numpy as np
import pytest

from convert import ConversionError, convert
from jaxspec.checkpoint import load
from tests.convert.damage import bounded

ROUNDS = 30
# `...` removes the key
VALUES = (None, True, -1, 0, 1, 3, 1.5, 2**31, 2**70, 1e308, float("nan"), "", "x", [], [1], {}, {"a": 1}, ...)


def places(value, path=()):
    """Every key path of nested JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield (*path, key)
        yield from places(child, (*path, key))


def damaged(value, rng):
    """A copy of `value` with one entry replaced or removed."""
    value = copy.deepcopy(value)
    paths = list(places(value))
    *parents, key = paths[rng.integers(len(paths))]
    node = value
    for parent in parents:
        node = node[parent]
    new = VALUES[rng.integers(len(VALUES))]
    if new is ...:
        del node[key]
    else:
        node[key] = new
    return value


@pytest.fixture
def model(tiny, tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    options = {"rope_scaling": scaling, "eos_token_id": [1, 2]}
    directory, _ = tiny("llama", save={"max_shard_size": "30KB"}, **options)
    return shutil.copytree(directory, tmp_path / "model")


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer_config.json"]
)
def test_damaged_values(name, model, tmp_path, monkeypatch):
    monkeypatch.setattr("convert.atomic._flush", lambda directory: None)  # waits for the disk
    original = json.loads((model / name).read_text())
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(ROUNDS // 4 if name == "tokenizer_config.json" else ROUNDS):  # transformers takes its time
        (model / name).write_text(json.dumps(damaged(original, rng)))
        try:
            convert(model, tmp_path / "out", overwrite=True, progress=False)
            loaded = load(tmp_path / "out")
        except ConversionError:
            refused += 1
            continue
        assert all(np.isfinite(leaf).all() for leaf in (loaded.params["embedding"], loaded.params["lm_head"]))
    if name != "tokenizer_config.json":  # most of whose fields may hold anything
        assert refused > 0


def test_damaged_tokenizers(model, tmp_path):
    """The library may accept a damaged tokenizer.json; whatever it does, it is a ConversionError or a tokenizer."""
    from convert.hf_directory import check_tokenizer_json

    path = model / "tokenizer.json"
    original = json.loads(path.read_text())
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(300):
        path.write_text(json.dumps(damaged(original, rng)))
        try:
            check_tokenizer_json(path)
        except ConversionError:
            refused += 1
    assert refused > 20


def test_huge_sizes_cost_nothing(model):
    from convert.plan import plan_leaves
    from convert.sources import open_source
    from jaxspec.checkpoint import read_model_config

    original = json.loads((model / "config.json").read_text())
    for name in (
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "head_dim",
        "num_hidden_layers",
        "num_attention_heads",
    ):
        (model / "config.json").write_text(json.dumps(original | {name: 2**30}))
        source = open_source(model)
        with bounded(), pytest.raises(ConversionError):
            plan_leaves(source, read_model_config(source.config, "model"))
