"""What the tests of KnapSpec's controller share: a run whose clock and plans are by hand; nothing is computed."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np

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
        # what other tests compiled
        monkeypatch.setattr("jaxspec.replanning._compile_seconds", defaultdict(dict))
        self.begin(new_tokens)
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(controller, "time", clock)
        monkeypatch.setattr("jaxspec.replanning.time", clock)
        monkeypatch.setattr(controller, "plan", self.plan)
        if frontier is None:
            monkeypatch.setattr(controller, "_choose", self.choose)
        # a traced plan would go into the state, which is none here
        monkeypatch.setattr(controller, "_with", lambda method, run, chosen: (method.with_plan(chosen), run.state))
        monkeypatch.setattr(controller, "_arguments", lambda run: ())
        monkeypatch.setattr(controller, "search_plan", SimpleNamespace(
            lower=lambda *_: SimpleNamespace(compile=lambda: None)))  # fmt: skip

    def begin(self, new_tokens=1000):
        """Another run in the same process."""
        self.run = Run(None, None, new_tokens, self.state(0, 100), self.lower, "a stage")

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
