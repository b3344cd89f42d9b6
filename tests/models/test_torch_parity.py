"""The decoder equals PyTorch's models: module by module, whole, and over a cache.

float32: logits are of order 10 and agree within 1e-4, a tenth of a millionth of which is one rounding (2^-24 * 10).
bfloat16 and float16: see `test_reduced_precision`.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import Decoder, config_from_hf, init_cache
from jaxspec.models.layers import MLP, Attention, Block, RMSNorm
from jaxspec.models.rope import rope_tables
from jaxspec.types import Collect
from tests import reference
from tests.reference import jax_model, random_weights, tiny_config, torch_model

torch = pytest.importorskip("torch")

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 64
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}

CASES = {
    "llama": tiny_config(),
    "llama, G=1, tied": tiny_config(num_key_value_heads=6, tie_word_embeddings=True),
    "llama, G=5, wide heads": tiny_config(hidden_size=40, num_attention_heads=5, num_key_value_heads=1, head_dim=18),
    "llama, attention bias": tiny_config(attention_bias=True),
    "llama, mlp bias, tied": tiny_config(mlp_bias=True, tie_word_embeddings=True),
    "llama, both biases, G=7": tiny_config(
        attention_bias=True, mlp_bias=True, hidden_size=56, num_attention_heads=14, num_key_value_heads=2, head_dim=4
    ),
    "mistral": tiny_config("mistral", sliding_window=None, rope_theta=1e6),
    "qwen2": tiny_config("qwen2", rope_theta=1e6),
    "qwen2, G=7, tied": tiny_config(
        "qwen2", hidden_size=56, num_attention_heads=7, num_key_value_heads=1, tie_word_embeddings=True
    ),
    "qwen3": tiny_config("qwen3", head_dim=16),
    "qwen3, G=5, hidden no multiple of heads, tied, bias": tiny_config(
        "qwen3", num_attention_heads=10, num_key_value_heads=2, tie_word_embeddings=True, attention_bias=True
    ),
    "rope linear": tiny_config(num_hidden_layers=1, rope_scaling={"type": "linear", "factor": 2.5}),
    "rope dynamic": tiny_config(num_hidden_layers=1, rope_scaling={"type": "dynamic", "factor": 4.0}),
    "rope llama3": tiny_config(num_hidden_layers=1, rope_parameters={"rope_theta": 5e5, **LLAMA3}),
    "rope yarn": tiny_config("qwen2", rope_scaling=YARN),
    "rope yarn, mscale": tiny_config(
        "qwen3", num_hidden_layers=1, rope_scaling={**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}
    ),
}
BATCH, LENGTH, CAPACITY = 2, 24, 40
MODULE_CASES = ["llama", "llama, both biases, G=7", "qwen2", "qwen3", "rope yarn"]


@pytest.fixture(scope="module")
def pair():
    """`pair(case)`: config dict, model under test with parameters, and the PyTorch model."""
    made = {}

    def make(case):
        if case not in made:
            weights = random_weights(CASES[case], seed=len(case))
            made[case] = CASES[case], *jax_model(CASES[case], weights), torch_model(CASES[case], weights)
        return made[case]

    return make


def forward(model, params):
    @jax.jit
    def run(tokens, cache, start):
        out = model.apply({"params": params}, tokens, cache, start)
        return out.logits, out.cache

    return run


def random_tokens(shape, vocab=61, seed=0):
    return np.random.default_rng(seed).integers(0, vocab, shape).astype(np.int32)


def torch_logits(model, tokens):
    with torch.inference_mode():
        return model(torch.tensor(tokens)).logits.float().numpy()


@pytest.mark.parametrize("case", CASES)
def test_cached_logits(case, pair):
    """Three calls of 12 tokens over one cache; the second row lags six tokens behind, so that starts are ragged."""
    _, model, params, torch_reference = pair(case)
    tokens = random_tokens((BATCH, LENGTH))
    expected = torch_logits(torch_reference, tokens)
    assert 3 < np.abs(expected).max() < 40
    run = forward(model, params)
    cache = jax.tree.map(lambda x: x + 1e4, init_cache(model.config, BATCH, CAPACITY, jnp.float32))
    for start in ([0, 0], [12, 6], [12, 12]):
        places = np.array(start)[:, None] + np.arange(12)
        logits, cache = run(np.take_along_axis(tokens, places, axis=1), cache, jnp.array(start, jnp.int32))
        chunk = np.take_along_axis(expected, places[..., None], axis=1)
        chex.assert_trees_all_close(np.asarray(logits), chunk, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["llama, both biases, G=7", "qwen3"])
def test_whole_and_any_chunks(case, pair):
    """One call, and calls of 1, 7, 15 and 1 tokens at a start that the rows share."""
    _, model, params, torch_reference = pair(case)
    tokens = random_tokens((BATCH, LENGTH), seed=1)
    expected = torch_logits(torch_reference, tokens)
    run = forward(model, params)
    for chunks in ((LENGTH,), (1, 7, 15, 1)):
        cache, at = init_cache(model.config, BATCH, CAPACITY, jnp.float32), 0
        for size in chunks:
            logits, cache = run(tokens[:, at : at + size], cache, jnp.int32(at))
            chex.assert_trees_all_close(np.asarray(logits), expected[:, at : at + size], atol=1e-4, rtol=0)
            at += size


@pytest.mark.parametrize("case", MODULE_CASES)
def test_modules(case, pair):
    _, model, params, torch_reference = pair(case)
    c = model.config
    x = np.random.default_rng(2).normal(size=(BATCH, 6, c.hidden_size)).astype(np.float32)
    positions = np.arange(6)

    @jax.jit
    def ours(x):
        p = params["layers_1"]
        cache = init_cache(c, BATCH, 8, jnp.float32)[0]
        tables = rope_tables(c.rope, c.head_dim, jnp.broadcast_to(positions, (BATCH, 6)))
        start = jnp.zeros(BATCH, jnp.int32)
        options = cache, start, start, tables, None, Collect()
        block = Block(c, 1, "xla")
        attended = block.apply({"params": p}, 0.25 * x, 0.75 * x, *options, method="attend")[:2]
        return {
            "norm": RMSNorm(c.hidden_size, c.rms_norm_eps).apply({"params": p["attention_norm"]}, 3 * x, 4 * x)[1],
            "mlp": MLP(c).apply({"params": p["mlp"]}, x),
            "attention": Attention(c, 1, "xla").apply({"params": p["attention"]}, x, *options)[0],
            "block": sum(block.apply({"params": p}, *attended, method="feed_forward")),
            "head": model.apply({"params": params}, x, method="logits"),
        }

    with torch.inference_mode():
        layer, tx = torch_reference.model.layers[1], torch.tensor(x)
        rope = torch_reference.model.rotary_emb(tx, torch.tensor(positions)[None])
        causal = torch.full((6, 6), float("-inf")).triu(1)[None, None]
        theirs = {
            "norm": layer.input_layernorm(7 * tx),
            "mlp": layer.mlp(tx),
            "attention": layer.self_attn(tx, position_embeddings=rope, attention_mask=causal)[0],
            "block": layer(tx, position_embeddings=rope, attention_mask=causal),
            "head": torch_reference.lm_head(torch_reference.model.norm(tx)),
        }
    theirs = {name: value.numpy() for name, value in theirs.items()}
    chex.assert_trees_all_close(jax.device_get(ours(x)), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [("llama, both biases, G=7", "bfloat16"), ("qwen2", "bfloat16"), ("qwen3", "bfloat16"), ("qwen3", "float16")],
)
def test_reduced_precision(case, dtype):
    """Bound: with u the unit roundoff (2^-8, 2^-11), every value written to the residual stream or handed from one
    operation to the next is off by up to u relative, about 11 of them a layer; independent errors add up to
    sqrt(2 * 11) * u / sqrt(3) = 2.7 u of the logits' spread, the largest of 3,000 logits is off by four times that, and
    softmax and silu amplify up to threefold: 33 u. PyTorch rounds in as many places, so its own error is a second
    bound: ours may not be larger than 1.25 times PyTorch's."""
    hf = CASES[case]
    exact_weights = random_weights(hf, seed=len(case))
    weights = {name: w.astype(jnp.dtype(dtype)).astype(np.float32) for name, w in exact_weights.items()}
    tokens = random_tokens((BATCH, LENGTH))
    exact = torch_logits(torch_model(hf, weights), tokens)
    theirs = torch_logits(torch_model(hf, weights, dtype), tokens)
    model, params = jax_model(hf, weights, dtype)
    cache = init_cache(model.config, BATCH, CAPACITY, dtype)
    ours, cache = forward(model, params)(tokens, cache, jnp.zeros(BATCH, jnp.int32))
    assert ours.dtype == jnp.float32
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(cache))
    roundoff = {"bfloat16": 2**-8, "float16": 2**-11}[dtype]
    np.testing.assert_allclose(ours, exact, atol=33 * roundoff * exact.std(), rtol=0)
    ours_error, their_error = (np.sqrt(np.mean((x - exact) ** 2)) for x in (np.asarray(ours), theirs))
    assert ours_error <= 1.25 * their_error, (ours_error, their_error)

    # a decode step takes other products than a prefill does: those of few rows
    kernels = Decoder(model.config, backend="interpret")
    start = jnp.full(BATCH, LENGTH - 1, jnp.int32)
    last, _ = forward(kernels, params)(tokens[:, -1:], cache, start)
    np.testing.assert_allclose(last, exact[:, -1:], atol=33 * roundoff * exact.std(), rtol=0)


@pytest.mark.parametrize("case", ["llama, both biases, G=7", "qwen2, G=7, tied", "qwen3"])
def test_numpy_reference_equals_pytorch(case, pair):
    """Ties the reference of the forward's options to PyTorch: logits, attention and the residual stream."""
    hf, _, _, torch_reference = pair(case)
    weights = random_weights(hf, seed=len(case))
    tokens = random_tokens(LENGTH, seed=3)
    between = []
    hooks = [
        layer.post_attention_layernorm.register_forward_pre_hook(lambda _, args: between.append(args[0][0].numpy()))
        for layer in torch_reference.model.layers
    ]
    with torch.inference_mode():
        out = torch_reference(torch.tensor(tokens[None]), output_attentions=True, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    trace = reference.decoder(hf, weights, tokens)
    np.testing.assert_allclose(trace.logits, out.logits[0], atol=1e-4)
    np.testing.assert_allclose(trace.attention, torch.stack(out.attentions)[:, 0], atol=1e-5)
    np.testing.assert_allclose(trace.hidden[1::2], between, atol=1e-4)
    # transformers norms the last of its hidden states
    np.testing.assert_allclose(trace.hidden[:-1:2], torch.stack(out.hidden_states[:-1])[:, 0], atol=1e-4)


ROPE_CASES = {
    "default": {"rope_theta": 1e4},
    "default, large base": {"rope_theta": 5e6},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama3.1": {
        "rope_theta": 5e5,
        "rope_scaling": {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192},
    },
    "llama3.2": {
        "rope_theta": 5e5,
        "rope_scaling": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
    },
    "qwen2.5 yarn": {
        "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "yarn, not truncated": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "rope_theta": 1.5e5,
    },
    "yarn, betas": {"rope_scaling": {"rope_type": "yarn", "factor": 16.0, "beta_fast": 24, "beta_slow": 2}},
    "yarn, attention factor": {"rope_scaling": {"rope_type": "yarn", "factor": 16.0, "attention_factor": 0.8}},
    "yarn, mscale": {
        "rope_scaling": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0},
    },
    "yarn, one mscale is ignored": {"rope_scaling": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.5}},
    "yarn, factor 1": {"rope_scaling": {"rope_type": "yarn", "factor": 1.0}},
    "yarn, narrow ramp": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 1.0,
            "original_max_position_embeddings": 4096,
        }
    },
}


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("case", ROPE_CASES)
def test_rope_tables(case, head_dim):
    """At 0, 1k, 8k, 60k and 130k. An angle is position * frequency in float32: the frequencies may differ by two units
    in the last place (one for the power, one for the division) and the product rounds once more, 2^-22 of the angle
    at most; cosine and sine add a unit each. llama3's smoothing between its two wavelengths magnifies a relative
    difference of the frequencies by up to 1 + (factor - 1) * low / (high - low)."""
    hf = tiny_config(num_hidden_layers=1, head_dim=head_dim, max_position_embeddings=131072, **ROPE_CASES[case])
    c = config_from_hf(hf)
    rotary = torch_model(hf, random_weights(hf)).model.rotary_emb
    positions = np.array([0, 1_000, 8_000, 60_000, 130_000])
    expected = rotary(torch.zeros(1), torch.tensor(positions[None]))
    low, high = c.rope.low_freq_factor, c.rope.high_freq_factor
    magnified = 1 + (c.rope.factor - 1) * low / (high - low) if c.rope.rope_type == "llama3" else 1
    angles = positions[:, None] * rotary.inv_freq.numpy()
    bound = rotary.attention_scaling * (magnified * angles + 1) * 2**-22
    ours = rope_tables(c.rope, head_dim, jnp.asarray(positions, jnp.int32))
    for table, reference_table in zip(ours, expected, strict=True):
        difference = np.abs(np.asarray(table) - reference_table[0, :, : head_dim // 2].numpy())
        assert np.all(difference <= bound), (difference / bound).max()
    assert expected[0].shape[-1] == head_dim
