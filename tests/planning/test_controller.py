"""When a new plan is looked for and taken over."""

import threading

import numpy as np
import pytest
from stage import ONE, TWO, Stage


def test_the_first_plan_and_one_that_pays(monkeypatch):
    stage = Stage(monkeypatch)
    assert stage.replan() == ONE
    assert stage.run.log[0]["taken"] == "first"
    assert stage.run.compile_seconds == pytest.approx(0.5)
    stage.decode(1.0, 30, 130)
    assert stage.replan() == ONE
    assert [record["taken"] for record in stage.run.log] == ["first", "same"]
    stage.found = TWO
    stage.decode(2.0, 90, 190)
    assert stage.replan() == TWO
    assert stage.run.log[-1]["taken"] == "changed"
    assert stage.compiled == [ONE, TWO]
    assert stage.run.log[1]["measured_tokens_per_second"] == pytest.approx(60 / 2)
    assert stage.run.replan_seconds == pytest.approx(0.03)


def test_a_plan_whose_gain_is_less_than_its_compile_time(monkeypatch):
    """To end in 2 instead of 4 s is worth half a second of compiling, not three."""
    for compile_seconds, taken in ((0.5, "changed"), (3.0, "not worth it")):
        stage = Stage(monkeypatch, compile_seconds=compile_seconds)
        stage.replan()
        stage.found = TWO
        stage.decode(5.0, 90, 190)
        stage.replan()
        assert stage.run.log[-1]["taken"] == taken
        assert stage.run.log[-1]["measured_acceptance_before"] == 1.0
    # a plan that was compiled before costs nothing, however little is left
    stage = Stage(monkeypatch, compile_seconds=3.0)
    stage.run.prepare(stage.method.with_plan(TWO), background=False)
    stage.replan()
    stage.found = TWO
    stage.decode(5.0, 90, 190)
    assert stage.replan() == TWO


@pytest.mark.parametrize(("compiled_before", "taken"), [([ONE], "not worth it"), ([ONE, TWO], "changed")])
def test_what_another_run_compiled_costs_nothing_and_says_what_a_new_plan_costs(monkeypatch, compiled_before, taken):
    stage = Stage(monkeypatch, compile_seconds=3.0)
    for plan in compiled_before:
        stage.run.prepare(stage.method.with_plan(plan), background=False)
    stage.begin()
    stage.compile_seconds = 0.0  # of a program that JAX finds
    stage.replan()
    stage.found = TWO
    stage.decode(5.0, 90, 190)
    stage.replan()
    assert stage.run.log[-1]["taken"] == taken


@pytest.mark.parametrize("execution", ["static", "traced"])
def test_a_plan_whose_gain_is_within_the_error_of_the_model(monkeypatch, execution):
    """2% of the time left are not worth a change that costs nothing, 4% are."""
    for saved, expected in ((0.02, ONE), (0.04, TWO)):
        stage = Stage(monkeypatch, execution=execution)
        stage.run.prepare(stage.method.with_plan(TWO), background=False)
        stage.left = (4.0, 4.0 * (1 - saved))
        stage.replan()
        stage.found = TWO
        stage.decode(5.0, 90, 190)
        assert stage.replan() == expected


def test_a_plan_that_loses_is_not_taken(monkeypatch):
    """By layers run, which `value="tpl"` weighs, another plan may be best and yet end later."""
    stage = Stage(monkeypatch)
    stage.replan()
    stage.found, stage.left = TWO, (2.0, 2.1)
    stage.decode(5.0, 90, 190)
    assert stage.replan() == ONE
    assert stage.run.log[-1]["taken"] == "not worth it"


def test_acceptance_is_counted_since_the_last_call(monkeypatch):
    """Of two drafts one is accepted and one rejected, every round."""
    stage = Stage(monkeypatch)
    stage.replan()
    stage.decode(1.0, 90, 190, accepted=1)
    stage.replan()
    assert stage.run.log[-1]["measured_acceptance_before"] == pytest.approx(0.5)


def test_compiling_in_the_background(monkeypatch):
    """The old plan decodes until the new one is ready; nothing waits."""
    stage = Stage(monkeypatch, compile_in="background")
    assert stage.replan() == ONE
    stage.found, stage.gate = TWO, threading.Event()
    stage.decode(1.0, 90, 190)
    assert stage.replan() == ONE
    assert stage.run.log[-1]["taken"] == "compiling"
    waited = stage.run.compile_seconds
    stage.decode(0.01, 120, 220)
    assert stage.replan() == ONE
    stage.gate.set()
    stage.run._compiled[stage.method.with_plan(TWO)].result()
    stage.decode(0.01, 150, 250)
    assert stage.replan() == TWO
    assert stage.run.compile_seconds == waited
    stage.run.close()


def changing(stage):
    """Has the planner find another plan than the one in use."""
    stage.found = TWO if stage.run.memory["knapspec"].plan == ONE else ONE


def test_planning_takes_at_most_its_share(monkeypatch):
    """The period grows from 64 rounds until a search of 0.1 s, and what weighs plans in between, is 2% of the time."""
    stage = Stage(monkeypatch, new_tokens=10**6, growth=1000.0)
    stage.plan_seconds, stage.choose_seconds = 0.1, 2e-3
    for segment in range(1, 200):
        stage.replan()
        changing(stage)
        assert len(stage.planned) == 1 or stage.run.replan_seconds <= 0.02 * stage.run.decode_seconds
        stage.decode(0.64, 90, 100 + segment)
    periods = np.diff(stage.planned)
    assert len(periods) >= 20
    assert set(periods[1:]) <= {9 * 64, 10 * 64}  # 0.12 s are 2% of 9.4 segments
    # and is 64 rounds where planning is cheap
    stage = Stage(monkeypatch, new_tokens=10**6)
    stage.plan_seconds = 1e-3
    for segment in range(1, 10):
        stage.replan()
        changing(stage)
        stage.decode(0.64, 90, 100 + segment)
    assert set(np.diff(stage.planned)) == {64}


def test_the_period_doubles_while_the_plan_stays(monkeypatch):
    """And is `replan_every` again after another plan."""
    stage = Stage(monkeypatch, new_tokens=10**6, growth=1000.0)
    stage.plan_seconds = 1e-6
    for segment in range(1, 40):
        stage.found = ONE if stage.run.rounds < 20 * 64 else TWO
        stage.replan()
        stage.decode(0.64, 90, 100 + segment)
    assert [rounds // 64 for rounds in stage.planned] == [0, 1, 3, 7, 15, 31, 32, 34, 38]
    assert [record["taken"] for record in stage.run.log] == ["first", *["same"] * 4, "changed", *["same"] * 3]


def test_a_plan_that_does_not_pay_lengthens_the_period(monkeypatch):
    stage = Stage(monkeypatch, growth=1000.0, compile_seconds=3.0)
    stage.plan_seconds = 1e-6
    for segment in range(1, 9):
        stage.replan()
        stage.found = TWO
        stage.decode(0.64, 90, 100 + segment)
    assert [rounds // 64 for rounds in stage.planned] == [0, 1, 3, 7]
    assert {record["taken"] for record in stage.run.log[1:]} == {"not worth it"}


def test_growth_asks_for_a_plan_before_the_period_is_over(monkeypatch):
    stage = Stage(monkeypatch, replan_every=1000)
    stage.replan()
    for length, planned in ((124, 1), (125, 2), (156, 2), (157, 3)):
        stage.decode(10.0, 30, length, rounds=10)
        stage.replan()
        assert len(stage.planned) == planned


def test_the_plan_is_weighed_less_and_less_often_while_it_stays(monkeypatch):
    """A quarter of `replan_every` rounds after the first plan, and then after twice as many as before."""
    stage, calls = Stage(monkeypatch, new_tokens=10**6), []
    while stage.run.rounds < 600:
        calls.append(stage.run.rounds)
        stage.replan()
        stage.decode(0.1, 90, 190, rounds=stage.run.replan_at - stage.run.rounds)
    assert calls == [0, 16, 48, 112, 240, 496]
    stage = Stage(monkeypatch, replan_every=1)
    stage.replan()
    assert stage.run.replan_at == 1


def test_a_change_of_plan_is_soon_looked_at(monkeypatch):
    stage = Stage(monkeypatch, new_tokens=10**6)
    stage.replan()
    stage.decode(10.0, 90, 190, rounds=64)
    stage.replan()
    assert stage.run.replan_at == 64 + 32
    stage.found = TWO
    stage.decode(10.0, 180, 280, rounds=128)
    assert stage.replan() == TWO
    assert stage.run.replan_at == 192 + 16


@pytest.mark.parametrize(("execution", "compile_in", "planned"), [
    ("static", "foreground", 1), ("static", "background", 2), ("traced", "foreground", 2)
])  # fmt: skip
def test_nothing_is_searched_that_could_not_pay_for_its_compilation(monkeypatch, execution, compile_in, planned):
    stage = Stage(monkeypatch, execution=execution, compile_in=compile_in, compile_seconds=60.0)  # only 4 s are left
    stage.replan()
    stage.decode(10.0, 90, 190, rounds=64)
    stage.replan()
    assert len(stage.planned) == planned
