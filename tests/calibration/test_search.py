"""Attention recall and the search of a configuration, against brute force."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.calibration.search import (
    Budget,
    HeadSet,
    Trace,
    arr,
    arr_by_split,
    best_split,
    choose,
    mean_arr,
    oracle,
    recency,
    search,
)
from jaxspec.dustin.scoring import choose_rows

SMALL = Budget(12, sinks=2, window=3)


def random_trace(seed, n=40, layers=3, candidates=4):
    """Attention as peaked as real attention is; signals that know some of it."""
    rng = np.random.default_rng(seed)
    weights = rng.gamma(0.1, size=(layers, n)) + 1e-6
    weights /= weights.sum(axis=1, keepdims=True)
    noisy = [weights.mean(axis=0) * rng.lognormal(0, 0.3 + i, n) for i in range(2 * candidates)]
    return Trace(*(np.asarray(x, np.float32) for x in (weights, noisy[:candidates], noisy[candidates:])))


TRACES = [random_trace(seed) for seed in range(5)]
LAYERS = [HeadSet(layer, (0, 1)) for layer in range(4)]


def test_recall_of_a_set():
    weights = np.array([[0.5, 0.25, 0.25, 0], [0.1, 0.2, 0.3, 0.4]])
    np.testing.assert_allclose(arr(weights, np.array([0, 3])), [0.5, 0.5])
    np.testing.assert_allclose(arr(2 * weights, np.array([2])), [0.25, 0.3])


@pytest.mark.parametrize("signal", ["hybrid", "history", "draft", "recency", "oracle"])
def test_recall_grows_with_the_budget_and_no_set_beats_the_oracle(signal):
    select = {
        "hybrid": lambda t, b: choose(b, t.history[0], t.draft[0], b.free // 2),
        "history": lambda t, b: choose(b, t.history[0], None, 0),
        "draft": lambda t, b: choose(b, None, t.draft[0], 0),
        "recency": lambda t, b: recency(b, t.weights.shape[1]),
        "oracle": lambda t, b: oracle(b, t.weights),
    }[signal]
    for trace in TRACES:
        values = []
        for rows in (6, 8, 12, 20, 39, 40, 60):
            budget = Budget(rows, 2, 3)
            chosen = select(trace, budget)
            assert len(set(chosen.tolist())) == len(chosen) == min(rows, 40)
            values.append(np.mean(arr(trace.weights, chosen)))
            assert values[-1] <= np.mean(arr(trace.weights, oracle(budget, trace.weights))) + 1e-6
        # a hybrid with another split may lose a row that counts, but no ranking alone can
        assert signal == "hybrid" or np.all(np.diff(values) >= -1e-7)
        assert values[0] < values[-1]
        np.testing.assert_allclose(values[-2:], 1, atol=1e-6)


def test_the_oracle_is_the_best_of_all_sets():
    trace, budget = random_trace(9, n=9), Budget(3, 0, 0)
    best = max(np.mean(arr(trace.weights, np.array(rows))) for rows in itertools.combinations(range(9), 3))
    assert np.mean(arr(trace.weights, oracle(budget, trace.weights))) == pytest.approx(best)


@pytest.mark.parametrize("split", [0, 3, 7])
@pytest.mark.parametrize("n", [40, 13, 12, 4])
def test_sets_are_those_of_decoding(n, split):
    rng = np.random.default_rng(n)
    history, draft = rng.random((2, n)).astype(np.float32)
    for scores in ((history, draft), (history, None), (None, draft)):
        padded = [None if s is None else jnp.asarray(np.pad(s, (0, 64 - n)))[None] for s in scores]
        rows = choose_rows(*padded, jnp.array([n]), budget=12, sinks=2, window=3, split=split, backend=None)
        rows = np.asarray(rows[0, 0])
        assert set(rows[rows >= 0].tolist()) == set(choose(SMALL, *scores, split).tolist())


def test_every_split_is_tried():
    for trace in TRACES:
        values = arr_by_split(trace, 1, (0, 2), SMALL)
        ahead = np.mean(trace.draft[[0, 2]], axis=0)
        expected = [np.mean(arr(trace.weights, choose(SMALL, trace.history[1], ahead, m))) for m in range(8)]
        np.testing.assert_allclose(values, expected, atol=1e-6)
    split, value = best_split(TRACES, 1, (0, 2), SMALL)
    totals = np.mean([arr_by_split(trace, 1, (0, 2), SMALL) for trace in TRACES], axis=0)
    assert split == np.argmax(totals)
    assert value == pytest.approx(totals.max())
    short = [random_trace(0, n=10)]
    np.testing.assert_allclose(arr_by_split(short[0], 0, (0,), SMALL), 1, atol=1e-6)
    assert best_split(short, 0, (0,), SMALL)[0] == 0


def test_the_search_is_greedy_over_layers():
    said = []
    found = search(TRACES, LAYERS, LAYERS, SMALL, most_draft_layers=3, progress=said.append)

    def value(target, draft, split):
        def select(trace):
            ahead = np.mean(trace.draft[list(draft)], axis=0) if draft else None
            return choose(SMALL, trace.history[target], ahead, split)

        return np.mean(mean_arr(TRACES, select))

    alone = [value(i, (), 0) for i in range(4)]
    assert found.target == np.argmax(alone)
    chosen, best = (), max(alone)
    for step in range(3):
        grown = {i: value(found.target, (*chosen, i), SMALL.free // 2) for i in range(4) if i not in chosen}
        more = max(grown, key=grown.get)
        if grown[more] <= best and step:
            break
        chosen, best = (*chosen, more), grown[more]
    assert found.draft == chosen
    assert found.split == best_split(TRACES, found.target, chosen, SMALL)[0]
    assert len(said) == len(found.steps) == 2 + len(chosen)
    assert said[0] == f"target layer {found.target}, ARR {max(alone):.3f}"


@pytest.mark.parametrize(("same", "expected"), [(True, HeadSet(1, (0, 1))), (False, HeadSet(1, (0, 5)))])
def test_heads_that_share_a_kv_head_are_preferred_where_recall_is_the_same(same, expected):
    """The second variant of a layer is as good as the first, or it is not."""
    options = [HeadSet(0, (0, 5)), HeadSet(1, (0, 5)), HeadSet(1, (0, 1))]
    traces = []
    for trace in TRACES:
        good, noise = trace.weights.mean(axis=0), np.random.default_rng(1).random(40)
        signals = np.stack([noise, good, good * (1 + 1e-6) if same else noise]).astype(np.float32)
        traces.append(Trace(trace.weights, signals, signals))
    found = search(traces, options, options, SMALL)
    assert options[found.target] == expected
    assert options[found.draft[0]] == expected
    assert len({options[i].layer for i in found.draft}) == len(found.draft)
