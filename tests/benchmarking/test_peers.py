"""benchmarks/peers.py: transformers gets the very weights, and a run records every method and peer."""

import json
import os
import subprocess
import sys
from functools import reduce
from operator import getitem
from pathlib import Path

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import init_cache
from tests.reference import tiny_model

torch = pytest.importorskip("torch")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3 rope, tied": (
        "llama",
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16}, "tie_word_embeddings": True},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2, yarn": ("qwen2", {"rope_scaling": YARN}),
    "qwen3": ("qwen3", {"head_dim": 16, "attention_bias": True}),
}


@pytest.fixture
def peers_transformers(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import peers_transformers

    return peers_transformers


@pytest.mark.parametrize("name", MODELS)
def test_same_logits_from_the_same_weights(name, peers_transformers):
    family, overrides = MODELS[name]
    model, params = tiny_model(family, **overrides)
    theirs = peers_transformers.build(
        model.config, lambda path: torch.from_numpy(np.array(reduce(getitem, path, params)))
    )
    assert theirs.config._attn_implementation == "sdpa"
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, 24))
    cache = init_cache(model.config, 1, 24, jnp.float32)
    ours = model.apply({"params": params}, jnp.asarray(prompt, jnp.int32), cache, jnp.zeros(1, jnp.int32)).logits
    with torch.inference_mode():
        expected = theirs(torch.from_numpy(prompt)).logits.numpy()
    chex.assert_trees_all_close(np.asarray(ours), expected, atol=1e-4, rtol=0)
    agreement = peers_transformers.compare(theirs, prompt, np.asarray(ours[0]))
    assert agreement["root_mean_square"] < agreement["limit"]
    assert agreement["max_abs"] < 1e-4


def test_other_weights_exceed_the_limit(peers_transformers):
    model, params = tiny_model("qwen2")
    for dtype in (torch.float32, torch.bfloat16):
        theirs = peers_transformers.build(
            model.config, lambda path, dtype=dtype: torch.from_numpy(np.array(reduce(getitem, path, params))).to(dtype)
        )
        prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, 24))
        with torch.inference_mode():
            expected = theirs(torch.from_numpy(prompt)).logits[0].float().numpy()
            attention = theirs.model.layers[0].self_attn
            attention.q_proj.weight.copy_(attention.q_proj.weight.flip(0))
        agreement = peers_transformers.compare(theirs, prompt, expected)
        assert agreement["root_mean_square"] > agreement["limit"]


def test_tiny_run(tmp_path):
    path = tmp_path / "peers.json"
    peers = ("eager", "assisted", "compiled")
    command = [
        sys.executable,
        BENCHMARKS / "peers.py",
        "--tiny",
        "--methods",
        "plain",
        "--json",
        path,
        "--only",
        *peers,
    ]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    record = json.loads(path.read_text())
    assert record["agreement"]["root_mean_square"] < record["agreement"]["limit"]
    results = {(r["library"], r["method"], r["case"]): r for r in record["results"]}
    assert results.keys() == {("jaxspec", "plain", case) for case in ("1x96", "2x64")} | {
        ("transformers", peer, case) for peer in peers for case in ("1x96", "2x64")
    }
    for (_, method, case), result in results.items():
        if method == "assisted" and case == "2x64":
            assert result["failure"] == "batch 1 only"
        # runs this short may differ by less than the machine's noise
        elif "took as long as all" not in result.get("failure", ""):
            assert result["tokens_per_second"] > 0
            if method != "plain":
                assert result["leading_tokens_of_jaxspec_plain"] == [16] * int(case[0])
    assert "x jaxspec plain" in run.stdout
