"""Layer-skipped drafts: exact under any mask, static and traced alike, alone and over selected rows."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from knapspec_cases import KEY, LAYERS, MOST, NEW, assert_plain, begun, end_state, finish, models, profile, request_of
from method_cases import prompts, tiny_model

from jaxspec import Finish, KnapSpec, Plain, Plan, Quest, Sampling, Streaming, Vegas, generate, stream
from jaxspec import decode as decode_module
from jaxspec.enumeration import plain_distribution, speculative_distribution
from jaxspec.methods import Models
from jaxspec.methods.knapspec import random_plan

RNG_PROMPT = [int(t) for t in np.random.default_rng(2).integers(0, 3, 20)]


def test_any_mask_gives_plain_decodings_tokens_and_cache():
    """50 random masks, those that run nothing and everything among them, with 0..4 drafts; one compiled program."""
    rng = np.random.default_rng(0)
    masks = [rng.random((2, LAYERS)) < rng.random() for _ in range(48)]
    masks += [np.zeros((2, LAYERS), bool), np.ones((2, LAYERS), bool)]
    rates = []
    for i, (attn, mlp) in enumerate(masks):
        plan = Plan(tuple(attn.tolist()), tuple(mlp.tolist()), i % (MOST + 1))
        state = end_state(KnapSpec(plan=plan, execution="traced", max_draft=MOST))
        assert_plain(state)
        assert np.max(state.stats.drafted) == i % (MOST + 1)
        if i % (MOST + 1):
            rates.append(state.stats.accepted.sum() / state.stats.drafted.sum())
    assert finish._cache_size() <= 2  # this and plain decoding's
    assert rates[-1] > 0.9  # the whole model drafts its own tokens; the last round is cut by the limit
    assert min(rates) < 0.3


INNER = {
    "none": "",
    "vegas": Vegas(rho=0.1, min_keep=4),
    "streaming": Streaming(rho=0.1, min_keep=6),
    "quest": Quest(rho=0.1, min_keep=4, page_size=4),
}


@pytest.mark.parametrize("name", INNER)
def test_static_and_traced_plans_draft_alike(name):
    """Also that a plan with fewer drafts than `max_draft` runs on the same state, and that selections compose."""
    plan = Plan((True, False), (False, True), 3)
    static = end_state(KnapSpec(plan=plan, max_draft=MOST, selection=INNER[name]))
    assert_plain(static)
    assert static.stats.drafted.max() == 3
    if name in ("none", "vegas"):
        traced = end_state(KnapSpec(plan=plan, max_draft=MOST, selection=INNER[name], execution="traced"))
        np.testing.assert_array_equal(traced.stats.drafted, static.stats.drafted)
        np.testing.assert_array_equal(traced.stats.accepted, static.stats.accepted)
    if name != "none":
        # fewer rows to read: not the same drafts as with all of them
        assert not np.array_equal(static.stats.accepted, accepted_without_selection(plan))


@cache
def accepted_without_selection(plan):
    return end_state(KnapSpec(plan=plan, max_draft=MOST)).stats.accepted


def test_a_selection_is_the_composed_methods_own():
    """With no sublayer skipped the drafts are exactly Vegas's."""
    inner = dataclasses.replace(INNER["vegas"], num_draft=MOST)
    everything = Plan((True,) * LAYERS, (True,) * LAYERS, MOST)
    composed = end_state(KnapSpec(plan=everything, max_draft=MOST, selection=inner))
    alone = finish(models(), request_of(inner), begun(inner), inner)
    np.testing.assert_array_equal(composed.stats.accepted, alone.stats.accepted)
    jax.tree.map(np.testing.assert_array_equal, composed.method_state, alone.method_state)


@pytest.mark.parametrize(
    "options",
    [
        {"execution": "traced", "plan": Plan((False,), (True,), 1)},
        {
            "draft_length": "confidence",
            "threshold": 0.55,
            "selection": Vegas(rho=0.1, min_keep=4),
            "plan": Plan((True,), (False,), 2),
        },
    ],
    ids=["traced, one draft of two", "confidence, with Vegas"],
)
def test_every_path_enumerated(options):
    tiny, method = Models(*tiny_model(1, 3)), KnapSpec(max_draft=2, **options)
    mine, accepted = speculative_distribution(tiny, method, RNG_PROMPT, 1, Sampling(1.0), 1)
    expected = plain_distribution(tiny, RNG_PROMPT, 1, Sampling(1.0), mine.ndim)
    assert 0.5 * np.abs(mine - expected).sum() < 1e-6
    assert 0.05 < accepted < (0.99 if options.get("execution") else 1.99)


def test_a_draft_ends_where_it_is_unsure():
    """The token whose distribution falls below the threshold is the last one used."""
    plan = Plan((True,) * LAYERS, (True, False), 1)
    method = KnapSpec(plan=plan, max_draft=MOST, draft_length="confidence", threshold=0.4)
    executed = method.with_plan(plan)
    assert executed.plan.num_draft == MOST
    counts = set()
    request = request_of(executed)
    state = begun()

    @jax.jit
    def step(models, state):
        draft = decode_module.draft_tokens(models, state, request, executed)[1]
        inputs = jnp.concatenate([state.last_token[:, None], draft.tokens[:, :-1]], axis=1)
        logits = models.forward(inputs, state.cache, state.length, layers=plan.layers).logits
        return draft, logits, decode_module.decode_step(models, state, request, executed, NEW)[0]

    for _ in range(4):
        draft, logits, after = step(models(), state)
        sure = np.asarray(jax.nn.softmax(logits).max(axis=-1)) >= 0.4
        for b in np.flatnonzero(np.asarray(state.finish) == Finish.RUNNING):
            unsure = np.flatnonzero(~sure[b])
            assert draft.count[b] == (min(unsure[0] + 1, MOST) if unsure.size else MOST)
            counts.add(int(draft.count[b]))
        state = after
    assert len(counts) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profile": profile(batch=2)}, "measured at batch 2, this run has batch 3"),
        ({"profile": profile(layers=7)}, "7 layers, this one: 2"),
        ({"profile": dataclasses.replace(profile(), selected=None), "selection": "vegas"}, "lacks sparse attention"),
        ({"plan": Plan((True,) * 4, (True,) * 4, 1)}, "plan is for 4 layers, the model has 2"),
    ],
)
@pytest.mark.parametrize("run", [generate, stream])
def test_plans_and_profiles_of_something_else_raise(monkeypatch, run, options, message):
    """Before the prefill; a stream is not read: the call itself raises."""
    for prefill in ("run_prefill", "_generate"):
        monkeypatch.setattr(decode_module, prefill, pytest.fail)
    with pytest.raises(ValueError, match=message):
        run(models().target, models().params, *prompts(), KEY, method=KnapSpec(**options), max_new_tokens=NEW)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_draft": 0}, r"max_draft must be an integer in 1\.\.32"),
        ({"max_draft": 2.5}, r"max_draft must be an integer in 1\.\.32"),
        ({"items": "layers"}, "items must be one of sublayers, blocks"),
        ({"value": "speed"}, "value must be one of tpt, tpl"),
        ({"alpha": "mean"}, "alpha must be one of smoothed, raw"),
        ({"draft_length": "fixed"}, "draft_length must be one of grid, confidence"),
        ({"execution": "eager"}, "execution must be one of static, traced"),
        ({"compile_in": "thread"}, "compile_in must be one of foreground, background"),
        ({"threshold": 0.0}, "threshold must lie above 0 and be at most 1"),
        ({"tau": 1.5}, "tau must lie above -1 and be at most 1"),
        ({"clip": 0}, r"clip must be an integer in 1\.\.64"),
        ({"max_cells": 1}, r"max_cells must be an integer in 2\.\.1024"),
        ({"max_skipped": 0.0}, "max_skipped must lie above 0 and be at most 1"),
        ({"max_skipped": float("nan")}, "max_skipped must lie above 0 and be at most 1"),
        ({"reference_tokens": 0}, r"reference_tokens must be an integer in 1\.\.256"),
        ({"replan_every": 0}, "replan_every must be an integer in 1"),
        ({"growth": 1.0}, "growth must lie above 1"),
        ({"planner_share": 2.0}, "planner_share must lie above 0 and be at most 1"),
        ({"profile": 3}, "profile must be a LatencyProfile or a file's name"),
        ({"selection": "best"}, "selection must be one of quest, streaming, vegas, got 'best'"),
        ({"selection": Plain()}, "selection must be a Vegas, Streaming or Quest"),
        ({"plan": (True, False)}, "plan must be a Plan"),
        ({"plan": Plan((True,), (True,), 11)}, "11 drafts are more than max_draft = 10"),
    ],
)
def test_wrong_options_name_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        KnapSpec(**options)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (((True,), (True, True), 1), "one entry per layer, got 1, 2"),
        (((), (), 1), "one entry per layer"),
        (((1, 0), (True, True), 1), "attn must be booleans"),
        (((True,), (True,), -1), "num_draft must be an integer >= 0"),
        (((True,), (True,), True), "num_draft must be an integer >= 0"),
    ],
)
def test_wrong_plans(values, message):
    with pytest.raises(ValueError, match=message):
        Plan(*values)


def test_random_plans_leave_the_first_and_last_block_alone():
    for seed in range(20):
        plan = random_plan(5, 4, 3, seed)
        assert (plan.num_attention + plan.num_mlp, plan.num_draft) == (6, 3)
        assert plan.attn[0] and plan.attn[-1] and plan.mlp[0] and plan.mlp[-1]  # noqa: PT018
    with pytest.raises(ValueError, match=r"0\.\.6 for 5 layers, got 7"):
        random_plan(5, 7, 1)
