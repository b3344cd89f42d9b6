"""The choice of a plan from a frontier, and the lemma behind the similarity that it is built on."""

import dataclasses
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_latency import PROFILE

from jaxspec.methods import Models
from jaxspec.models import init_cache
from jaxspec.planning import LatencyProfile, Line, Plan, PlannerOptions, expected_tokens, plan
from jaxspec.planning.measure import measured_profile
from jaxspec.planning.plan import acceptance_of, fitted, largest_weight, round_prices, sublayer_weights
from jaxspec.types import KVSelection, KVSelector
from tests.reference import tiny_model

LAYERS, LENGTHS = 4, np.array([30, 21], np.int32)
OPTIONS = PlannerOptions(max_draft=4, max_cells=8, tau=-1.0, reference_tokens=8, clip=2)
# a verification costs the same whatever it verifies, and much more than a draft
CHEAP_DRAFTS = dataclasses.replace(PROFILE, overhead=1.0)


@cache
def committed():
    models = Models(*tiny_model(num_hidden_layers=LAYERS, seed=1))
    prompt = np.random.default_rng(0).integers(0, 61, (2, 32)).astype(np.int32)
    cache = init_cache(models.target.config, 2, 64, jnp.float32)
    cache = jax.jit(models.forward)(prompt, cache, jnp.int32(0)).cache
    return models, cache, prompt, LENGTHS, np.zeros((2, 1), np.int32), LENGTHS


def search(profile, options=OPTIONS, **more):
    return plan(*committed(), profile, options, **more)


def predicted(candidate, g, profile, sparse=False):
    """The closed form, by hand."""
    p, n = candidate.plan, LENGTHS.mean()
    return sum(candidate.alpha**i for i in range(g + 1)) / profile.costs(sparse).round(p.num_attention, p.num_mlp, g, n)


def test_a_measured_profile_serves_the_lengths_that_were_timed(monkeypatch):
    timed = []

    def measure(models, batch, contexts, **options):
        timed.append(contexts)
        return SimpleNamespace(profile=dataclasses.replace(PROFILE, batch=batch))

    monkeypatch.setattr("jaxspec.planning.measure.measure", measure)
    models = committed()[0]
    for batch, longest in ((7, 40), (7, 10), (7, 25), (7, 9), (7, 41), (8, 40), (7, 41)):
        assert measured_profile(models, batch, longest, 3, None).batch == batch
    assert timed == [[10, 20, 40], [2, 4, 9], [10, 20, 41], [10, 20, 40]]


def test_no_more_drafts_are_planned_than_verification_was_measured_with():
    chosen = {rows: search(dataclasses.replace(CHEAP_DRAFTS, rows=rows)).plan.num_draft for rows in (2, 3, 5, 11)}
    assert chosen == {2: 1, 3: 2, 5: OPTIONS.max_draft, 11: OPTIONS.max_draft}


@pytest.mark.parametrize("profile", [PROFILE, CHEAP_DRAFTS], ids=["dear", "cheap"])
def test_the_best_cell_and_number_of_drafts_are_chosen(profile):
    found = search(profile)
    assert len(found.frontier) >= 4
    for c in found.frontier:
        rates = [predicted(c, g, profile) for g in range(OPTIONS.max_draft + 1)]
        assert c.tokens_per_second == pytest.approx(max(rates), rel=1e-5)
        assert rates[c.plan.num_draft] == pytest.approx(max(rates), rel=1e-5)
    best = max(c.tokens_per_second for c in found.frontier)
    assert found.tokens_per_second == pytest.approx(best, rel=1e-6)
    assert found.plain_tokens_per_second == pytest.approx(1 / profile.costs().round(0, 0, 0, LENGTHS.mean()), rel=1e-5)
    assert found.tokens_per_second >= found.plain_tokens_per_second
    if profile is PROFILE:
        # few tokens are accepted here, and a draft costs nearly what it saves
        assert found.plan == Plan((True,) * LAYERS, (True,) * LAYERS, 0)
    else:
        assert found.plan.num_draft == OPTIONS.max_draft


def test_raw_and_smoothed_acceptance():
    """Drafts without a selection that skip nothing are the model's own tokens, whatever the number of tokens seen."""
    raw = search(CHEAP_DRAFTS, dataclasses.replace(OPTIONS, alpha="raw"))
    smoothed = search(CHEAP_DRAFTS)
    for c, other in zip(raw.frontier[1:], smoothed.frontier[1:], strict=True):
        hits = round(8 * c.alpha)
        assert other.alpha == pytest.approx(share_left(hits, 8))
    assert raw.frontier[0].alpha == smoothed.frontier[0].alpha == 1


def share_left(hits, of):
    """The mean less the deviation of what a uniform prior on [0, 1] becomes, integrated by hand."""
    x = (np.arange(100_000) + 0.5) / 100_000
    density = x**hits * (1 - x) ** (of - hits)
    mean = np.sum(density * x) / np.sum(density)
    return mean - np.sqrt(np.sum(density * (x - mean) ** 2) / np.sum(density))


def test_what_skipping_costs_is_judged_beside_skipping_nothing():
    """Of 30 tokens that drafts over selected rows hit, all, 27 and none are left; to hit more than those is chance.
    Those drafts themselves are judged with 64 others, of which 97% were accepted."""
    hits = np.array([30, 30, 27, 0, 32])
    left = np.array([1, share_left(30, 30), share_left(27, 30), share_left(0, 30), share_left(30, 30)])
    np.testing.assert_allclose(acceptance_of(hits, 32, "smoothed", selects=True), (30 + 62.08) / 96 * left, rtol=1e-5)
    # without a selection only rounding tells them from the model, and they are not smoothed
    whole = acceptance_of(np.array([32, 27]), 32, "smoothed", selects=False)
    np.testing.assert_allclose(whole, [1, share_left(27, 32)], rtol=1e-5)
    np.testing.assert_allclose(acceptance_of(hits, 32, "raw", selects=True), hits / 32)


@pytest.mark.parametrize(
    ("context", "ran", "hits"), [(4096, (22, 25), (30, 28)), (16384, (23, 26), (31, 30)), (31000, (25, 28), (31, 31))]
)
def test_few_tokens_do_not_make_skipping_pay(context, ran, hits):
    """Latencies of 16 rows of a model of 1.5B parameters that read 5% of their caches. Drafts of those sublayers made
    decoding 0.97, 0.76 and 1.74 times as fast, drafts of all of them 1.03, 1.38 and 1.79 times. By their hits of 32
    tokens, those of all sublayers first, each judged alone the former promise more, but not beyond their error."""
    line = Line(3.64e-9, 2.0e-5)
    measured = {"verify_attention": Line(3.9e-9, 3.3e-5), "verify_mlp": 4.2e-5, "verify_head": 2.3e-4, "overhead": 3e-5}
    sparse = {"selected": Line(6.3e-10, 2.3e-5), "scoring": Line(8e-10, 1.8e-5)}
    costs = LatencyProfile(28, 16, 10, line, 2.7e-5, 1.9e-4, **measured, **sparse).costs(sparse=True)
    _, seconds = round_prices(np.array([28, ran[0]]), np.array([28, ran[1]]), costs, context, PlannerOptions(), np)

    def rates(alpha):
        return np.max(expected_tokens(np.asarray(alpha)[:, None], np.arange(11)) / seconds, axis=1)

    alone = rates((np.array(hits) + 1) / 34)
    assert alone[1] > alone[0]
    beside = rates(acceptance_of(np.array(hits), 32, "smoothed", selects=True))
    assert beside[0] > beside[1]


def test_blocks_by_tokens_per_layer_is_clasp():
    """Whole blocks, uniform weights, and TPL = E / (g l + L) instead of measured times."""
    options = dataclasses.replace(OPTIONS, items="blocks", value="tpl")
    for profile in (PROFILE, CHEAP_DRAFTS):
        found = search(profile, options)
        assert found.weights == (1, 1)
        assert [c.weight for c in found.frontier] == [0, 1, 2]
        values = {}
        for c in found.frontier:
            assert c.plan.attn == c.plan.mlp
            for g in range(OPTIONS.max_draft + 1):
                values[c.weight, g] = expected_tokens(c.alpha, g) / (g * c.plan.num_mlp + LAYERS)
        weight, g = max(values, key=values.get)
        assert found.plan == dataclasses.replace(found.frontier[weight].plan, num_draft=g)


def test_a_selection_is_what_the_cells_read():
    """Cell 0 over all rows agrees with the full model, over few it does not; over all of them listed it does again. A
    selector is asked for its rows. Costs are those of sparse attention."""
    every = np.broadcast_to(np.arange(32, dtype=np.int32), (1, 2, 32))
    first = np.where(every < 2, every, -1)
    found = search(CHEAP_DRAFTS)

    def over(rows, valid=LENGTHS):
        return search(CHEAP_DRAFTS, selection=KVSelection(rows=rows, valid=valid, window=40))

    whole = over(every)
    for c, other in zip(whole.frontier, found.frontier, strict=True):
        assert c.similarity == pytest.approx(other.similarity, abs=1e-5)
        assert c.alpha == pytest.approx((8 + 62.08) / 72 * other.alpha)  # 8 hits of 8 say no more of a selection
        assert c.tokens_per_second == pytest.approx(predicted(c, c.plan.num_draft, CHEAP_DRAFTS, True), rel=1e-5)
    few = over(first)
    assert few.frontier[0].similarity < 0.999
    # rows newer than those that were chosen from are read as well
    assert over(first, np.full(2, 2, np.int32)).frontier[0].similarity == pytest.approx(1, abs=1e-6)
    selector = KVSelector(state=first[0], valid=LENGTHS, select=lambda _, q, c, p, s: s, window=4)
    asked = search(CHEAP_DRAFTS, selection=selector)
    assert asked.frontier[0].similarity == pytest.approx(few.frontier[0].similarity, abs=1e-6)


def test_not_to_speculate_stays_when_nothing_is_alike():
    found = search(CHEAP_DRAFTS, dataclasses.replace(OPTIONS, tau=0.99999), selection=KVSelection(
        rows=jnp.zeros((1, 2, 1), jnp.int32), valid=LENGTHS, window=1))  # fmt: skip
    assert found.frontier == ()
    assert found.plan.num_draft == 0
    costs, n = CHEAP_DRAFTS.costs(sparse=True), float(np.mean(LENGTHS))
    # rows are scored all the same
    assert 1 / found.tokens_per_second == pytest.approx(costs.round(4, 4, 0, n), rel=1e-5)
    assert 1 / found.plain_tokens_per_second == pytest.approx(costs.plain_step(n), rel=1e-5)


@pytest.mark.parametrize(
    ("attention", "mlp", "weights"),
    [(1.0, 1.0, (1, 1)), (1.0, 2.4, (1, 2)), (7.0, 2.0, (4, 1)), (1.0, 100.0, (1, 5)), (0.0, 1.0, (1, 5))],
)
def test_weights(attention, mlp, weights):
    """Rounded multiples of the cheaper sublayer's time, clipped."""
    profile = dataclasses.replace(PROFILE, attention=Line(attention / 1000, 0.0), mlp=mlp)
    assert tuple(sublayer_weights(profile.costs(), 1000, 5)) == weights


@pytest.mark.parametrize(
    ("layers", "cells", "clip"), [(10, 64, 5), (28, 64, 3), (32, 64, 2), (80, 64, 1), (28, 256, 5)]
)
def test_weights_are_clipped_so_that_cells_suffice(layers, cells, clip):
    options = PlannerOptions(max_cells=cells)
    assert largest_weight(layers, options) == clip
    assert clip == 1 or layers * (1 + clip) // 2 < cells


@pytest.mark.parametrize(
    ("layers", "mlp", "lengths", "cells"),
    [
        (28, 1.0, (900, 1000), 32),  # weights 1 and 1: up to 28 of 56
        (28, 1.0, (1000, 2000), 48),  # up to 2 and 1: 42 of 84
        (28, 1.0, (100, 1000), 64),  # 1 and 3, as they are clipped, at the short end
        (28, 0.1, (900, 1000), 64),
        (4, 1.0, (900, 1000), 8),
        (80, 1.0, (900, 1000), 64),
    ],
)
def test_branches_are_fitted_to_the_weights(layers, mlp, lengths, cells):
    profile = dataclasses.replace(PROFILE, attention=Line(1e-6, 0.0), mlp=mlp / 1000)
    assert fitted(PlannerOptions(), profile.costs(), layers, lengths).max_cells == cells
    blocks = PlannerOptions(items="blocks")
    assert fitted(blocks, profile.costs(), layers, lengths).max_cells == -(-(layers // 2 + 1) // 8) * 8


@pytest.mark.parametrize("attention", [0.4, 1.0, 1.9, 9.0])
def test_fitted_branches_find_the_same_plan(attention):
    profile = dataclasses.replace(CHEAP_DRAFTS, attention=Line(0.0, attention * CHEAP_DRAFTS.mlp))
    options = dataclasses.replace(OPTIONS, max_cells=64, clip=5)
    few = fitted(options, profile.costs(), LAYERS, (LENGTHS.mean(), 1000))
    assert few.max_cells < 64
    found, whole = search(profile, few), search(profile, options)
    assert (found.plan, found.weights, len(found.frontier)) == (whole.plan, whole.weights, len(whole.frontier))
    assert found.tokens_per_second == pytest.approx(whole.tokens_per_second, rel=1e-6)


def test_a_profile_of_another_model():
    with pytest.raises(ValueError, match="model with 7 layers, this one: 4"):
        search(dataclasses.replace(PROFILE, num_layers=7))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 12), st.integers(2, 8), st.floats(0.001, 0.999))
def test_a_state_similar_enough_keeps_the_likeliest_token(seed, vocab, width, share):
    """Lemma 4.1: of equal norms, cos >= 1 - margin^2 / (2 |x|^2 max_j |w_best - w_j|^2) keeps the argmax of W x."""
    rng = np.random.default_rng(seed)
    head, x, direction = rng.normal(size=(vocab, width)), rng.normal(size=width), rng.normal(size=width)
    logits = head @ x
    best = int(np.argmax(logits))
    margin = logits[best] - np.max(np.delete(logits, best))
    apart = np.max(np.sum((head[best] - head) ** 2, axis=1))
    bound = 1 - margin**2 / (2 * (x @ x) * apart)
    cosine = max(1 - share * (1 - bound), -1.0)
    # the state of this cosine and norm towards a random side
    direction -= direction @ x / (x @ x) * x
    direction *= np.linalg.norm(x) / np.linalg.norm(direction)
    y = cosine * x + np.sqrt(1 - cosine**2) * direction
    assert np.linalg.norm(y) == pytest.approx(np.linalg.norm(x))
    assert int(np.argmax(head @ y)) == best


def test_the_lemmas_bound_is_sharp():
    """Two tokens: beyond the bound there is a state that another token wins."""
    head, x = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([0.8, 0.6])
    bound = 1 - 0.2**2 / (2 * 1 * 2)
    turn = np.arccos(bound - 0.003)
    y = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]) @ x
    assert np.argmax(head @ y) != np.argmax(head @ x)
