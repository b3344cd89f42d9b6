"""When a new plan is made and taken over: clocks and plans by hand, nothing is computed."""

import dataclasses
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
PROFILE = LatencyProfile(2, 1, 11, LINE, 1e-3, 1e-3, LINE, 1e-3, 1e-3, 0.0)  # a plain step takes 5 ms
SLOW = dataclasses.replace(PROFILE, overhead=5e-3)  # 10 ms
ONE, TWO = Plan((True, False), (True, True), 2), Plan((True, True), (True, False), 2)


class Stage:
    """A run whose planner and compiler do as they are told, and a clock that only they and `decode` move.

    Planning finds `found`, and nothing is better in between; or with a `frontier` the controller chooses itself.
    """

    def __init__(self, monkeypatch, new_tokens=1000, compile_seconds=0.5, frontier=None, profile=PROFILE, **options):
        self.now, self.plan_seconds, self.compile_seconds = 0.0, 0.01, compile_seconds
        self.found, self.planned, self.compiled, self.gate = ONE, [], [], None
        self.frontier, self.searched, self.arguments = frontier, False, []
        self.method = KnapSpec(profile=profile, **options)
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

    def plan(self, *_, **arguments):
        self.now += self.plan_seconds
        self.planned.append(self.run.rounds)
        self.searched = True
        self.arguments.append(arguments)
        rate = 400.0 if self.found == ONE else 500.0
        return Planned(self.found, 0.9, rate, 200.0, (1, 1), self.frontier or ())

    def choose(self, method, run, memory, predicted):
        searched, self.searched = self.searched, False
        return memory.found if searched else dataclasses.replace(memory.found, plan=memory.plan)

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
    """All drafts accepted: the old plan makes 3 tokens in 2 * 4 + 5 ms. 910 tokens at 500 instead of 231 a second save
    2.1 s: worth half a second of compiling, not three."""
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


def test_a_plan_that_loses_is_not_taken(monkeypatch):
    """The old plan, by its measured acceptance, is better than what the planner promises for the new one."""
    stage = Stage(monkeypatch)
    monkeypatch.setattr(controller, "rate_of", lambda costs, plan, acceptance, n: 501.0)
    stage.replan()
    stage.found = TWO
    stage.decode(5.0, 90, 190)
    assert stage.replan() == ONE
    assert stage.run.log[-1]["taken"] == "not worth it"


def test_the_rate_of_a_plan_in_use():
    """(1 + a + a^2) tokens per round of two draft steps without one attention and a verification."""
    rate = controller.rate_of(PROFILE.costs(), ONE, 0.5, 100.0)
    assert rate == pytest.approx(1.75 / (2 * 4e-3 + 5e-3))
    assert controller.rate_of(PROFILE.costs(), ONE, None, 100.0) == pytest.approx(1 / (2 * 4e-3 + 5e-3))


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
    """The period grows from 64 rounds until 0.1 s of planning is 2% of the decoding time."""
    stage = Stage(monkeypatch, new_tokens=10**6, growth=1000.0)
    stage.plan_seconds = 0.1
    for segment in range(1, 200):
        stage.replan()
        changing(stage)
        assert len(stage.planned) == 1 or stage.run.replan_seconds <= 0.02 * stage.run.decode_seconds
        stage.decode(0.64, 90, 100 + segment)
    periods = np.diff(stage.planned)
    assert len(periods) >= 20
    assert set(periods[1:]) <= {7 * 64, 8 * 64}  # 5 s are 7.8 segments
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
    stage = Stage(monkeypatch, growth=1000.0, compile_seconds=100.0)
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


def beside_nothing(alpha):
    """A frontier of two: skipping nothing, accepted whole, makes 3 tokens in 2 * 5 + 10 ms, 150 a second; ONE in 8 +
    10 ms 151 at alpha = 0.9. A plain step makes 100."""
    nothing = Candidate(Plan(EVERY, EVERY, 2), 0, 1.0, 1.0, 0.0)
    return nothing, Candidate(ONE, 1, 0.9, alpha, 0.0)


def test_the_best_of_the_frontier_is_taken(monkeypatch):
    for alpha, expected in ((0.9, ONE), (0.88, Plan(EVERY, EVERY, 2))):
        stage = Stage(monkeypatch, frontier=beside_nothing(alpha), profile=SLOW, max_draft=2)
        assert stage.replan() == expected
    assert stage.run.log[0]["predicted_acceptance"] == 1
    assert stage.run.log[0]["predicted_tokens_per_second"] == pytest.approx(150)
    assert stage.run.log[0]["predicted_plain_tokens_per_second"] == pytest.approx(100)


@pytest.mark.parametrize("execution", ["static", "traced"])
def test_a_plan_that_measures_worse_is_given_up_without_a_search(monkeypatch, execution):
    """ONE at alpha = 0.5 makes 1.5 tokens in 4 + 10 ms, 107 a second; skipping nothing, if no draft is accepted, 67."""
    options = {"max_draft": 2, "profile": SLOW, "execution": execution, "compile_seconds": 0.01}
    stage = Stage(monkeypatch, frontier=beside_nothing(0.9), reference_tokens=8, **options)
    monkeypatch.setattr(controller, "_with", lambda method, run, chosen: (method.with_plan(chosen), run.state))
    assert stage.replan() == ONE
    # 15 rounds with one draft accepted and one rejected are too few: 4 * 8 drafts count
    stage.decode(0.1, 30, 130, rounds=15, accepted=1)
    assert stage.replan() == ONE
    assert stage.run.replan_at == 15 + 16
    stage.decode(0.1, 60, 160, rounds=15, accepted=1)
    assert stage.replan() == Plan(EVERY, EVERY, 2)
    assert stage.run.log[-1]["taken"] == "changed"
    assert (stage.run.log[-1]["seconds"], stage.run.log[-1]["measured_acceptance_before"]) == (0.0, 0.5)
    # which fails as well: then ONE is better with a single draft, and if it never hits plain decoding
    stage.decode(0.1, 100, 200, rounds=70, accepted=0)
    assert stage.replan() == dataclasses.replace(ONE, num_draft=1)
    stage.decode(0.1, 400, 500, rounds=300, accepted=0)
    assert stage.replan() == Plan(EVERY, EVERY, 0)
    assert stage.planned == [0]
    assert len(stage.run.log) == 4


def test_a_plan_that_measures_well_stays(monkeypatch):
    stage = Stage(monkeypatch, frontier=beside_nothing(0.9), profile=SLOW, max_draft=2, reference_tokens=8)
    stage.replan()
    stage.decode(0.1, 90, 120, rounds=30, accepted=2)
    assert stage.replan() == ONE
    assert len(stage.run.log) == 1


def test_a_search_is_told_what_skipping_nothing_measured_and_which_rows_run(monkeypatch):
    """30 rounds of two drafts, all accepted, of the row that runs; the other one ended, all of its drafts rejected."""
    stage = Stage(monkeypatch, frontier=beside_nothing(0.1), profile=SLOW, max_draft=2, planner_share=1.0)
    stage.replan()
    assert stage.arguments[0]["measured"] == (0, 0)
    stage.decode(1.0, 90, 190)
    state = stage.run.state
    drafted, accepted = state.stats.drafted, state.stats.accepted
    stats = Stats(np.array([30, 30]), np.array([30, 90]), np.tile(drafted, (2, 1)), accepted * np.array([[0], [1]]))
    finish = np.array([Finish.EOS, Finish.RUNNING])
    stage.run.state = SimpleNamespace(
        length=np.array([100, 190]), num_tokens=np.array([1, 91]), finish=finish, stats=stats
    )
    stage.replan()
    assert stage.arguments[1]["measured"] == (60, 60)
    assert stage.arguments[1]["running"].tolist() == [False, True]
    assert stage.run.log[-1]["length"] == 190 / 2
    assert stage.run.log[-1]["measured_acceptance_before"] == pytest.approx(60 / 90)
