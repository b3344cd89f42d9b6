import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from method_cases import LENGTHS, full_logits, make_case, plain_case, prompts, rounds_of

from jaxspec import Sampling
from jaxspec.enumeration import plain_distribution, speculative_distribution
from jaxspec.methods import Models, Vegas
from jaxspec.selection import top_rows
from jaxspec.types import Collect
from pallas_kernels import cached_attention

NEW = 16


def attention(queries, keys, position, mode, config):
    """Reference score of each cache row for query rows [R, N, H] at positions [R] over keys [S, K, H], in float64."""
    total = np.zeros(len(keys))
    for q, pos in zip(queries.astype(np.float64), position, strict=True):
        for head in range(config.num_heads):
            logits = keys[:, head // config.group_size].astype(np.float64) @ q[head] / np.sqrt(config.head_dim)
            seen = logits[: pos + 1]
            weights = np.exp(seen - seen.max())
            total[: pos + 1] += weights / weights.sum() if mode == "weight" else seen
    return total


def assert_greedy(models, prompt, tokens):
    expected = np.argmax(full_logits(models, [*prompt, *tokens])[len(prompt) - 1 : -1], axis=1)
    np.testing.assert_array_equal(tokens, expected)


def scored(method, accepted):
    return {"two": [0, method.num_draft], "all": range(method.num_draft + 1), "last": [accepted]}[method.collect]


@pytest.mark.parametrize(
    ("layers", "mode", "collect", "shares"),
    [
        (2, "weight", "two", (0.5, 1.5)),
        (1, "logit", "two", ""),
        (1, "weight", "all", ""),
        (1, "logit", "last", ""),
    ],
)
def test_drafts_read_the_rows_that_verification_scored_highest(layers, mode, collect, shares):
    case = make_case("vegas", layers, score_mode=mode, collect=collect, min_keep=5, rho=0.15, layer_shares=shares)
    config, compared = case.models.target.config, 0
    prompt, _ = prompts()
    for before, after, _, out, verdict, queries in rounds_of(case):
        selection = after.method_state
        assert selection.window == 2 * case.method.num_draft
        for b in range(3):
            length, accepted = int(before.length[b]), int(verdict.num_accepted[b])
            valid = int(selection.valid[b])
            assert valid == length + 1
            assert int(after.length[b]) == length + accepted + 1
            assert int(after.length[b]) + case.method.num_draft - valid <= selection.window
            equal = max(5, -(-15 * (length + accepted + 1) // 100))
            for layer in range(config.num_layers):
                k = min(math.ceil((shares or (1,))[layer] * equal), valid)
                assert selection.count[layer, b] == k
                rows = np.asarray(selection.rows[layer, b])
                chosen = rows[rows >= 0]
                assert rows.tolist() == [*chosen, *[-1] * (len(rows) - k)]
                assert len(set(chosen)) == k
                assert np.all(chosen < valid)
                at = list(scored(case.method, accepted))
                keys = np.asarray(out.cache[layer].k[b])
                scores = attention(np.asarray(queries[layer][b])[at], keys, [length + i for i in at], mode, config)
                ranked = np.sort(scores[:valid])[::-1]
                if k < valid and ranked[k - 1] - ranked[k] > 1e-5:
                    compared += 1
                    assert set(chosen) == set(np.argsort(-scores[:valid])[:k])
    assert compared > 10 * layers
    for b in range(3):
        n = int(after.num_tokens[b])
        assert n > 6
        assert_greedy(case.models, prompt[b, : LENGTHS[b]], np.asarray(after.tokens[b, :n]))


def test_the_first_round_reads_what_the_last_prompt_token_attends_to():
    case = make_case("vegas", min_keep=5, rho=0.15, layer_shares="")
    prompt, length = prompts()
    state = next(rounds_of(case, num_rounds=1))[0]
    selection = state.method_state
    np.testing.assert_array_equal(selection.valid, LENGTHS)
    # logits and scores of an ordinary forward over the whole prompt: one chunk, one row
    models, config = case.models, case.models.target.config
    tokens = jnp.asarray(prompt[:1])
    cache = jax.tree.map(lambda x: jnp.zeros_like(x[:1]), state.cache)
    out = models.forward(tokens, cache, jnp.int32(0), collect=Collect(queries=(0, 1)))
    for layer in range(config.num_layers):
        query = np.asarray(out.queries[layer][0, -1:])
        scores = attention(query, np.asarray(out.cache[layer].k[0]), [39], "weight", config)[:40]
        rows = np.asarray(selection.rows[layer, 0])
        assert set(rows[rows >= 0]) == set(np.argsort(-scores)[:6])
    assert length[2] == 1
    assert np.asarray(selection.rows[:, 2]).max() == 0


def test_with_one_draft_two_rows_are_all_rows():
    cases = [make_case("vegas", layers=1, num_draft=1, collect=collect) for collect in ("two", "all")]
    for two, every in zip(*map(rounds_of, cases), strict=True):
        np.testing.assert_array_equal(two[1].method_state.rows, every[1].method_state.rows)
        np.testing.assert_array_equal(two[1].tokens, every[1].tokens)


def test_without_drafts_it_is_plain_decoding():
    prompt, length = prompts()
    case, plain = make_case("vegas", layers=1, num_draft=0), plain_case(layers=1)
    key = jax.random.key(0)
    mine, expected = (
        c.generate(prompt, length, key, max_new_tokens=NEW, sampling=Sampling(1.0)) for c in (case, plain)
    )
    np.testing.assert_array_equal(mine.tokens, expected.tokens)
    assert np.all(mine.stats.rounds == NEW - 1)


def operands(heads, kv_heads, queries, capacity=32):
    rng = np.random.default_rng(4)
    shapes = [(1, queries, heads, 8), (1, capacity, kv_heads, 8), (1, capacity, kv_heads, 8)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def scores_of(q, k, v, mode):
    scored_rows = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    start = jnp.array([k.shape[1] - q.shape[1]], jnp.int32)
    return cached_attention(q, k, v, start, scale=0.5, scored_rows=scored_rows, score_mode=mode)[1]


def chosen(scores, valid=28, k=6):
    return np.asarray(top_rows(scores[None], jnp.array([valid]), jnp.array([k]), k, None))[0, 0]


def test_one_head_and_one_row_rank_alike_by_weight_and_by_logit():
    q, k, v = operands(1, 1, 1)
    np.testing.assert_array_equal(chosen(scores_of(q, k, v, "weight")), chosen(scores_of(q, k, v, "logit")))


def test_a_constant_on_one_heads_logits_moves_the_weights_but_not_the_set_by_logits():
    q, k, v = operands(4, 2, 2)
    k = k.at[..., -1].set(1)
    shifted = q.at[:, :, 1, -1].add(30)
    plain, moved = scores_of(q, k, v, "logit"), scores_of(shifted, k, v, "logit")
    assert np.abs(plain - moved)[0, :28].min() > 10
    np.testing.assert_array_equal(chosen(plain), chosen(moved))


def test_weights_sum_to_one_per_head_and_row():
    q, k, v = operands(4, 2, 3)
    scores = np.asarray(cached_attention(q, k, v, jnp.array([20]), scale=0.5, scored_rows=jnp.array([[0]]))[1])[0]
    np.testing.assert_allclose(scores[np.isfinite(scores)].sum(), 4, rtol=1e-6)
    assert np.isfinite(scores).sum() == 21


def test_three_rounds_enumerated_with_filters():
    """The set of the third round depends on the second's draws: staleness must not show in the output."""
    sampling = Sampling(1.5, top_p=0.8)
    case = make_case("vegas", layers=1, vocab=3, num_draft=1, collect="last", draft_sampling=Sampling(0.8, top_k=2))
    prompt = [int(t) for t in np.random.default_rng(2).integers(0, 3, 20)]
    mine, accepted = speculative_distribution(case.models, case.method, prompt, 1, sampling, 3)
    plain = plain_distribution(Models(case.models.target, case.models.params), prompt, 1, sampling, mine.ndim)
    assert 0.5 * np.abs(mine - plain).sum() < 1e-6
    assert 0.1 < accepted < 0.95
    assert 0 < (plain == 0).sum() < plain.size - 1


def test_forced_rejections_at_every_slot_in_one_batch():
    """Rows that accept 0, 1 and 2 drafts side by side; lengths grow by exactly one more."""

    prompt, length = prompts()
    greedy = plain_case(layers=1).generate(prompt, length, jax.random.key(0), max_new_tokens=NEW).tokens

    @dataclasses.dataclass(frozen=True)
    class Forced(Vegas):
        right: tuple = tuple(map(tuple, np.asarray(greedy).tolist()))

        def draft(self, models, state, sampling, keys):
            draft, cache, method_state = super().draft(models, state, sampling, keys)
            slot = jnp.arange(self.num_draft)
            right = jnp.take_along_axis(jnp.array(self.right), state.num_tokens[:, None] + slot, axis=1)
            wrong = slot == jnp.arange(3)[:, None]  # row b is wrong at slot b, the last row nowhere
            return draft.replace(tokens=jnp.where(wrong, (right + 1) % 19, right)), cache, method_state

    base = make_case("vegas", layers=1)
    case = dataclasses.replace(
        base, method=Forced(**{f.name: getattr(base.method, f.name) for f in dataclasses.fields(base.method)})
    )
    final = None
    for before, after, *_ in rounds_of(case, num_rounds=4):
        np.testing.assert_array_equal(after.length - before.length, [1, 2, 3])
        final = after
    for b in range(3):
        n = int(final.num_tokens[b])
        assert_greedy(case.models, prompt[b, : length[b]], np.asarray(final.tokens[b, :n]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rho": 0.0}, "above 0 and be at most 1"),
        ({"rho": 1.5}, "above 0 and be at most 1"),
        ({"rho": float("nan")}, "above 0 and be at most 1"),
        ({"min_keep": 0}, r"integer in 1\.\.1048576"),
        ({"min_keep": 2.5}, r"integer in 1\.\.1048576"),
        ({"num_draft": -1}, r"integer in 0\.\.32"),
        ({"num_draft": True}, r"integer in 0\.\.32"),
        ({"score_mode": "softmax"}, "one of weight, logit"),
        ({"collect": "first"}, "one of two, all, last"),
        ({"draft_sampling": Sampling(np.float32(-1))}, "temperature must be a finite number >= 0"),
        ({"draft_sampling": Sampling(jnp.ones(1))}, "Python numbers"),
    ],
)
def test_wrong_options_name_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        Vegas(**options)


@pytest.mark.parametrize("name", ["vegas", "quest"])
def test_blocks_at_the_end_of_a_full_cache(name):
    """Prompt, new tokens and drafts fill the capacity to the last row: a clamped write would change older ones."""
    case, plain = make_case(name, layers=1, num_draft=5), plain_case(layers=1)
    prompt = np.random.default_rng(3).integers(0, 18, (2, 128)).astype(np.int32)
    new_tokens = 256 - 128 - 5 - 1
    mine, expected = (
        c.generate(prompt, [128, 128], jax.random.key(0), max_new_tokens=new_tokens) for c in (case, plain)
    )
    np.testing.assert_array_equal(mine.tokens, expected.tokens)
    assert mine.stats.accepted.max() == 5
