"""Dustin: which rows verification reads, that it reads no others, and that it follows its own distribution."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from method_cases import (
    GREEDY,
    LENGTHS,
    ROUND_LIMIT,
    Case,
    G,
    assert_same_greedy,
    make_case,
    plain_case,
    prompts,
    rounds_of,
    similar_model,
    tiny_model,
)

from jaxspec import Decoder, Sampling
from jaxspec.decode import draft_tokens
from jaxspec.dustin.scoring import choose_rows, head_scores
from jaxspec.lossless import MIN_P_VALUE
from jaxspec.methods import Dustin, Models, SelfDustin
from jaxspec.models import init_cache
from jaxspec.profiling import fused_step
from jaxspec.requests import check_request
from jaxspec.sampling import to_probs
from jaxspec.selection import promote, protect, sink_and_recent_rows
from jaxspec.stream import _prefill
from jaxspec.types import Collect, KVSelection, LayerCache

BUDGET, SINKS, WINDOW = 12, 2, 3
FREE = BUDGET - SINKS - WINDOW
TARGET_HEADS, DRAFT_HEADS = ((0, (0, 3)),), ((1, (0,)), (0, (1, 2)))


@partial(jax.jit, static_argnames=("layers", "window"))
def forward(models, tokens, cache, start, rows=None, *, layers=(), window=G + 1):
    selection = None if rows is None else KVSelection(rows, start, window)
    return models.forward(tokens, cache, start, selection=selection, collect=Collect(queries=layers))


def whole(models, texts, layers=()):
    """A dense forward of whole texts from an empty cache, padded to one width."""
    tokens = np.array([[*text, *[0] * (64 - len(text))] for text in texts], np.int32)
    cache = init_cache(models.target.config, len(texts), 64, jnp.float32)
    return forward(models, jnp.asarray(tokens), cache, jnp.zeros(len(texts), jnp.int32), layers=layers)


def text_of(state, b, *more):
    """Prompt and emitted tokens of a row."""
    return [*prompts()[0][b, : LENGTHS[b]], *np.asarray(state.tokens[b, : state.num_tokens[b]]), *np.asarray(more)]


def weights(query, keys, position, config, heads):
    """Reference softmax weights of one query [N, H] at `position` over keys [S, K, H]: float64 [heads, n]."""
    rows = []
    for head in heads:
        logits = keys[: position + 1, head // config.group_size].astype(np.float64) @ query[head].astype(np.float64)
        unnormalised = np.exp((logits - logits.max()) / np.sqrt(config.head_dim))
        rows.append(unnormalised / unnormalised.sum())
    return np.array(rows)


def chosen_by(history, ahead, n, split):
    """Reference of SELECT: sets, in plain Python."""
    kept = {*range(min(SINKS, n)), *range(max(n - WINDOW, 0), n)}
    for scores, count in ((ahead, split), (history, BUDGET)):
        ranked = sorted(set(range(n)) - kept, key=lambda row: -scores[row])
        kept |= set(ranked[: min(count, BUDGET - len(kept))])
    return kept


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


@partial(jax.jit, static_argnames="method")
def drafted(models, state, request, method):
    return draft_tokens(models, state, request, method)


def state_after(case, sampling, num_rounds, prompt, length):
    """A state after some rounds, and its request."""
    request = check_request(
        case.models.target, prompt, length, jax.random.key(3), case.method, sampling, ROUND_LIMIT, (), 0,
        case.models.draft_params,
    )  # fmt: skip
    state, _ = _prefill(case.models, request, case.method, ROUND_LIMIT)
    for _ in range(num_rounds):
        running = np.zeros(len(length), bool)
        state, _ = fused_step(case.models, state, request, running, case.method, ROUND_LIMIT)
    return state, request


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


@cache
def full_run(name):
    case = plain_case(layers=1) if name == "plain" else make_case(name, layers=1)
    return case.generate(*prompts(), jax.random.key(0), max_new_tokens=20, logprobs=True)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dustin", {"sparse_drafts": "off"}),
        ("dustin", {"sparse_drafts": "off", "signal": "snapkv"}),
        ("self-dustin", {"sparse_drafts": "recent"}),
    ],
)
def test_a_budget_that_holds_everything_is_classic_speculation(name, options):
    case = make_case(name, layers=1, budget=128, split=20, sinks=4, window=16, **options)
    prompt, length = prompts()
    mine = case.generate(prompt, length, jax.random.key(0), max_new_tokens=20, logprobs=True)
    for b in range(3):
        assert_same_greedy(case.models, prompt[b, : LENGTHS[b]], mine.tokens[b], full_run("plain").tokens[b])
    np.testing.assert_allclose(mine.logprobs, full_run("plain").logprobs, atol=1e-4)
    if name == "dustin":
        np.testing.assert_array_equal(mine.stats.accepted, full_run("draft-model").stats.accepted)
    else:
        whole_rounds = np.arange(20) < np.asarray(mine.stats.rounds)[:, None] - 1
        assert np.all(np.asarray(mine.stats.accepted)[whole_rounds] == G)


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


def chi_square(tokens, probs):
    """p-value of drawn tokens under a distribution; tokens that are hardly to be expected are one bin."""
    expected = probs * tokens.size
    small = expected < 5
    counts = np.bincount(tokens, minlength=len(probs))
    expected, counts = (np.array([*x[~small], x[small].sum()]) for x in (expected, counts))
    statistic = np.sum((counts - expected) ** 2 / np.maximum(expected, 1e-9))
    return float(jax.scipy.special.gammaincc((len(expected) - 1) / 2, statistic / 2))


def test_sampling_follows_the_sparse_targets_own_distribution():
    """With a set that is fixed before the draft; the full model's distribution is another, so this is lossy."""
    draws, sampling = 1000, Sampling(1.0)
    case = make_case("dustin", layers=1, signal="history", sparse_drafts="off")
    prompt, length = (x[:1] for x in prompts())
    state, _ = state_after(case, GREEDY, 1, prompt, length)
    cache, n, queries = state.cache, state.length, tuple(q[:, None] for q in state.method_state.queries)
    history = head_scores(queries, cache, ((0, (0, 3)),), n[:, None] - 1, n, None)
    fixed = choose_rows(history, None, n, budget=BUDGET, sinks=SINKS, window=WINDOW, split=0, backend=None)
    last = jnp.pad(state.last_token[:, None], ((0, 0), (0, G)))
    sparse, full = (
        np.asarray(to_probs(forward(case.models, last, cache, n, rows).logits[0, 0], sampling), np.float64)
        for rows in (fixed, None)
    )

    request = check_request(
        case.models.target, np.tile(prompt, (draws, 1)), np.tile(length, draws), jax.random.key(8), case.method,
        sampling, ROUND_LIMIT, (), 0, case.models.draft_params,
    )  # fmt: skip
    # one state, as often as there are draws; the rows of the last set are [1, B, M]
    many = jax.tree.map(lambda x: jnp.repeat(x, draws, axis=0) if x.ndim else x, state.replace(keys=()))
    own = many.method_state.replace(rows=jnp.repeat(state.method_state.rows, draws, axis=1))
    many = many.replace(keys=jax.random.split(jax.random.key(9), draws), method_state=own)
    after, _ = fused_step(case.models, many, request, np.zeros(draws, bool), case.method, ROUND_LIMIT)
    tokens = np.asarray(after.tokens)[:, int(state.num_tokens[0])]
    assert chi_square(tokens, sparse) > MIN_P_VALUE
    assert chi_square(tokens, full) < 1e-6
    assert 0.2 < np.mean(np.asarray(after.stats.accepted)[:, 1] > 0) < 0.95
    assert not Dustin.lossless
    assert not SelfDustin.lossless


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


def test_a_skipped_layer_of_self_drafts_is_not_run():
    """Greedy self-drafts under a mask are those of a model that ends with layer 0."""
    heads = {"target_heads": TARGET_HEADS, "draft_heads": ((0, (1,)),)}
    case = make_case("self-dustin", skipped_layers=(1,), sparse_drafts="off", **heads)
    state, request = state_after(case, GREEDY, 0, *prompts())
    _, draft = drafted(case.models, state, request, case.method)
    target, params = tiny_model()
    shallow = Models(Decoder(dataclasses.replace(target.config, num_layers=1)), params)
    # layer 0's K/V of the committed rows do not depend on layer 1
    logits = whole(shallow, [text_of(state, b, *draft.tokens[b]) for b in range(3)]).logits
    for b in range(3):
        n = int(state.length[b])
        np.testing.assert_array_equal(np.argmax(logits[b, n : n + G], axis=1), draft.tokens[b])


DRAFT = similar_model()[0]
HEADS = {"target_heads": TARGET_HEADS, "draft_heads": ((0, (1,)),)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None, **HEADS}, "Dustin model must be a Decoder"),
        ({"budget": 0, **HEADS}, r"budget must be an integer in 1\.\."),
        ({"budget": 19, **HEADS}, r"at least sinks \+ window \+ split = 20, got 19"),
        ({"split": 493, **HEADS}, r"= 513, got 512"),
        ({"signal": "both", **HEADS}, "one of hybrid, history, draft, recency, snapkv, quest"),
        ({"sparse_drafts": "yes", **HEADS}, "one of off, last, recent"),
        ({"min_arr": 1.5, **HEADS}, "at most 1"),
        ({"num_draft": 0, **HEADS}, "num_draft must be at least 1 with signal hybrid"),
        ({}, "needs target_heads: jaxspec calibrate dustin finds them"),
        ({"target_heads": TARGET_HEADS}, "needs draft_heads"),
        ({"signal": "recency", "min_arr": 0.5}, "needs target_heads"),
        ({"signal": "quest", "sparse_drafts": "last"}, "excludes sparse_drafts"),
        ({**HEADS, "draft_heads": ((0, (1, 1)),)}, "distinct layers and heads"),
        ({**HEADS, "draft_heads": ((0, (1,)), (0, (2,)))}, "distinct layers and heads"),
        ({**HEADS, "draft_heads": ((0, ()),)}, "distinct layers and heads"),
        ({**HEADS, "draft_heads": [[0, [1]]]}, "nested tuples"),
        ({**HEADS, "draft_heads": ((2, (1,)),)}, r"layers up to 2; the model has layers 0\.\.1"),
        ({**HEADS, "draft_heads": ((0, (4,)),)}, r"heads up to 4; the model has heads 0\.\.3"),
    ],
)
def test_wrong_options_name_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        Dustin(**{"model": DRAFT, **options})


def test_heads_that_the_target_lacks():
    case = make_case("dustin", target_heads=((2, (0,)),))
    with pytest.raises(ValueError, match=r"target_heads names layers up to 2"):
        case.generate(*prompts(), jax.random.key(0), max_new_tokens=2)
    with pytest.raises(ValueError, match=r"must be some, not all, of the model's layers 0\.\.1, got \(0, 1\)"):
        make_case("self-dustin", skipped_layers=(0, 1), signal="history").generate(
            *prompts(), jax.random.key(0), max_new_tokens=2
        )
    with pytest.raises(ValueError, match="must lie in layers that run"):
        make_case("self-dustin", skipped_layers=(0,))
