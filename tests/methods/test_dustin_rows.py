"""Which cache rows Dustin's verification reads, and that it reads no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dustin_cases import (
    BUDGET,
    DRAFT_HEADS,
    FREE,
    SINKS,
    TARGET_HEADS,
    WINDOW,
    chosen_by,
    drafted,
    forward,
    state_after,
    text_of,
    weights,
    whole,
)
from method_cases import GREEDY, Case, G, make_case, prompts, rounds_of, tiny_model

from jaxspec.dustin.scoring import choose_rows, head_scores
from jaxspec.methods import Dustin, Models
from jaxspec.selection import promote, protect, sink_and_recent_rows
from jaxspec.types import LayerCache


@pytest.mark.parametrize(("layers", "signal", "split"), [(2, "hybrid", 3), (1, "hybrid", 0), (1, "hybrid", FREE)])
def test_rows_are_those_that_both_models_attend_to(layers, signal, split):
    """Against float64: S_target from the newest committed token's query, S_draft from those of last, d_1..d_(g-1).

    No row for the draft is history only, all free rows for it draft only.
    """
    heads = DRAFT_HEADS[-layers:]
    case = make_case(
        "dustin", layers, signal=signal, split=split, sparse_drafts="off", target_heads=TARGET_HEADS, draft_heads=heads
    )
    config, draft = case.models.target.config, Models(case.method.model, case.models.draft_params)
    newest, compared, accepted = None, 0, set()
    for before, after, drafts, out, verdict, queries in rounds_of(case):
        rows = np.asarray(after.method_state.rows)
        assert rows.shape == (1, 3, BUDGET)
        own = whole(draft, [text_of(before, b, *drafts.tokens[b]) for b in range(3)], layers=tuple(i for i, _ in heads))
        for b in range(3):
            n = int(before.length[b])
            got = rows[0, b][rows[0, b] >= 0]
            assert rows[0, b].tolist() == [*sorted(got), *[-1] * (BUDGET - len(got))]
            assert len(set(got)) == len(got) == min(BUDGET, n)
            assert {*range(min(SINKS, n)), *range(max(n - WINDOW, 0), n)} <= set(got.tolist())
            accepted.add(int(verdict.num_accepted[b]))
            if n <= BUDGET:
                continue
            if newest is None:
                query = whole(case.models, [text_of(before, b)], layers=(0,)).queries[0][0, n - 1]
            else:
                query = newest[b]
            history = np.mean(weights(np.asarray(query), np.asarray(out.cache[0].k[b]), n - 1, config, (0, 3)), axis=0)
            ahead = np.zeros(n)
            for q, (layer, chosen) in zip(own.queries, heads, strict=True):
                for i in range(G):
                    keys = np.asarray(own.cache[layer].k[b])
                    ahead += weights(np.asarray(q[b, n + i]), keys, n + i, config, chosen)[:, :n].sum(axis=0)
            assert set(got.tolist()) == chosen_by(history, ahead, n, split)
            compared += 1
        # layer 0's queries do not depend on what attention reads
        newest = [np.asarray(queries[0])[b, int(verdict.num_accepted[b])] for b in range(3)]
    assert compared >= 6
    assert len(accepted) > 1


def poisoned(cache, keep):
    """NaN in every row of the cache that `keep` bool [B, S] does not name."""
    return tuple(LayerCache(*(jnp.where(keep[:, :, None, None], x, jnp.nan) for x in layer)) for layer in cache)


@pytest.mark.parametrize("sparse_drafts", ["last", "recent"])
def test_no_other_rows_are_read(sparse_drafts):
    """Neither by verification nor by sparse drafts: what they may not read holds NaN."""
    case = make_case("dustin", layers=2 if sparse_drafts == "last" else 1, sparse_drafts=sparse_drafts)
    # at first, nothing is newer than the set
    state, request = state_after(case, GREEDY, 2 if sparse_drafts == "last" else 0, *prompts())
    row = np.arange(state.cache[0].k.shape[1])
    n, own = np.asarray(state.length)[:, None], state.method_state

    def listed(rows):
        return np.array([np.isin(row, r[r >= 0]) for r in np.asarray(rows[0])])

    if sparse_drafts == "last":
        visible = listed(own.rows) | (row >= np.asarray(own.valid)[:, None])
    else:
        visible = (row < SINKS) | (row >= n - (BUDGET - SINKS))
    visible &= row <= n + G
    assert not visible[0, : n[0, 0]].all()
    clean, draft = drafted(case.models, state, request, case.method)
    dirty_own = own.replace(own=own.own.replace(cache=poisoned(own.own.cache, visible)))
    dirty, again = drafted(case.models, state.replace(method_state=dirty_own), request, case.method)
    np.testing.assert_array_equal(again.tokens, draft.tokens)
    kept = np.asarray(clean.method_state.own.cache[-1].v)
    for b in range(3):
        rows = slice(int(n[b, 0]) - 1, int(n[b, 0]) + G)
        np.testing.assert_array_equal(kept[b, rows], np.asarray(dirty.method_state.own.cache[-1].v)[b, rows])

    verify = jax.jit(case.method.verify)
    out = verify(case.models, clean, draft)
    unread = poisoned(clean.cache, listed(clean.method_state.rows) | (row >= n))
    np.testing.assert_array_equal(verify(case.models, clean.replace(cache=unread), draft).logits, out.logits)
    inputs = jnp.concatenate([clean.last_token[:, None], draft.tokens], axis=1)
    full = forward(case.models, inputs, clean.cache, clean.length).logits
    gap = np.max(np.abs(full - out.logits), axis=(1, 2))
    assert gap[0] > 1e-2  # the long prompt loses something
    assert gap[2] < 1e-5  # the short one fits the budget


def test_recency_is_streaming_verification():
    """Row numbers as scores, and the option: both are the sinks and the newest rows."""
    length, k = jnp.array([40, 13, 12, 7, 1]), jnp.minimum(BUDGET, jnp.array([40, 13, 12, 7, 1]))
    scores = jnp.tile(jnp.arange(48.0), (5, 1))
    rows = choose_rows(scores, None, length, budget=BUDGET, sinks=SINKS, window=WINDOW, split=0, backend=None)
    np.testing.assert_array_equal(rows, sink_and_recent_rows(length, k, SINKS, BUDGET))
    case = make_case("dustin", layers=1, signal="recency", target_heads=(), draft_heads=())
    state, request = state_after(case, GREEDY, 0, *prompts())
    state, draft = drafted(case.models, state, request, case.method)
    inputs = jnp.concatenate([state.last_token[:, None], draft.tokens], axis=1)
    streaming = sink_and_recent_rows(state.length, jnp.minimum(BUDGET, state.length), SINKS, BUDGET)
    expected = forward(case.models, inputs, state.cache, state.length, streaming).logits
    out = jax.jit(case.method.verify)(case.models, state, draft)
    np.testing.assert_allclose(out.logits, expected, atol=1e-5)


def test_a_draft_that_is_the_target_sees_the_next_querys_true_attention():
    """With one draft, S_draft is the attention of the query that verification will use."""
    target, params = tiny_model()
    method = Dustin(model=target, num_draft=1, budget=12, sinks=2, window=3, split=3,
                    target_heads=TARGET_HEADS, draft_heads=DRAFT_HEADS)  # fmt: skip
    case = Case("twin", method, Models(target, params, params))
    state, request = state_after(case, GREEDY, 0, *prompts())

    @jax.jit
    def scores_of(models, state, keys):
        state = state.replace(method_state=state.method_state.own)
        draft, own, queries = method._classic.run(models, state, GREEDY, keys, query_layers=(1, 0))
        return draft, head_scores(queries, own.cache, DRAFT_HEADS, state.length[:, None], state.length, None)

    draft, scores = scores_of(case.models, state, request.keys)
    true = whole(case.models, [text_of(state, b, *draft.tokens[b]) for b in range(3)], layers=(0, 1))
    for b in range(3):
        n = int(state.length[b])
        expected = np.concatenate([
            weights(np.asarray(true.queries[layer][b, n]), np.asarray(true.cache[layer].k[b]), n, target.config, heads)
            for layer, heads in DRAFT_HEADS
        ])  # fmt: skip
        np.testing.assert_allclose(scores[b, :n], expected.mean(axis=0)[:n], atol=1e-5)
        assert np.all(np.isneginf(scores[b, n:]))


def test_protect_and_promote():
    rng = np.random.default_rng(0)
    scores, favoured = (rng.permutation(20).astype(np.float32)[None] for _ in range(2))
    out = np.asarray(protect(jnp.asarray(scores), jnp.array([15]), 2, 3))
    assert np.flatnonzero(np.isinf(out[0])).tolist() == [0, 1, 12, 13, 14]
    np.testing.assert_array_equal(out[np.isfinite(out)], scores[np.isfinite(out)])
    for count, left in ((4, 4), (30, 10)):
        promoted = np.asarray(promote(jnp.asarray(out), jnp.asarray(favoured), jnp.array([15]), count, None))
        new = np.flatnonzero(np.isinf(promoted[0]) & np.isfinite(out[0]))
        assert set(new) == set(sorted(range(2, 12), key=lambda row: -favoured[0, row])[:left])
    short = np.asarray(protect(jnp.asarray(scores), jnp.array([3]), 2, 3))
    assert np.flatnonzero(np.isinf(short[0])).tolist() == [0, 1, 2]
