"""The plan with which a batch ends first, by acceptance that was predicted and measured."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_latency import PROFILE

from jaxspec.planning import PlannerOptions
from jaxspec.planning.choice import acceptance_by_row, time_to_end
from jaxspec.planning.plan import round_prices

SEEDS = st.integers(0, 2**32 - 1)
COSTS = PROFILE.costs(sparse=True)
# of 10 ms rounds that 0..8 drafts lengthen by 1 ms each
PRICE = 10.0 + np.arange(9)[None]


def rounds_by_hand(alpha, left, g):
    """Rounds of g drafts until as many tokens are emitted, one a round and one more for every draft accepted."""
    return left / sum(alpha**i for i in range(g + 1))


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.integers(1, 4), st.integers(1, 5))
def test_the_time_is_that_of_the_last_row(seed, kinds, rows):
    rng = np.random.default_rng(seed)
    alpha, left = rng.uniform(0, 1, (kinds, rows)), rng.integers(1, 1000, rows)
    price = rng.uniform(1, 9, (kinds, 8))
    expected = [
        [max(rounds_by_hand(alpha[c, b], left[b], g) for b in range(rows)) * price[c, g] for g in range(8)]
        for c in range(kinds)
    ]
    np.testing.assert_allclose(time_to_end(alpha, left, price), expected, rtol=1e-6)


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.integers(1, 4), st.integers(1, 5), st.sampled_from(["tpt", "tpl"]))
def test_of_equal_rows_it_is_tokens_per_second(seed, kinds, rows, value):
    """Or per layer; everywhere, so that the best plan is the one that the paper's objective finds."""
    rng = np.random.default_rng(seed)
    alpha, ran = rng.uniform(0, 1, kinds), rng.integers(1, 5, (2, kinds))
    price, _ = round_prices(*ran, COSTS, 1000.0, PlannerOptions(value=value), np)
    time = time_to_end(np.repeat(alpha[:, None], rows, axis=1), np.full(rows, 300), price)
    for c in range(kinds):
        for g in range(11):
            layers = g * ran[:, c].sum() / 2 + 4
            cost = layers if value == "tpl" else COSTS.round(*ran[:, c], g, 1000.0)
            assert 300 / time[c, g] == pytest.approx(sum(alpha[c] ** i for i in range(g + 1)) / cost)


@pytest.mark.parametrize(
    ("alpha", "left", "last"),
    [
        ((0.97,) * 4, (500,) * 4, 0),
        ((0.7,) * 4, (500,) * 4, 0),
        # the slow row decides, whatever the others accept
        ((0.97, 0.97, 0.97, 0.7), (500,) * 4, 3),
        # unless it has so little left that it ends before them
        ((0.97, 0.97, 0.97, 0.7), (500, 500, 500, 100), 0),
        ((0.97, 0.97, 0.97, 0.7), (900, 20, 20, 300), 0),
    ],
)
def test_drafts_are_as_long_as_the_row_that_ends_last_takes_them(alpha, left, last):
    """8 of them where it accepts 0.97, 4 where 0.7."""
    drafts = np.argmin(time_to_end(np.array([alpha]), np.array(left), PRICE))
    assert drafts == np.argmin([rounds_by_hand(alpha[last], 1, g) * PRICE[0, g] for g in range(9)])
    assert drafts == {0.97: 8, 0.7: 4}[alpha[last]]


def test_what_was_not_timed_is_not_chosen():
    costs = COSTS._replace(rows=3, overhead=1.0)
    price, seconds = round_prices(np.array([4]), np.array([4]), costs, 100.0, PlannerOptions(), np)
    assert np.isfinite(seconds).all()
    assert np.argmin(time_to_end(np.ones((1, 2)), np.array([9, 9]), price)) == 2


def test_without_measurements_the_prediction_stands():
    none = np.zeros((3, 4))
    pooled, rows = acceptance_by_row(0.9, np.array([1, 0.8, 0.5]), none, none, 32)
    np.testing.assert_allclose(pooled, [0.9, 0.72, 0.45])
    np.testing.assert_allclose(rows, np.repeat(pooled[:, None], 4, axis=1))


@pytest.mark.parametrize("weight", [8, 32])
def test_one_kind_is_a_beta_posterior_and_so_is_each_row(weight):
    """Over all rows the prediction counts `weight` drafts; in a row all rows' chance counts two rejected ones."""
    accepted, tried = np.array([[90, 40, 0]]), np.array([[100, 80, 0]])
    pooled, rows = acceptance_by_row(0.95, np.ones(1), accepted, tried, weight)
    everywhere = (130 + weight * 0.95) / (180 + weight)
    assert pooled == pytest.approx(everywhere)
    drafts = 2 / (1 - everywhere)
    expected = [(a + drafts * everywhere) / (t + drafts) for a, t in zip(accepted[0], tried[0], strict=True)]
    np.testing.assert_allclose(rows, [expected])


def test_what_skipping_nothing_measures_holds_for_what_skips():
    """580 of 600 against 0.9 predicted: a kind that leaves 0.8 of it is predicted to accept that much of the posterior,
    and a row that rejects more rejects more of it as well. A kind that was tried has its own posterior."""
    accepted, tried = np.array([[300, 280], [0, 0], [30, 20]]), np.array([[300, 300], [0, 0], [40, 40]])
    pooled, rows = acceptance_by_row(0.9, np.array([1, 0.8, 0.8]), accepted, tried, 32)
    nothing = (580 + 32 * 0.9) / (600 + 32)
    np.testing.assert_allclose(pooled, [nothing, 0.8 * nothing, (50 + 32 * 0.8 * nothing) / (80 + 32)])
    for b, rejected in enumerate([0 + 10, 20 + 20]):
        ratio = (rejected + 2) / (300 * (1 - pooled[0]) + 40 * (1 - pooled[2]) + 2)
        np.testing.assert_allclose(rows[:, b], 1 - (1 - pooled) * ratio)


def test_drafts_that_are_the_models_own_tokens_are_accepted_in_every_row():
    """What a row rejects of others says nothing of those that skip nothing and read every row."""
    tried = np.array([[0, 0], [50, 50]])
    pooled, rows = acceptance_by_row(1.0, np.array([1, 0.9]), np.array([[0, 0], [50, 10]]), tried, 32)
    assert pooled[0] == 1
    np.testing.assert_array_equal(rows[0], 1)
    assert rows[1, 1] < pooled[1] < rows[1, 0]


@pytest.mark.parametrize("share", [0.2, 1.5])
def test_chances_lie_between_0_and_1(share):
    tried = np.array([[500, 500], [0, 0]])
    pooled, rows = acceptance_by_row(0.5, np.array([1, share]), np.array([[500, 0], [0, 0]]), tried, 1)
    for values in (pooled, rows):
        assert values.min() >= 0
        assert values.max() <= 1


@pytest.mark.parametrize("spread", [0.05, 0.1])
def test_shrunken_rates_are_nearer_to_the_rows_than_their_own_or_the_pooled_ones(spread):
    """30 drafts a row, of rows whose chances spread around 0.85."""
    rng = np.random.default_rng(0)
    truth = np.minimum(rng.normal(0.85, spread, 4000), 1)
    tried = np.full((1, 4000), 30)
    accepted = rng.binomial(30, truth)[None]
    pooled, rows = acceptance_by_row(0.85, np.ones(1), accepted, tried, 32)
    error = np.mean((rows[0] - truth) ** 2)
    assert error < np.mean((accepted / tried - truth) ** 2)
    assert error < np.mean((pooled - truth) ** 2)
