"""Self-speculation on a real model: greedy output is plain decoding's, and Vegas beats Streaming."""

import inspect
import os
import textwrap
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec.lossless import check_greedy
from jaxspec.methods import Models

pytestmark = pytest.mark.weights


@pytest.fixture(scope="module")
def model():
    return jaxspec.load(Path(os.environ["JAXSPEC_WEIGHTS"]) / "smollm2.gguf", dtype="float32")


@pytest.fixture(scope="module")
def prompts(model):
    """Two texts each, and then the beginning of the first again: what comes next stands far back."""
    code = model.tokenizer(inspect.getsource(textwrap))["input_ids"]
    prose = model.tokenizer(
        "\n\n".join(inspect.getdoc(v) or "" for _, v in inspect.getmembers(inspect, inspect.isfunction))
    )["input_ids"]
    return [code[:900] + prose[:900] + code[:150], prose[:600] + code[:600] + prose[:100]]


def test_greedy_output_and_acceptance(model, prompts):
    options = {"rho": 0.07, "min_keep": 64, "num_draft": 4}
    lengths = np.array([len(ids) for ids in prompts])
    padded = np.array([ids + [0] * (lengths.max() - len(ids)) for ids in prompts], np.int32)
    per_round = {}
    for method in (jaxspec.Streaming(**options), jaxspec.Vegas(**options)):
        check = check_greedy(Models(model.model, model.params), method, prompts, 32)
        assert check.passed, check.detail
        run = partial(jaxspec.generate, model.model, model.params, padded, lengths, jax.random.key(0))
        stats = run(method=method, max_new_tokens=32).stats
        per_round[type(method).__name__] = float(np.sum(stats.emitted) / np.sum(stats.rounds))
    assert per_round["Vegas"] > 1.3 * per_round["Streaming"], per_round
