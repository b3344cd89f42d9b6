"""KnapSpec on a real model: greedy output is plain decoding's, and the planner knows which sublayers can be spared."""

import dataclasses
import inspect
import os
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec import KnapSpec, LatencyProfile, Plan, Sampling
from jaxspec.decode import decode_all, prefill
from jaxspec.lossless import check_greedy
from jaxspec.methods import Models
from jaxspec.methods.knapspec import random_plan, traced_plan
from jaxspec.planning import Line, PlannerOptions, plan
from jaxspec.requests import check_request

pytestmark = pytest.mark.weights

NEW, DRAFTS = 32, 4
LINE = Line(1e-8, 1e-4)
# a model that is slow to verify and has cheap attention: drafts pay, and skipping MLPs most of all
PROFILE = LatencyProfile(30, 1, 11, LINE, 3e-4, 1e-4, LINE, 3e-4, 1e-4, 2e-2, LINE, Line(0.0, 0.0))


@pytest.fixture(scope="module")
def models():
    model, params, tokenizer = jaxspec.load(Path(os.environ["JAXSPEC_WEIGHTS"]) / "smollm2.gguf", dtype="float32")
    return Models(model, params), tokenizer(inspect.getsource(textwrap))["input_ids"][:600]


@pytest.mark.parametrize("selection", ["", "vegas:min_keep=64"])
def test_greedy_output(models, selection):
    models, ids = models
    method = KnapSpec(profile=PROFILE, max_draft=DRAFTS, selection=selection, max_cells=16, replan_every=8)
    check = check_greedy(models, method, [ids], NEW)
    assert check.passed, check.detail
    print(check.detail)


def test_chosen_sublayers_are_better_than_others(models):
    """A plan of the frontier accepts more than random masks of its size and than a hole in the middle."""
    models, ids = models
    method = KnapSpec(max_draft=DRAFTS, execution="traced")
    arguments = jax.random.key(0), method, Sampling(), NEW, (), 0, None
    request = check_request(models.target, np.array([ids]), np.array([len(ids)]), *arguments)
    begun = jax.jit(lambda models, request: prefill(models, request, method, NEW))(models, request)
    finish = jax.jit(lambda models, state, request: decode_all(models, state, request, method, NEW).stats)

    def acceptance(plan):
        state = begun.replace(method_state=traced_plan(dataclasses.replace(plan, num_draft=DRAFTS), ()))
        stats = finish(models, state, request)
        accepted, rejected = int(stats.accepted.sum()), int(np.sum(stats.accepted < stats.drafted))
        return accepted / (accepted + rejected)

    tokens = (request.prompt, request.prompt_length, begun.tokens, begun.length)
    options = PlannerOptions(max_draft=DRAFTS, max_cells=16, reference_tokens=16)
    frontier = plan(models, begun.cache, *tokens, PROFILE, options).frontier
    chosen = max((c for c in frontier if c.weight >= 8), key=lambda c: c.alpha)
    skipped = 60 - chosen.plan.num_attention - chosen.plan.num_mlp
    assert skipped >= 4
    ours = acceptance(chosen.plan)
    others = [acceptance(random_plan(30, skipped, DRAFTS, seed)) for seed in range(5)]
    first = 15 - skipped // 4
    middle = tuple(not first <= i < first + -(-skipped // 2) for i in range(30))
    others.append(acceptance(Plan(middle, middle, DRAFTS)))
    print(f"{skipped} of 60 sublayers skipped: {ours:.2f} (predicted {chosen.alpha:.2f}), others {others}")
    assert ours > max(others)
    assert ours > np.mean(others) + 0.1
    assert ours == pytest.approx(chosen.alpha, abs=0.25)
