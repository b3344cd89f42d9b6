"""When a new plan is made and taken over: clocks and plans by hand, nothing is computed."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from jaxspec import KnapSpec, Plan
from jaxspec.planning import Candidate, LatencyProfile, Line, Planned, controller
from jaxspec.replanning import Run
from jaxspec.types import Finish, Stats

LINE = Line(0.0, 1e-3)
EVERY = (True, True)
PROFILE = LatencyProfile(2, 1, 11, LINE, 1e-3, 1e-3, LINE, 1e-3, 1e-3, 5e-3)  # a plain step takes 10 ms
ONE, TWO = Plan((True, False), (True, True), 2), Plan((True, True), (True, False), 2)
NOTHING = Plan(EVERY, EVERY, 2)


def beside_nothing(alpha):
    """A frontier of two: skipping nothing, accepted whole, makes 3 tokens in 2 * 5 + 10 ms, 150 a second; ONE in 8 +
    10 ms 151 at alpha = 0.9. A plain step makes 100."""
    nothing = Candidate(NOTHING, 0, 1.0, 1.0, 0.0)
    return nothing, Candidate(ONE, 1, 0.9, alpha, 0.0)


class Stage:
    """A run whose planner and compiler do as they are told, and a clock that only they and `decode` move.

    A search finds `found`, which ends in `left[1]` seconds instead of `left[0]`, and nothing is better in between; or
    with a `frontier` the controller chooses itself.
    """

    def __init__(self, monkeypatch, new_tokens=1000, compile_seconds=0.5, frontier=None, **options):
        self.now, self.plan_seconds, self.choose_seconds, self.compile_seconds = 0.0, 0.01, 0.0, compile_seconds
        self.found, self.planned, self.compiled, self.gate = ONE, [], [], None
        self.left, self.frontier = (4.0, 2.0), beside_nothing(0.9) if frontier is None else frontier
        self.method = KnapSpec(profile=PROFILE, **options)
        self.run = Run(None, None, new_tokens, self.state(0, 100), self.lower)
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(controller, "time", clock)
        monkeypatch.setattr("jaxspec.replanning.time", clock)
        monkeypatch.setattr(controller, "plan", self.plan)
        if frontier is None:
            monkeypatch.setattr(controller, "_choose", self.choose)
        monkeypatch.setattr(controller, "_arguments", lambda run: ())
        monkeypatch.setattr(controller, "search_plan", SimpleNamespace(
            lower=lambda *_: SimpleNamespace(compile=lambda: None)))  # fmt: skip

    def state(self, emitted, length, accepted=2):
        """After one row's rounds of two drafts each, `accepted` of them accepted."""
        rounds = emitted // (accepted + 1)
        trace = (np.arange(1000) < rounds)[None]
        return SimpleNamespace(
            length=np.array([length]),
            num_tokens=np.array([emitted + 1]),
            finish=np.array([Finish.RUNNING]),
            stats=Stats(np.array([rounds]), np.array([emitted]), 2 * trace, accepted * trace),
        )

    def plan(self, *_, selection):
        self.now += self.plan_seconds
        self.planned.append(self.run.rounds)
        return Planned(self.found, 0.0, 0.0, 0.0, (1, 1), self.frontier)

    def choose(self, method, run, memory, frontier):
        self.now += self.choose_seconds
        before, after = self.left
        return controller._Choice(self.found if frontier else memory.plan, 0.9, 400.0, 200.0, after, before)

    def lower(self, method):
        def compile():
            if self.gate is not None:
                self.gate.wait()
            self.now += self.compile_seconds
            self.compiled.append(method.plan)

        return SimpleNamespace(compile=compile)

    def replan(self):
        method, _ = self.method.replan(self.run)
        self.run.prepare(method, background=False)
        return method.plan

    def decode(self, seconds, emitted, length, rounds=64, **more):
        """A segment."""
        self.now += seconds
        self.run.decode_seconds += seconds
        self.run.rounds += rounds
        self.run.state = self.state(emitted, length, **more)


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


@pytest.mark.parametrize("execution", ["static", "traced"])
def test_a_plan_whose_gain_is_within_the_error_of_the_model(monkeypatch, execution):
    """4% of the time left are not worth a change that costs nothing, 6% are."""
    for saved, expected in ((0.04, ONE), (0.06, TWO)):
        stage = Stage(monkeypatch, execution=execution)
        monkeypatch.setattr(controller, "_with", lambda method, run, chosen: (method.with_plan(chosen), run.state))
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
    stage = Stage(monkeypatch, execution=execution, compile_in=compile_in)
    monkeypatch.setattr(controller, "_with", lambda method, run, chosen: (method.with_plan(chosen), run.state))
    stage.replan()
    stage.run.longest_compile_seconds = 60.0  # only 4 s are left
    stage.decode(10.0, 90, 190, rounds=64)
    stage.replan()
    assert len(stage.planned) == planned


@pytest.mark.parametrize(("alpha", "expected"), [(0.9, ONE), (0.88, NOTHING)])
def test_the_best_of_the_frontier_is_taken(monkeypatch, alpha, expected):
    stage = Stage(monkeypatch, frontier=beside_nothing(alpha), max_draft=2)
    assert stage.replan() == expected
    record = stage.run.log[0]
    assert record["predicted_acceptance"] == (1 if expected == NOTHING else alpha)
    assert record["predicted_tokens_per_second"] == pytest.approx(150, rel=0.01)
    assert record["predicted_plain_tokens_per_second"] == pytest.approx(100)


@pytest.mark.parametrize("first", [1, 2])
def test_without_skipping_nothing_on_the_frontier_there_is_no_speculating(monkeypatch, first):
    """It was dropped where selected rows are too unlike all of them, and with it what others are compared with."""
    stage = Stage(monkeypatch, frontier=beside_nothing(1.0)[first:])
    assert stage.replan() == Plan(EVERY, EVERY, 0)


def test_rounds_that_nobody_waits_for_keep_the_plan(monkeypatch):
    """A stream has one more under way when it learns that all rows have ended."""
    stage = Stage(monkeypatch, frontier=beside_nothing(0.9), max_draft=2, replan_every=1)
    first = stage.replan()
    stage.decode(0.1, 30, 130, rounds=15)
    stage.run.state.finish[:] = Finish.LENGTH
    assert stage.replan() == first
    assert stage.planned == [0]


@pytest.mark.parametrize("execution", ["static", "traced"])
def test_a_plan_that_disappoints_is_given_up_without_a_search(monkeypatch, execution):
    """ONE was to accept 0.9 and accepts half: 1.8 tokens in 18 ms. Skipping nothing promises 2.7 in 20 ms until its
    drafts are rejected, all of them; then plain decoding's 1 in 10 ms is best."""
    options = {"max_draft": 2, "execution": execution, "compile_seconds": 0.01, "reference_tokens": 8}
    stage = Stage(monkeypatch, frontier=beside_nothing(0.9), **options)
    monkeypatch.setattr(controller, "_with", lambda method, run, chosen: (method.with_plan(chosen), run.state))
    assert stage.replan() == ONE
    stage.decode(0.1, 30, 130, rounds=15, accepted=1)
    assert stage.replan() == NOTHING
    record = stage.run.log[-1]
    assert (record["taken"], record["searched"], record["measured_acceptance_before"]) == ("changed", False, 0.5)
    stage.decode(0.1, 100, 200, rounds=70, accepted=0)
    assert stage.replan() == Plan(EVERY, EVERY, 0)
    assert stage.planned == [0]
    assert len(stage.run.log) == 3


def test_a_plan_that_measures_well_stays(monkeypatch):
    stage = Stage(monkeypatch, frontier=beside_nothing(0.9), max_draft=2, reference_tokens=8)
    stage.replan()
    stage.decode(0.1, 90, 120, rounds=30, accepted=2)
    assert stage.replan() == ONE
    assert len(stage.run.log) == 1


def test_what_was_measured_fades(monkeypatch):
    """Plain decoding measures nothing. In the end the last search is believed again, and drafts are tried once more."""
    options = {"max_draft": 2, "reference_tokens": 8, "compile_seconds": 0.0, "growth": 1000.0}
    stage = Stage(monkeypatch, frontier=beside_nothing(0.9), **options)
    stage.plan_seconds = 1e6
    plans = []
    for emitted in (100, 200, *[200] * 12):
        plans.append(stage.replan())
        stage.decode(0.1, emitted, 100 + emitted, rounds=16, accepted=0)
    assert [plan.num_draft > 0 for plan in plans[:4]] == [True, True, False, False]
    assert plans[-1].num_draft > 0
    assert stage.planned == [0]


def test_rows_that_have_ended_count_no_more(monkeypatch):
    """Not in the acceptance, nor in the tokens left, nor in the context that a round pays for: of two rows the first
    one ended and rejected all of its drafts, and the second one accepts all."""
    stage = Stage(monkeypatch, frontier=beside_nothing(0.9), max_draft=2, planner_share=1.0, reference_tokens=8)
    stage.replan()
    stage.decode(1.0, 90, 190)
    stats = stage.run.state.stats
    stage.run.state = SimpleNamespace(
        length=np.array([100, 190]),
        num_tokens=np.array([1, 91]),
        finish=np.array([Finish.EOS, Finish.RUNNING]),
        stats=Stats(
            np.array([30, 30]),
            np.array([30, 90]),
            np.tile(stats.drafted, (2, 1)),
            stats.accepted * np.array([[0], [1]]),
        ),
    )
    stage.run.memory["knapspec"].measured.clear()
    assert stage.replan() == ONE
    record = stage.run.log[-1]
    assert record["length"] == 190 / 2
    assert record["measured_acceptance_before"] == pytest.approx(60 / 90)
    assert record["predicted_acceptance"] == pytest.approx((60 + 8 * 0.9) / (60 + 8))
