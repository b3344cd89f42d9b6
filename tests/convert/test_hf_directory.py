"""Faults of Hugging Face directories: shards, index, tensors, configs, tokenizers. Each is named, none is converted."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from convert import ConversionError, convert
from convert.hf_directory import HFDirectory
from convert.sources import open_source
from jaxspec.checkpoint import load

INDEX = "model.safetensors.index.json"


@pytest.fixture
def single(tiny, tmp_path):
    """A copy of a one-file model."""
    return shutil.copytree(tiny("qwen2")[0], tmp_path / "single")


@pytest.fixture
def sharded(tiny, tmp_path):
    """A copy of a model of many shards."""
    return shutil.copytree(tiny("qwen2", save={"max_shard_size": "30KB"})[0], tmp_path / "sharded")


def edit(directory, function, name="model.safetensors"):
    tensors = load_file(directory / name)
    function(tensors)
    save_file(tensors, directory / name)


def edit_json(path, **values):
    content = json.loads(path.read_text())
    content.update(values)
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))


def refused(directory, tmp_path):
    """The message of the refusal; nothing may have been written."""
    with pytest.raises(ConversionError) as caught:
        convert(directory, tmp_path / "out", progress=False)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
    return str(caught.value)


def test_every_fault_of_the_tensors_is_reported_at_once(single, tmp_path):
    def damage(tensors):
        del tensors["model.layers.0.self_attn.q_proj.bias"]
        del tensors["model.norm.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
        tensors["model.layers.1.mlp.down_proj.weight"] = np.zeros((3, 4), np.float32)

    edit(single, damage)
    message = refused(single, tmp_path)
    assert "missing tensors: model.norm.weight, model.layers.0.self_attn.q_proj.bias" in message
    assert "unexpected tensors: model.layers.7.mlp.up_proj.weight" in message
    assert "mis-shaped tensors: model.layers.1.mlp.down_proj.weight is [3, 4], expected [48, 80]" in message


def test_missing_shards_are_named(sharded, tmp_path):
    names = sorted(path.name for path in sharded.glob("*.safetensors"))
    (sharded / names[1]).unlink()
    (sharded / names[2]).unlink()
    assert f"missing shards (named by {INDEX}): {names[1]}, {names[2]}" in refused(sharded, tmp_path)


def test_missing_shard_without_index(sharded, tmp_path):
    names = sorted(path.name for path in sharded.glob("*.safetensors"))
    (sharded / INDEX).unlink()
    (sharded / names[1]).unlink()
    assert f"missing shards: {names[1]}" in refused(sharded, tmp_path)


def test_shards_without_index(sharded, tmp_path):
    (sharded / INDEX).unlink()
    convert(sharded, tmp_path / "out", progress=False)


@pytest.mark.parametrize(
    "form", ["model.safetensors-{:05d}-of-{:05d}.safetensors", "weights_{:05d}-of-{:05d}.safetensors"]
)
def test_odd_shard_names(form, sharded, tmp_path):
    names = sorted(path.name for path in sharded.glob("*.safetensors"))
    renamed = {name: form.format(i + 1, len(names)) for i, name in enumerate(names)}
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"] = {k: renamed[v] for k, v in index["weight_map"].items()}
    (sharded / INDEX).write_text(json.dumps(index))
    for name, new in renamed.items():
        (sharded / name).rename(sharded / new)
    convert(sharded, tmp_path / "with_index", progress=False)
    (sharded / INDEX).unlink()
    convert(sharded, tmp_path / "without_index", progress=False)


def test_stale_index_entries(sharded, tmp_path):
    index = json.loads((sharded / INDEX).read_text())
    moved = index["weight_map"]["model.norm.weight"]
    other = next(name for name in index["weight_map"].values() if name != moved)
    index["weight_map"]["model.norm.weight"] = other
    del index["weight_map"]["lm_head.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    message = refused(sharded, tmp_path)
    assert f"stale index: {INDEX} says that model.norm.weight is in {other}, which does not hold it" in message
    assert "stale index: lm_head.weight" in message


def test_duplicate_tensors_across_shards(sharded, tmp_path):
    names = sorted(path.name for path in sharded.glob("*.safetensors"))
    (name, values), *_ = load_file(sharded / names[0]).items()
    edit(sharded, lambda tensors: tensors.update({name: values}), names[1])
    assert f"duplicate tensor {name} (in {names[0]}, {names[1]})" in refused(sharded, tmp_path)


def test_duplicate_keys_of_the_index(sharded, tmp_path):
    text = (sharded / INDEX).read_text()
    entry = '"model.norm.weight": "model-00001-of-00009.safetensors",'
    (sharded / INDEX).write_text(text.replace('"weight_map": {', '"weight_map": {' + entry))
    assert "stated twice: ['model.norm.weight']" in refused(sharded, tmp_path)


def test_shards_left_over_from_another_save(sharded, single, tmp_path):
    shutil.copy(single / "model.safetensors", sharded / "model-00099-of-00099.safetensors")
    assert "left over from another save" in refused(sharded, tmp_path)
    (sharded / "model-00099-of-00099.safetensors").rename(sharded / "model.safetensors")
    assert f"left over from another save, next to {INDEX}: model.safetensors" in refused(sharded, tmp_path)


@pytest.mark.parametrize("shard", ["../single/model.safetensors", "/etc/passwd", "", 7])
def test_index_cannot_point_outside(shard, sharded, tmp_path):
    edit_json(sharded / INDEX, weight_map={"model.norm.weight": shard})
    assert "no shard's name" in refused(sharded, tmp_path)


def test_tied_model_may_store_its_head(tiny, tmp_path):
    directory, _ = tiny("llama", tie_word_embeddings=True)
    copy = shutil.copytree(directory, tmp_path / "tied")
    edit(copy, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}))
    convert(copy, tmp_path / "out", progress=False)
    assert "lm_head" not in load(tmp_path / "out").params


def test_tied_model_with_another_head_raises(tiny, tmp_path):
    copy = shutil.copytree(tiny("llama", tie_word_embeddings=True)[0], tmp_path / "tied")
    edit(copy, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 0.01}))
    assert "ties lm_head.weight to model.embed_tokens.weight, but the two differ" in refused(copy, tmp_path)


def test_untied_model_without_head_raises(single, tmp_path):
    edit(single, lambda tensors: tensors.pop("lm_head.weight"))
    assert "missing tensors: lm_head.weight" in refused(single, tmp_path)


def test_rope_tables_in_the_file_are_ignored(single, tmp_path):
    table = np.ones(4, np.float32)
    edit(single, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": table}))
    convert(single, tmp_path / "out", progress=False)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_weights_are_named(value, single, tmp_path):
    def damage(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value

    edit(single, damage)
    assert "model.layers.1.mlp.up_proj.weight: contains NaN or infinite values" in refused(single, tmp_path)


def test_overflow_of_float16_is_named(single, tmp_path):
    def damage(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 7e4

    edit(single, damage)
    with pytest.raises(ConversionError, match=r"up_proj.weight: values up to 7e\+04 overflow float16"):
        convert(single, tmp_path / "out", dtype="float16", progress=False)
    convert(single, tmp_path / "out", dtype="bfloat16", progress=False)
    with pytest.raises(ConversionError, match=r"gate_up.*overflow float16"):
        load(tmp_path / "out", dtype="float16")


def test_integer_and_float8_weights_are_refused(single, tmp_path):
    tensors = {k: torch.from_numpy(v) for k, v in load_file(single / "model.safetensors").items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    from safetensors.torch import save_file as save_torch

    save_torch(tensors, single / "model.safetensors")
    message = refused(single, tmp_path)
    assert "model.norm.weight is F8_E4M3" in message
    assert "lm_head.weight is I8" in message


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth"])
def test_pickles_are_refused_with_advice(suffix, single, tmp_path):
    (single / "model.safetensors").rename(single / f"pytorch_model.{suffix}")
    assert "save_pretrained(NEW_DIR, safe_serialization=True)" in refused(single, tmp_path)
    assert "safe_serialization=True" in refused(single / f"pytorch_model.{suffix}", tmp_path)


def test_pickles_beside_safetensors_do_not_matter(single, tmp_path):
    (single / "training_args.bin").write_bytes(b"\x80\x04.")
    convert(single, tmp_path / "out", progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported"),
        ({"model_type": ...}, "model_type None is not supported"),
        ({"hidden_size": "48"}, "hidden_size must be a positive integer"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"num_key_value_heads": 4}, "not a multiple"),
        ({"num_hidden_layers": 10**9}, "1000000000 layers, but only"),
        ({"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, "rope type 'su' is not supported"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"use_sliding_window": True, "sliding_window": 128}, "sliding"),
        ({"layer_types": 5}, "config"),
        ({"eos_token_id": "1"}, "eos_token_id"),
    ],
)
def test_configs_that_are_refused(changes, message, single, tmp_path):
    edit_json(single / "config.json", **changes)
    assert message in refused(single, tmp_path)


@pytest.mark.parametrize("part", [0, 0.01, 0.5])
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
def test_truncated_files(name, part, single, tmp_path):
    data = (single / name).read_bytes()
    (single / name).write_bytes(data[: int(part * len(data))])
    assert name in refused(single, tmp_path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": ' * 100_000, '{"hidden_size": 1' + "0" * 5000 + "}", "null", "\xff"]
)
def test_hostile_json(text, single, tmp_path):
    (single / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json" in refused(single, tmp_path)


def test_one_rope_whatever_its_spelling(single, tmp_path):
    edit_json(single / "config.json", rope_parameters=..., rope_theta=5e5)
    top = HFDirectory(single)
    convert(single, tmp_path / "top", progress=False)
    edit_json(single / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rope_theta=...)
    convert(single, tmp_path / "parameters", progress=False)
    edit_json(single / "config.json", rope_parameters=..., rope_theta=5e5, rope_scaling={"type": "default"})
    convert(single, tmp_path / "scaling", progress=False)
    ropes = {load(tmp_path / name).config.rope for name in ("top", "parameters", "scaling")}
    assert len(ropes) == 1
    assert ropes.pop().theta == 5e5 == top.config["rope_theta"]
    edit_json(single / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 1e4}, rope_theta=5e5)
    with pytest.raises(ConversionError, match="rope_theta more than once and differently"):
        convert(single, tmp_path / "both", progress=False)


def test_model_without_tokenizer(single, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (single / name).unlink()
    report = convert(single, tmp_path / "out", progress=False)
    assert report.tokenizer == []
    assert load(tmp_path / "out").tokenizer is None


def test_what_is_no_checkpoint(tmp_path, single, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConversionError, match=r"cannot read .*: No such file or directory"):
        open_source(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConversionError, match=r"config.json: No such file"):
        open_source(tmp_path / "empty")
    with pytest.raises(ConversionError, match="give the directory"):
        open_source(single / "model.safetensors")
    with pytest.raises(ConversionError, match="not a GGUF file"):
        open_source(single / "config.json")
    (single / "model.safetensors").rename(single / "model.gguf")
    with pytest.raises(ConversionError, match=r"give the GGUF file itself: .*model.gguf"):
        open_source(single)


def test_source_is_a_converted_checkpoint(single, tmp_path):
    convert(single, tmp_path / "out", progress=False)
    with pytest.raises(ConversionError, match="already converted"):
        convert(tmp_path / "out", tmp_path / "again", progress=False)
