"""Configs rebuilt from GGUF metadata, and GGUF models end to end where the metadata is unusual."""

import json

import gguf
import numpy as np
import pytest
import torch

from convert import ConversionError, convert
from convert.gguf_config import hf_config
from convert.gguf_file import GGUFFile
from convert.gguf_source import GGUFSource
from convert.gguf_tokenizer import eos_token_ids, write_tokenizer
from jaxspec.checkpoint import load
from jaxspec.models import config_from_hf
from jaxspec.models.rope import inverse_frequencies
from tests.convert.gguf_writing import write_gguf

UINT32, FLOAT32, STRING = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.STRING
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.fixture
def make(tiny, tmp_path):
    def write(family="llama", model=None, **metadata):
        directory, _ = tiny(family, **(model or {}))
        write_gguf(tmp_path / "model.gguf", directory, **metadata)
        return tmp_path / "model.gguf"

    return write


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_config_equals_the_original(family, tied, make, tiny):
    model = {"tie_word_embeddings": tied, "head_dim": 8}
    directory, _ = tiny(family, **model)
    original = config_from_hf(json.loads((directory / "config.json").read_text()))
    assert config_from_hf(GGUFSource(make(family, model)).config) == original


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_llama3_scaling_is_found_from_its_factors(factor, theta, make, tiny):
    scaling = {"rope_type": "llama3", "factor": factor, **LLAMA3}
    model = {"rope_scaling": scaling, "rope_theta": theta, "head_dim": 64}
    rope = config_from_hf(GGUFSource(make("llama", model)).config).rope
    assert (rope.rope_type, rope.factor, rope.theta) == ("llama3", factor, theta)
    expected = tiny("llama", **model)[1].model.rotary_emb.inv_freq.numpy()
    np.testing.assert_allclose(inverse_frequencies(rope, 64), expected, rtol=2e-6)


def test_other_frequency_factors_are_refused(make, monkeypatch):
    factors = np.linspace(1, 8, 4, dtype=np.float32)
    monkeypatch.setattr("tests.convert.gguf_writing.llama3_factors", lambda directory: factors)
    scaling = {"rope_type": "llama3", "factor": 8.0, **LLAMA3}
    with pytest.raises(ConversionError, match=r"rope_freqs.weight holds frequency factors"):
        GGUFSource(make("llama", {"rope_scaling": scaling}))


def test_linear_and_yarn_scaling(make, tiny):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    for scaling in (yarn, {"rope_type": "linear", "factor": 2.0}):
        model = {"rope_scaling": scaling, "head_dim": 8}
        rope = config_from_hf(GGUFSource(make("qwen2", model)).config).rope
        reference = tiny("qwen2", **model)[1].model.rotary_emb
        np.testing.assert_allclose(inverse_frequencies(rope, 8), reference.inv_freq.numpy(), rtol=2e-6)
        assert rope.attention_factor == pytest.approx(reference.attention_scaling)


def test_old_spelling_of_linear_scaling(make):
    source = GGUFSource(make(llama__rope__scale_linear=(4.0, FLOAT32)))
    assert source.config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama__expert_count": (8, UINT32)}, "llama.expert_count = 8 is not supported"),
        ({"llama__attention__sliding_window": (512, UINT32)}, "llama.attention.sliding_window = 512"),
        ({"llama__logit_scale": (0.5, FLOAT32)}, "does not know and that may change the model: llama.logit_scale"),
        ({"llama__rope__scaling__type": ("longrope", STRING)}, "'longrope'; supported: none, linear, yarn"),
        ({"llama__rope__dimension_count": (4, UINT32)}, "rope.dimension_count is 4, the heads have 8 dimensions"),
        ({"split__count": (3, UINT32)}, "one part of a split GGUF file"),
        ({"llama__vocab_size": (7, UINT32)}, "vocab_size is 7, token_embd.weight has 384 rows"),
    ],
)
def test_metadata_that_is_refused(metadata, message, make):
    with pytest.raises(ConversionError) as caught:
        GGUFSource(make(**metadata))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"general.architecture", b"general.architecturf"),
        (b"llama.block_count", b"llama.block_counu"),
        (b"llama.context_length", b"llama.context_lengti"),
        (b"llama.attention.layer_norm_rms_epsilon", b"llama.attention.layer_norm_rms_epsilom"),
        (b"token_embd.weight", b"token_embd.weighu"),
        (b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz"),
    ],
)
def test_missing_metadata(key, value, make):
    path = make()
    data = path.read_bytes()
    assert data.count(key) == 1
    path.write_bytes(data.replace(key, value))
    with pytest.raises(ConversionError):
        GGUFSource(path)


def test_architecture_that_is_refused(make):
    path = make()
    path.write_bytes(path.read_bytes().replace(b"llama", b"gemma"))
    with pytest.raises(ConversionError, match="architecture 'gemma' is not supported; supported: llama, qwen2, qwen3"):
        GGUFSource(path)


def test_unknown_tensors_are_reported(make, tmp_path):
    path = make()
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_down", b"blk.1.ffn_dowm"))
    with pytest.raises(ConversionError) as caught:
        convert(path, tmp_path / "out", progress=False)
    assert "missing tensors: model.layers.1.mlp.down_proj.weight" in str(caught.value)
    assert "unexpected tensors: blk.1.ffn_dowm.weight" in str(caught.value)


def test_ropes_are_not_permuted_outside_llama(tiny, make):
    """llama.cpp reorders the rows of q and k for llama only."""
    for family in ("qwen2", "qwen3", "llama"):
        _, model = tiny(family, head_dim=8)
        source = GGUFSource(make(family, {"head_dim": 8}))
        for name in ("q_proj", "k_proj"):
            name = f"model.layers.1.self_attn.{name}.weight"
            expected = model.state_dict()[name].numpy()
            np.testing.assert_array_equal(source.read(name, np.dtype(np.float32)), expected)


def test_values_of_any_type(make, tmp_path):
    """Every metadata value replaced by values of other types: refused, or read into a config that stands."""
    path = make(tokenizer__chat_template=("{{ messages }}", STRING))
    file = GGUFFile(path)
    original = dict(file.metadata)
    values = (None, True, -1, 0, 3, 2**63, np.float32("nan"), np.float32(0.5), "", "x", [], [1], ["a"], [True], 1e300)
    refused = 0
    for key in original:
        for value in values:
            file.metadata = original | {key: value}
            if value is None:
                del file.metadata[key]
            try:
                config_from_hf(hf_config(file))
                eos_token_ids(file)
                write_tokenizer(file, tmp_path)
            except ValueError:  # of which ConversionError is one
                refused += 1
    assert refused > 3 * len(original)


@pytest.mark.weights
@pytest.mark.parametrize("name", ["smollm2.gguf", "qwen-0.5b.gguf"])
def test_real_weights_equal_transformers_own_reading(name, gguf_weights):
    """transformers renames and reorders GGUF tensors by itself."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = GGUFSource(gguf_weights(name))
    values = {k: v for k, v in source.config.items() if k != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(source.config["model_type"], **values))
    expected = load_gguf_checkpoint(gguf_weights(name), return_tensors=True, model_to_load=model)["tensors"]
    assert source.tensors.keys() == expected.keys()
    for tensor in source.tensors:
        actual = source.read(tensor, np.dtype(np.float32))
        np.testing.assert_array_equal(actual, expected[tensor].numpy(), err_msg=tensor)


@pytest.mark.weights
def test_real_conversion(gguf_weights, tmp_path):
    report = convert(gguf_weights("smollm2.gguf"), tmp_path / "out", progress=False)
    assert (report.dtype, report.num_parameters) == ("bfloat16", 134_515_008)
    loaded = load(tmp_path / "out")
    assert loaded.eos_ids == (0, 2)
    assert loaded.config.tie_word_embeddings
