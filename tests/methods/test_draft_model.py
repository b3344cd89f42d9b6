import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from method_cases import Case, plain_case, similar_model, tiny_model

from jaxspec import Sampling
from jaxspec.enumeration import plain_distribution, speculative_distribution
from jaxspec.methods import DraftModel, Models

# in round 24 row b offers b + 1 drafts, so that every slot is rejected once
REJECTED_ROUND, EMPTY_ROUNDS = 24, range(60, 63)


@dataclasses.dataclass(frozen=True)
class Disturbed(DraftModel):
    """Offers 1 to 8 drafts in turn; in one round draft b of row b is wrong, and for a few rounds none are offered."""

    def draft(self, models, state, sampling, keys):
        draft, cache, own = super().draft(models, state, sampling, keys)
        row = jnp.arange(draft.count.shape[0])
        wrong = (state.round == REJECTED_ROUND) & (jnp.arange(self.num_draft) == row[:, None])
        empty = (state.round >= EMPTY_ROUNDS.start) & (state.round < EMPTY_ROUNDS.stop)
        tokens = jnp.where(wrong, (draft.tokens + 1) % models.target.config.vocab_size, draft.tokens)
        count = jnp.where(empty, 0, (state.round + row) % self.num_draft + 1)
        return draft.replace(tokens=tokens, count=count.astype(jnp.int32)), cache, own


def test_a_draft_model_that_is_the_target_is_always_accepted():
    """1 to 8 drafts per round, 200 rounds, with a rejection at every slot and rounds without drafts between."""
    target, params = tiny_model(1)
    prompt = np.random.default_rng(0).integers(0, 18, (8, 12)).astype(np.int32)
    out = Case("twin", Disturbed(model=target, num_draft=8), Models(target, params, params)).generate(
        prompt, np.arange(1, 9) + 4, jax.random.key(0), max_new_tokens=1100
    )
    for b in range(8):
        rounds = int(out.stats.rounds[b])
        assert rounds >= 200
        number = np.arange(1, rounds + 1)  # the prefill is round 0
        expected = (number + b) % 8 + 1
        expected[REJECTED_ROUND - 1] = min(expected[REJECTED_ROUND - 1], b)
        expected[[r - 1 for r in EMPTY_ROUNDS]] = 0
        np.testing.assert_array_equal(out.stats.accepted[b, :rounds], expected)


@pytest.mark.parametrize("g", [1, 3])
def test_its_own_sampled_drafts_are_accepted(g):
    target, params = tiny_model(1)
    prompt = np.random.default_rng(0).integers(0, 18, (2, 12)).astype(np.int32)
    out = Case("twin", DraftModel(model=target, num_draft=g), Models(target, params, params)).generate(
        prompt, [12, 3], jax.random.key(0), max_new_tokens=200 * (g + 1) + 1, sampling=Sampling(1.0)
    )
    # p and q come from programs of different shapes, so p / q may fall short of 1 by rounding: about 1e-6 per token
    for b in range(2):
        rounds = int(out.stats.rounds[b])
        assert 200 <= rounds <= 201
        assert np.sum(out.stats.accepted[b, :rounds] < g) <= 1


@pytest.mark.parametrize("extra", [-1, 2], ids=["fewer ids", "more ids"])
def test_vocabularies_of_different_sizes(extra):
    target, params = tiny_model(1, 3)
    draft, draft_params = similar_model(1, 3, extra)
    models = Models(target, params, draft_params)
    prompt = [2, 0, 2, 1, 2]
    mine, accepted = speculative_distribution(models, DraftModel(model=draft, num_draft=2), prompt, 2, Sampling(1.0), 2)
    plain = plain_distribution(Models(target, params), prompt, 2, Sampling(1.0), mine.ndim)
    assert 0.5 * np.abs(mine - plain).sum() < 1e-6
    assert 0.01 < accepted < 1.99
    assert plain.sum(axis=(1, 2, 3, 4, 5))[2] > 0.05  # the id that one draft model lacks is emitted


def test_greedy_with_fewer_ids_is_plain_decoding():
    target, params = tiny_model(1)
    draft, draft_params = similar_model(1, extra=-6)
    prompt = np.random.default_rng(0).integers(0, 18, (2, 12)).astype(np.int32)
    case = Case("short", DraftModel(model=draft, num_draft=3), Models(target, params, draft_params))
    mine, plain = (
        c.generate(prompt, [12, 3], jax.random.key(0), max_new_tokens=30) for c in (case, plain_case(layers=1))
    )
    np.testing.assert_array_equal(mine.tokens, plain.tokens)
    assert np.max(plain.tokens) >= 13


def test_wrong_arguments():
    target, params = tiny_model(1)
    with pytest.raises(ValueError, match="must be a Decoder"):
        DraftModel(model=target.config)
    with pytest.raises(ValueError, match=r"integer in 0\.\.32"):
        DraftModel(model=target, num_draft=33)
    with pytest.raises(ValueError, match="needs draft_params"):
        Case("x", DraftModel(model=target), Models(target, params)).generate(
            [[1]], [1], jax.random.key(0), max_new_tokens=2
        )
