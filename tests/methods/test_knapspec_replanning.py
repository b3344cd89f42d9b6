"""KnapSpec's plans under way: made, changed, measured for, and fixed by a caller."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest
from knapspec_cases import KEY, MOST, NEW, models, plain, profile, request_of
from method_cases import LENGTHS, prompts

from jaxspec import KnapSpec, Plan, Vegas, generate, generate_many, stream
from jaxspec import decode as decode_module
from jaxspec.decode import decode_in_segments
from jaxspec.methods import knapspec
from jaxspec.methods.knapspec import traced_plan


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


@dataclasses.dataclass(frozen=True)
class PuttingOff(Cycling):
    """Wants to be called after 2, 6, 8 and 12 rounds and so on."""

    def replan(self, run):
        if run.rounds % 6:
            run.replan_at = run.rounds + 4
        return super().replan(run)


@pytest.mark.parametrize("run", ["generate", "stream"])
def test_a_method_may_put_the_next_call_off(run):
    method = PuttingOff(max_draft=MOST, replan_every=2, execution="traced")
    arguments = models().target, models().params, *prompts(), KEY
    if run == "generate":
        stats = generate(*arguments, method=method, max_new_tokens=NEW).stats
    else:
        stats = list(stream(*arguments, method=method, max_new_tokens=NEW))[-1].stats
    expected = np.array([4, 4, 0, 0, 0, 0] * NEW)
    for b in range(3):
        n = int(stats.rounds[b])
        np.testing.assert_array_equal(stats.drafted[b, :n], expected[:n])


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


@pytest.mark.parametrize("batch", [1, 2])
def test_many_prompts_follow_the_plan_of_the_first(monkeypatch, batch):
    """No prefill makes a plan that would not be used."""
    search = mock.Mock(wraps=knapspec.search_plan)
    monkeypatch.setattr(knapspec, "search_plan", search)
    # no other test has these options, under which nothing is compiled yet
    method = KnapSpec(execution="traced", profile=profile(), max_draft=MOST, max_cells=5 + batch)
    ids = [row[:length].tolist() for row, length in zip(*prompts(), strict=True)]
    run = {"batch": batch, "method": method, "max_new_tokens": NEW}
    for completion in generate_many(models().target, models().params, ids, KEY, **run):
        np.testing.assert_array_equal(completion.tokens, plain().tokens[completion.index, :NEW])
        assert completion.stats.drafted.max() == MOST
    traced = [call.args[2].shape for call in search.call_args_list]
    assert {shape[0] for shape in traced} == {batch}
