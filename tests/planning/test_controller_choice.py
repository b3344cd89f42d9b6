"""Which plan is chosen: by a frontier, by what was measured of it, and by the rows that still run."""

from types import SimpleNamespace

import numpy as np
import pytest
from stage import EVERY, NOTHING, ONE, Stage, beside_nothing

from jaxspec import Plan
from jaxspec.types import Finish, Stats


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
