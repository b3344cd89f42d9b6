"""Converted models compute what transformers computes: whole forwards and cached decoding, every family and switch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert import convert
from jaxspec.checkpoint import load
from jaxspec.models import init_cache
from tests.convert.gguf_writing import write_gguf

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}

CASES = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, odd group, head_dim 10": (
        "llama",
        {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 10},
    ),
    "llama, rope llama3": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "llama, rope linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "qwen2": ("qwen2", {"hidden_size": 48, "head_dim": 8}),
    "qwen2, tied, yarn": ("qwen2", {"tie_word_embeddings": True, "rope_scaling": YARN, "head_dim": 8}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
}
TOKENS = np.random.default_rng(0).integers(0, 384, 40)


def assert_equal_logits(loaded, model, atol=1e-4):
    with torch.inference_mode():
        expected = model(torch.tensor(TOKENS[None])).logits[0].float().numpy()
    assert expected.std() > 0.1  # a model whose logits are all alike would hide everything
    ids, cache = jnp.array(TOKENS[None]), init_cache(loaded.config, 1, 64, jnp.float32)
    forward = jax.jit(lambda ids, cache, start: loaded.model.apply({"params": loaded.params}, ids, cache, start))
    out = forward(ids, cache, jnp.zeros(1, jnp.int32))
    np.testing.assert_allclose(out.logits[0], expected, atol=atol, rtol=0)
    # the last rows again, over the cache that the forward left: they are overwritten in place
    for i in range(37, 40):
        out = forward(ids[:, i : i + 1], out.cache, jnp.full(1, i, jnp.int32))
        np.testing.assert_allclose(out.logits[0, 0], expected[i], atol=atol, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_hugging_face_directory(case, tiny, tmp_path):
    family, overrides = CASES[case]
    directory, model = tiny(family, **overrides)
    report = convert(directory, tmp_path / "out", progress=False)
    assert report.dtype == "float32"
    assert_equal_logits(load(tmp_path / "out"), model)


@pytest.mark.parametrize("case", [c for c in CASES if c not in ("llama, rope linear", "qwen3, tied")])
def test_gguf(case, tiny, tmp_path):
    family, overrides = CASES[case]
    directory, model = tiny(family, **overrides)
    write_gguf(tmp_path / "model.gguf", directory)
    convert(tmp_path / "model.gguf", tmp_path / "out", progress=False)
    assert_equal_logits(load(tmp_path / "out"), model)


def test_many_shards(tiny, tmp_path):
    directory, model = tiny("qwen2", save={"max_shard_size": "30KB"})
    assert len(list(directory.glob("*.safetensors"))) > 3
    report = convert(directory, tmp_path / "out", progress=False)
    assert report.num_tensors == len(model.state_dict())
    assert_equal_logits(load(tmp_path / "out"), model)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights_are_kept_bit_for_bit(dtype, tiny, tmp_path):
    directory, model = tiny("llama", dtype=dtype)
    report = convert(directory, tmp_path / "out", progress=False)
    assert report.dtype == dtype
    loaded = load(tmp_path / "out")
    assert loaded.params["embedding"].dtype == dtype
    assert_equal_logits(load(tmp_path / "out", dtype="float32"), model)


def test_target_dtype_rounds_to_nearest(tiny, tmp_path):
    directory, model = tiny("llama")
    convert(directory, tmp_path / "out", dtype="bfloat16", progress=False)
    embedding = load(tmp_path / "out").params["embedding"]
    expected = model.model.embed_tokens.weight.detach().to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(np.asarray(embedding, np.float32), expected)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_gguf_weight_types(kind, tiny, tmp_path):
    directory, _ = tiny("llama", hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16)
    write_gguf(tmp_path / "model.gguf", directory, kind)
    report = convert(tmp_path / "model.gguf", tmp_path / "out", progress=False)
    assert report.dtype == ("float16" if kind == "F16" else "bfloat16")
    exact = convert(directory, tmp_path / "exact", progress=False)
    assert exact.num_leaves == report.num_leaves
    ours, expected = load(tmp_path / "out", dtype="float32").params, load(tmp_path / "exact").params
    for layer in ("layers_0", "layers_1"):
        a, b = ours[layer]["attention"]["qkv"]["kernel"], expected[layer]["attention"]["qkv"]["kernel"]
        np.testing.assert_allclose(a, b, atol=0.02)
