"""`draft_chain`, and exactness under unlike samplings and early stops."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from method_cases import Case, make_case, tiny_model

from jaxspec import Sampling
from jaxspec.drafting import ForcedDraws, draft_chain, self_draft
from jaxspec.enumeration import plain_distribution, speculative_distribution
from jaxspec.methods import Method, Models
from jaxspec.types import Finish, ForwardOut

TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(5, 5)) * 2, jnp.float32)  # logits after each token


def chain(sampling, keys, num_draft=4, token=(0, 3), **options):
    """The draft, and what each step was fed: int32 [g, B], -1 where none ran."""

    def step(fed, token, slot):
        return TABLE[token], fed.at[slot].set(token)

    fed = jnp.full((num_draft, len(token)), -1, jnp.int32)
    return draft_chain(step, fed, jnp.array(token, jnp.int32), num_draft, sampling, keys, **options)


def test_greedy_chain():
    draft, fed = chain(Sampling(), jax.random.split(jax.random.key(0), 2))
    assert draft.probs is None
    for b, token in enumerate((0, 3)):
        for i in range(4):
            assert int(fed[i, b]) == token
            token = int(np.argmax(TABLE[token]))
            assert int(draft.tokens[b, i]) == token
    assert draft.count.tolist() == [4, 4]


def test_sampled_chain_keeps_the_probabilities_it_drew_from():
    sampling = Sampling(0.8, top_k=3)
    draft, fed = chain(sampling, jax.random.split(jax.random.key(1), 2))
    for i in range(4):
        logits = np.asarray(TABLE[fed[i]], np.float64) / 0.8
        logits[logits < np.sort(logits, axis=1)[:, 2:3]] = -np.inf
        expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(draft.probs[:, i], expected, atol=1e-6)
        assert np.all(expected[np.arange(2), draft.tokens[:, i]] > 0)


def test_each_slot_is_drawn_from_its_distribution():
    """Frequencies of 20,000 chains against the product of the table's rows: chi-square, 24 degrees of freedom."""
    keys = jax.random.split(jax.random.key(2), 20_000)
    draft, _ = chain(Sampling(1.0), keys, num_draft=2, token=(0,) * 20_000)
    seen = np.bincount(np.asarray(draft.tokens) @ np.array([5, 1]), minlength=25)
    rows = np.asarray(jax.nn.softmax(TABLE.astype(jnp.float32)), np.float64)
    expected = 20_000 * (rows[0][:, None] * rows).reshape(-1)
    assert np.sum((seen - expected) ** 2 / expected) < 60  # p < 1e-4 above


def test_forced_draws():
    forced = jnp.array([[1, 2, 0, 4], [4, 4, 4, 4]], jnp.int32)
    draws = ForcedDraws(forced)
    draft, _ = chain(Sampling(1.0), draws)
    np.testing.assert_array_equal(draft.tokens, forced)
    rows = np.asarray(jax.nn.softmax(TABLE))
    np.testing.assert_allclose(draws.chance[0], rows[0, 1] * rows[1, 2] * rows[2, 0] * rows[0, 4], rtol=1e-5)
    np.testing.assert_allclose(draft.probs[0, 1], jax.nn.softmax(TABLE[1]), atol=1e-6)


def test_the_token_that_an_early_stop_sees_is_still_used():
    stops = np.asarray(jax.nn.softmax(TABLE).max(axis=1) < 0.6)
    assert 0 < stops.sum() < 5
    forced = jnp.asarray(np.random.default_rng(1).integers(0, 5, (40, 4)), jnp.int32)

    def ends(logits):
        return jax.nn.softmax(logits).max(axis=1) < 0.6

    first = int(np.argmin(stops))
    draft, _ = chain(Sampling(1.0), ForcedDraws(forced), token=(first,) * 40, ends=ends)
    for b in range(40):
        fed = [first, *forced[b, :3].tolist()]
        assert int(draft.count[b]) == next((i + 1 for i in range(4) if stops[fed[i]]), 4)
    assert len(set(draft.count.tolist())) > 1


def test_the_loop_ends_with_its_last_row():
    def ends(logits):
        return logits[:, 0] == TABLE[start, 0]

    start = int(np.argmax(TABLE[0]))
    draft, fed = chain(Sampling(), jax.random.split(jax.random.key(0), 2), token=(0, start), ends=ends)
    assert draft.count.tolist() == [2, 1]
    assert (fed[:, 0] >= 0).tolist() == [True, True, False, False]


@pytest.mark.parametrize("num_draft", [1, 4])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "sampled"])
def test_a_first_step_of_its_own(sampling, num_draft):
    def first(fed, token):
        return TABLE[4 - token], fed.at[0].set(token)

    keys = jax.random.split(jax.random.key(0), 2)
    draft, fed = chain(sampling, keys, num_draft, first=first)
    rest, _ = chain(sampling, keys, num_draft, token=(4, 1))
    np.testing.assert_array_equal(draft.tokens, rest.tokens)
    np.testing.assert_array_equal(fed[0], [0, 3])


def test_no_drafts():
    draft, fed = chain(Sampling(1.0), jax.random.split(jax.random.key(0), 2), num_draft=0)
    assert draft.tokens.shape == (2, 0)
    assert draft.count.tolist() == [0, 0]
    assert draft.probs is None
    assert fed.shape == (0, 2)


def total_variation(case, sampling, rounds=1):
    prompt = [1, 0, 2, 1, 1, 0]
    mine, accepted = speculative_distribution(case.models, case.method, prompt, 1, sampling, rounds)
    plain = plain_distribution(Models(case.models.target, case.models.params), prompt, 1, sampling, mine.ndim)
    return 0.5 * np.abs(mine - plain).sum(), accepted, plain


@pytest.mark.parametrize(
    ("draft_sampling", "sampling"),
    [
        (Sampling(1.0, top_k=2), Sampling(1.0, top_k=3)),
        (Sampling(), Sampling(1.3, top_p=0.9)),
        (Sampling(0.5, min_p=0.1), Sampling(1.0, top_k=5, top_p=0.9, min_p=0.02)),
    ],
    ids=["top-k 2 for 3", "greedy drafts", "mixed filters"],
)
def test_draft_and_target_sampled_differently(draft_sampling, sampling):
    case = make_case("draft-model", layers=1, vocab=8, draft_sampling=draft_sampling)
    distance, accepted, plain = total_variation(case, sampling)
    assert distance < 1e-6
    assert 0.05 < accepted < 1.95
    assert (plain == 0).any()


@dataclasses.dataclass(frozen=True)
class FlatDrafts(Method):
    """Drafts from a fixed table by the last token; `stop` says how its length is decided."""

    num_draft: int = 2
    stop: str = "distribution"

    @property
    def max_draft(self):
        return self.num_draft

    def draft(self, models, state, sampling, keys):
        def step(carry, token, slot):
            return jnp.array([[2.0, 0, 0], [0, 0.3, 0], [0, 1.0, 1.0]])[token], carry

        def ends(logits):
            return jax.nn.softmax(logits).max(axis=1) < 0.42

        draft, _ = draft_chain(
            step, (), state.last_token, 2, sampling, keys, ends=ends if self.stop == "distribution" else None
        )
        if self.stop == "draw":  # the fault: a slot is dropped because of the token drawn for it
            likely = jnp.take_along_axis(draft.probs, draft.tokens[..., None], axis=-1)[..., 0] >= 0.4
            draft = draft.replace(count=jnp.sum(jnp.cumprod(likely, axis=1), axis=1).astype(jnp.int32))
        return draft, state.cache, ()


def test_an_early_stop_that_varies_by_path_is_exact():
    case = Case("flat", FlatDrafts(), Models(*tiny_model(1, 3)))
    assert total_variation(case, Sampling(1.0), rounds=2)[0] < 1e-6


def test_dropping_a_drawn_token_is_found_out():
    case = Case("flat", FlatDrafts(stop="draw"), Models(*tiny_model(1, 3)))
    assert total_variation(case, Sampling(1.0), rounds=2)[0] > 0.01


def test_a_method_that_ignores_forced_draws_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Stubborn(FlatDrafts):
        def draft(self, models, state, sampling, keys):
            draft, *rest = super().draft(models, state, sampling, keys)
            return draft.replace(tokens=jnp.zeros_like(draft.tokens)), *rest

    case = Case("stubborn", Stubborn(), Models(*tiny_model(1, 3)))
    with pytest.raises(ValueError, match="does not follow forced draws"):
        total_variation(case, Sampling(1.0))


def test_a_row_that_has_ended_does_not_prolong_the_draft():
    """Only its logits are never unsure; the loop ends with the rows that still run."""

    def forward(tokens, cache, start):
        return ForwardOut(jnp.tile(jnp.array([0.0, 1.0]), (2, 1, 1)), cache + 1, None, (), None)

    state = SimpleNamespace(
        cache=jnp.int32(0),
        length=jnp.zeros(2, jnp.int32),
        last_token=jnp.zeros(2, jnp.int32),
        finish=jnp.array([Finish.EOS, Finish.RUNNING], jnp.int8),
    )
    draft, steps = self_draft(forward, state, 5, Sampling(), None, ends=lambda logits: jnp.array([False, True]))
    assert steps == 1
    assert draft.count[1] == 1
