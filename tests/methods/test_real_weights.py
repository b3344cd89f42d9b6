"""Self-speculation on a real model: greedy output is plain decoding's, and Vegas beats Streaming."""

import inspect
import os
import shutil
import textwrap
import typing
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec.lossless import check_greedy
from jaxspec.methods import Models

pytestmark = pytest.mark.weights
LENGTHS = (2000, 1200)


@pytest.fixture(scope="module")
def model():
    return jaxspec.load(Path(os.environ["JAXSPEC_WEIGHTS"]) / "smollm2.gguf", dtype="float32")


@pytest.fixture(scope="module")
def prompts(model):
    """Code, and prose about it: the docstrings of the standard library."""
    prose = "\n\n".join(inspect.getdoc(module) or "" for module in (inspect, typing, textwrap, shutil))
    prose += "\n\n".join(inspect.getdoc(value) or "" for _, value in inspect.getmembers(typing, callable))
    texts = (inspect.getsource(textwrap) + inspect.getsource(shutil), prose)
    return [model.tokenizer(text)["input_ids"][:n] for text, n in zip(texts, LENGTHS, strict=True)]


def test_greedy_output_and_acceptance(model, prompts):
    assert [len(ids) for ids in prompts] == list(LENGTHS)
    options = {"rho": 0.07, "min_keep": 64, "num_draft": 4}
    per_round = {}
    for method in (jaxspec.Streaming(**options), jaxspec.Vegas(**options)):
        check = check_greedy(Models(model.model, model.params), method, prompts, 32)
        assert check.passed, check.detail
        width = max(LENGTHS)
        padded = np.array([ids + [0] * (width - len(ids)) for ids in prompts], np.int32)
        run = partial(jaxspec.generate, model.model, model.params, padded, LENGTHS, jax.random.key(0))
        stats = run(method=method, max_new_tokens=32).stats
        per_round[type(method).__name__] = np.sum(stats.emitted) / np.sum(stats.rounds)
    assert per_round["Vegas"] > 1.1 * per_round["Streaming"]
