"""Reading Hugging Face configs: one answer wherever a setting stands, and a ValueError that names what is wrong."""

import copy

import jax
import numpy as np
import pytest

from jaxspec.models import config_from_hf, leaf_sources, param_shapes, supported_model_types
from jaxspec.models.rope import inverse_frequencies
from tests.reference import tiny_config

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def family_config(family, **overrides):
    # a Mistral config that does not mention its sliding window has one
    extra = {"sliding_window": None} if family == "mistral" else {}
    return tiny_config(family, **extra, **overrides)


def test_supported_families():
    assert sorted(supported_model_types()) == sorted(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_leaves_are_those_of_the_decoder(family):
    """A family's leaves have the paths and shapes of the decoder's parameters, biases and norms included."""
    config = config_from_hf(family_config(family, head_dim=10, attention_bias=True, mlp_bias=True))
    leaves = jax.tree_util.tree_flatten_with_path(param_shapes(config))[0]
    assert {tuple(key.key for key in path) for path, _ in leaves} == set(leaf_sources(config))


PLACES = {
    "rope_parameters": lambda base, scaling: {"rope_parameters": {"rope_theta": base, **scaling}},
    "rope_scaling and top level": lambda base, scaling: {"rope_theta": base, "rope_scaling": scaling},
    "rope_scaling": lambda base, scaling: {"rope_scaling": {"rope_theta": base, **scaling}},
    "the old name of the type": lambda base, scaling: {
        "rope_theta": base,
        "rope_scaling": {"type" if k == "rope_type" else k: v for k, v in scaling.items()},
    },
    "everywhere": lambda base, scaling: {
        "rope_theta": base,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": base, **scaling},
    },
    "nulls beside it": lambda base, scaling: {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": base, **scaling, "attention_factor": None},
    },
}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("rope_type", ["default", "linear", "dynamic", "llama3", "yarn"])
def test_rope_settings_read_alike_wherever_they_stand(family, rope_type):
    scaling = {"linear": {"factor": 2.0}, "dynamic": {"factor": 2.0}, "llama3": LLAMA3, "yarn": YARN}
    scaling = {"rope_type": rope_type, **scaling.get(rope_type, {})}
    found = {
        name: config_from_hf(tiny_config(family, **place(250_000.0, scaling))).rope for name, place in PLACES.items()
    }
    assert found["rope_parameters"].theta == 250_000.0
    assert found["rope_parameters"].rope_type == rope_type
    assert set(found.values()) == {found["rope_parameters"]}, found


def test_rope_base_alone():
    expected = config_from_hf(tiny_config(rope_theta=5e5)).rope
    assert expected.theta == 5e5
    assert config_from_hf(tiny_config(rope_parameters={"rope_theta": 5e5})).rope == expected
    assert config_from_hf(tiny_config(rope_parameters={"rope_theta": 5e5, "rope_type": "default"})).rope == expected
    assert config_from_hf(tiny_config(rope_theta=500_000, rope_scaling={"rope_type": "default"})).rope == expected
    assert config_from_hf(tiny_config()).rope.theta == 10_000


def test_capacity_limit():
    """dynamic rope changes its base beyond the model's positions; other types stop at them."""
    for scaling in ({"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}):
        config = config_from_hf(tiny_config(rope_scaling=scaling, max_position_embeddings=200))
        assert config.capacity_limit == 200


REJECTED = {
    "model type": ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: llama"),
    "no model type": ({"model_type": None}, "model_type None"),
    "rope base twice": ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta more than"),
    "rope base in rope_scaling": (
        {"rope_theta": 1e4, "rope_scaling": {"rope_theta": 2e4}},
        "rope_theta more than once",
    ),
    "rope type twice": (
        {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
        "rope_type more than",
    ),
    "factor twice": (
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 4.0},
        },
        "factor more than once",
    ),
    "original positions twice": (
        {"original_max_position_embeddings": 256, "rope_scaling": {"rope_type": "yarn", **YARN}},
        "original_max_position_embeddings more than once",
    ),
    "longrope": ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not supported"),
    "mrope": ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "rope type 'mrope' is not supported"),
    "rope type is a list": ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope type"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "partial rotary, new place": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    "rope by layer type": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}},
        "differs by layer type",
    ),
    "rope is a string": ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
    "rope base zero": ({"rope_theta": 0}, "rope_theta"),
    "rope base infinite": ({"rope_theta": float("inf")}, "rope_theta"),
    "rope base is text": ({"rope_theta": "10000"}, "rope_theta"),
    "rope base true": ({"rope_theta": True}, "rope_theta"),
    "linear without factor": ({"rope_scaling": {"type": "linear"}}, "needs factor"),
    "yarn without factor": ({"rope_scaling": {"type": "yarn"}}, "needs factor"),
    "yarn with factor null": ({"rope_scaling": {"type": "yarn", "factor": None}}, "needs factor"),
    "llama3 without factors": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    "llama3 factors swapped": (
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
        "low_freq_factor < high_freq_factor",
    ),
    "yarn original of the wrong type": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": "128"}},
        "original_max_position_embeddings",
    ),
    "yarn original true": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": True}},
        "original_max_position_embeddings",
    ),
    "yarn attention factor": ({"rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": "x"}}, "attention_f"),
    "yarn attention factor a list": (
        {"rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": [1]}},
        "attention_factor",
    ),
    "yarn mscale": ({"rope_scaling": {"rope_type": "yarn", **YARN, "mscale": "1", "mscale_all_dim": 1.0}}, "mscale"),
    "yarn betas swapped": (
        {"rope_scaling": {"rope_type": "yarn", **YARN, "beta_fast": 1.0, "beta_slow": 32.0}},
        "beta_slow <= beta_fast",
    ),
    "yarn truncate": ({"rope_scaling": {"rope_type": "yarn", **YARN, "truncate": "no"}}, "truncate"),
    "yarn base 1": ({"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", **YARN}}, "rope_theta"),
    "mixture of experts": ({"num_local_experts": 8}, "mixture-of-experts.*num_local_experts = 8"),
    "qwen experts": ({"num_experts": 64}, "mixture-of-experts"),
    "sinks": ({"attention_sinks": True}, "attention_sinks"),
    "soft cap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "chunked attention": ({"attention_chunk_size": 8192}, "attention_chunk_size"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
    "activation": ({"hidden_act": "gelu"}, "activation 'gelu' is not supported; supported: silu"),
    "layers without rope": ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
    "no_rope_layers is a number": ({"no_rope_layers": 4}, "no_rope_layers"),
    "layer types": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "sliding_attention.*not supported; supported: full",
    ),
    "layer types malformed": ({"layer_types": 3}, "layer_types"),
    "layer types of lists": ({"layer_types": [["full_attention"]]}, "layer"),
    "sliding window": ({"sliding_window": 128}, "sliding_window = 128 is in use"),
    "head_dim odd": ({"head_dim": 7}, "head_dim must be even"),
    "head_dim missing and not whole": ({"head_dim": None, "hidden_size": 50}, "hidden_size 50"),
    "heads": ({"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple of num_key_value_heads 4"),
    "hidden_size missing": ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
    "hidden_size text": ({"hidden_size": "48"}, "hidden_size must be a positive integer"),
    "hidden_size float": ({"hidden_size": 48.0}, "hidden_size must be a positive integer"),
    "layers 0": ({"num_hidden_layers": 0}, "num_hidden_layers"),
    "layers true": ({"num_hidden_layers": True}, "num_hidden_layers"),
    "vocabulary huge": ({"vocab_size": 2**31}, "vocab_size"),
    "eps 0": ({"rms_norm_eps": 0}, "rms_norm_eps"),
    "eps text": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
    "eps nan": ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    "eps null": ({"rms_norm_eps": None}, "rms_norm_eps"),
    "bias": ({"attention_bias": "true"}, "attention_bias must be true or false"),
    "bias a number": ({"attention_bias": 1}, "attention_bias must be true or false"),
    "tied": ({"tie_word_embeddings": [True]}, "tie_word_embeddings must be true or false"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_rejected(case):
    overrides, message = REJECTED[case]
    with pytest.raises(ValueError, match=message):
        config_from_hf({**tiny_config(), **overrides})


@pytest.mark.parametrize("value", [None, [], "llama", 3])
def test_config_is_no_object(value):
    with pytest.raises(ValueError, match="JSON object"):
        config_from_hf(value)


def test_sliding_windows():
    """Set and unused is fine; in use it raises. What a config does not say is what transformers assumes."""
    for family in ("qwen2", "qwen3"):
        config_from_hf(tiny_config(family, sliding_window=128))
        config_from_hf(tiny_config(family, sliding_window=128, use_sliding_window=False))
        with pytest.raises(ValueError, match="sliding_window = 128 is in use"):
            config_from_hf(tiny_config(family, sliding_window=128, use_sliding_window=True))
    config_from_hf(tiny_config("mistral", sliding_window=None))
    with pytest.raises(ValueError, match="sliding_window = 4096 is in use"):
        config_from_hf(tiny_config("mistral"))


DAMAGE = [None, True, -1, 0, 0.5, float("nan"), "x", [], [3], {}, {"a": {}}, 10**30, 10**400]


@pytest.mark.parametrize("family", FAMILIES)
def test_malformed_fields_never_crash(family):
    """Every field replaced by every kind of wrong value, also inside the rope settings: a config or a ValueError."""
    switches = ("attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "layer_types", "no_rope_layers")
    base = family_config(family, rope_scaling={"rope_type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 1.0})
    base |= {name: base.get(name) for name in switches} | {"num_local_experts": None, "rope_theta": 1e4}
    for name in base:
        for value in DAMAGE:
            _reads_or_raises({**base, name: value})
    for name in (*base["rope_scaling"], "beta_fast", "beta_slow", "truncate", "attention_factor"):
        for value in DAMAGE:
            damaged = copy.deepcopy(base)
            damaged["rope_scaling"][name] = value
            _reads_or_raises(damaged)


def _reads_or_raises(hf):
    try:
        config = config_from_hf(hf)
    except ValueError:
        return
    hash(config)
    if config.head_dim < 1000:
        assert np.all(np.isfinite(inverse_frequencies(config.rope, config.head_dim)))
