"""Layer-skipped drafts: exact under any mask, static and traced alike, alone and over selected rows."""

import dataclasses
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from method_cases import GREEDY, LENGTHS, assert_same_greedy, prompts, tiny_model

from jaxspec import Finish, KnapSpec, LatencyProfile, Plain, Plan, Quest, Sampling, Streaming, Vegas, generate, stream
from jaxspec import decode as decode_module
from jaxspec.decode import decode_all, decode_in_segments, prefill
from jaxspec.enumeration import plain_distribution, speculative_distribution
from jaxspec.methods import Models
from jaxspec.methods.knapspec import random_plan, traced_plan
from jaxspec.planning import Line
from jaxspec.requests import check_request

LAYERS, NEW, MOST = 2, 20, 4
KEY = jax.random.key(0)
RNG_PROMPT = [int(t) for t in np.random.default_rng(2).integers(0, 3, 20)]


def profile(batch=3, layers=LAYERS, overhead=1.0):
    """Rounds cost so much besides their forwards that drafts pay at any acceptance."""
    line, none = Line(1e-6, 1e-3), Line(0.0, 0.0)
    return LatencyProfile(layers, batch, MOST + 1, line, 1e-3, 1e-3, line, 1e-3, 1e-3, overhead, line, none)


@cache
def models():
    return Models(*tiny_model(LAYERS))


@cache
def plain():
    """Plain decoding's last state."""
    return end_state(Plain())


def request_of(method):
    return check_request(models().target, *prompts(), KEY, method, GREEDY, NEW, (), 0, None)


@partial(jax.jit, static_argnames="method")
def begin(models, request, method):
    return prefill(models, request, method, NEW)


@partial(jax.jit, static_argnames="method")
def finish(models, request, state, method):
    return decode_all(models, state, request, method, NEW)


@cache
def begun(selection=""):
    """The state after prefill of any static plan over a selection; traced plans wrap its method state."""
    method = KnapSpec(max_draft=MOST, selection=selection)
    return begin(models(), request_of(method), method)


def end_state(method):
    """The state at the end of a run."""
    state = begun(getattr(method, "selection", ""))
    if isinstance(method, KnapSpec) and method.execution == "traced":
        state = state.replace(method_state=traced_plan(method.plan, state.method_state))
        method = method.with_plan(None)
    return jax.tree.map(np.asarray, finish(models(), request_of(method), state, method).replace(keys=None))


def assert_plain(state):
    """Tokens and committed cache are plain decoding's: nothing that drafts wrote is left in it."""
    prompt, _ = prompts()
    for b in range(3):
        assert_same_greedy(models(), prompt[b, : LENGTHS[b]], state.tokens[b, :NEW], plain().tokens[b, :NEW])
        rows = slice(0, int(plain().length[b]))
        for mine, other in zip(jax.tree.leaves(state.cache), jax.tree.leaves(plain().cache), strict=True):
            np.testing.assert_allclose(mine[b, rows], other[b, rows], atol=1e-5)


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


# --- plans that change -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cycling(KnapSpec):
    """Another plan in every segment, with 4, 0 and 1 drafts."""

    def replan(self, run):
        drafts = (4, 0, 1)[run.rounds // self.replan_every % 3]
        plan = Plan((True, drafts != 4), (True, drafts != 1), drafts)
        run.note({"num_draft": drafts})
        if self.execution == "static":
            return self.with_plan(plan), run.state
        return self.with_plan(None), run.state.replace(method_state=traced_plan(plan, run.state.method_state.selection))


EXPECTED_DRAFTS = np.array([4, 4, 0, 0, 1, 1] * NEW)


def test_static_plans_change_under_way():
    """`generate` in segments of two rounds: plain decoding's tokens, each segment with its own drafts."""
    method = Cycling(max_draft=MOST, replan_every=2, selection=Vegas(rho=0.1, min_keep=4, collect="all"))
    out = generate(models().target, models().params, *prompts(), KEY, method=method, max_new_tokens=NEW)
    np.testing.assert_array_equal(out.tokens, plain().tokens[:, :NEW])
    for b in range(3):
        n = int(out.stats.rounds[b])
        np.testing.assert_array_equal(out.stats.drafted[b, :n], EXPECTED_DRAFTS[:n])


def test_traced_plans_change_under_way_in_a_stream():
    method = Cycling(max_draft=MOST, replan_every=2, execution="traced")
    chunks = list(stream(models().target, models().params, *prompts(), KEY, method=method, max_new_tokens=NEW))
    for b in range(3):
        assert [t for chunk in chunks for t in chunk.tokens[b]] == plain().tokens[b, :NEW].tolist()
        n = int(chunks[-1].stats.rounds[b])
        np.testing.assert_array_equal(chunks[-1].stats.drafted[b, :n], EXPECTED_DRAFTS[:n])
    assert [record["num_draft"] for record in chunks[-1].plans][:4] == [4, 0, 1, 4]
    assert all("measured_tokens_per_second" in record for record in chunks[-1].plans[:2])
    assert chunks[0].plans is None


def test_it_plans_and_equal_plans_share_a_program():
    """A whole run with its planner; then one of other prompts and planner options."""
    options = {"max_draft": MOST, "max_cells": 8, "replan_every": 4, "profile": profile(), "planner_share": 1.0}
    method = KnapSpec(**options)
    state, run = decode_in_segments(models(), request_of(method), method, NEW)
    np.testing.assert_array_equal(state.tokens[:, :NEW], plain().tokens[:, :NEW])
    first = run.log[0]
    assert (first["taken"], first["num_draft"]) == ("first", MOST)
    assert first["predicted_tokens_per_second"] > first["predicted_plain_tokens_per_second"]
    assert first["weights"] == (1, 1)
    assert state.stats.drafted.max() == MOST
    assert run.rounds == int(state.stats.rounds.max())
    assert run.decode_seconds > 0
    assert run.replan_seconds > 0
    compiled = decode_module._segment._cache_size()
    again = KnapSpec(**{**options, "threshold": 0.7, "growth": 1.5, "profile": profile(overhead=2.0)})
    prompt, length = prompts()
    generate(models().target, models().params, prompt, length, jax.random.key(1), method=again, max_new_tokens=NEW)
    assert decode_module._segment._cache_size() == compiled


def test_latencies_are_measured_at_first_use(capsys, monkeypatch):
    """Once per model and shape, and it says so."""
    calls = []

    def measure(models, batch, contexts, *, max_draft, selection, progress):
        calls.append((batch, max_draft, selection))
        assert contexts == sorted(contexts)
        assert contexts[-1] >= max(LENGTHS) + NEW
        progress("something")
        return SimpleNamespace(profile=profile())

    monkeypatch.setattr("jaxspec.planning.measure.measure", measure)
    method = KnapSpec(max_draft=MOST, max_cells=8)
    for _ in range(2):
        out = generate(models().target, models().params, *prompts(), KEY, method=method, max_new_tokens=NEW)
    np.testing.assert_array_equal(out.tokens, plain().tokens[:, :NEW])
    assert calls == [(3, MOST, None)]
    assert capsys.readouterr().err == "jaxspec: measuring latencies for KnapSpec: something\n"


def test_under_a_callers_jit():
    """A plan or, with traced masks, a profile: then it plans after the prefill, on the device."""
    prompt, length = prompts()

    def run(method):
        return jax.jit(
            lambda p, n: generate(models().target, models().params, p, n, KEY, method=method, max_new_tokens=NEW)
        )(prompt, length)

    traced = KnapSpec(execution="traced", profile=profile(), max_draft=MOST, max_cells=8)
    out = run(traced)
    np.testing.assert_array_equal(out.tokens, plain().tokens[:, :NEW])
    assert out.stats.drafted.max() == MOST
    for method in (KnapSpec(), KnapSpec(profile=profile()), KnapSpec(execution="traced")):
        with pytest.raises(ValueError, match="give a plan, or execution='traced' with a profile"):
            run(method)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profile": profile(batch=2)}, "measured at batch 2, this run has batch 3"),
        ({"profile": profile(layers=7)}, "7 layers, this one: 2"),
        ({"profile": dataclasses.replace(profile(), selected=None), "selection": "vegas"}, "lacks sparse attention"),
        ({"plan": Plan((True,) * 4, (True,) * 4, 1)}, "plan is for 4 layers, the model has 2"),
    ],
)
def test_plans_and_profiles_of_something_else_raise(options, message):
    with pytest.raises(ValueError, match=message):
        generate(models().target, models().params, *prompts(), KEY, method=KnapSpec(**options), max_new_tokens=NEW)


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
