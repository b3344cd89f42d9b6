"""What goes beyond Dustin's paper: refreshing, the watch on ARR, and rivals' row sets."""

import jax
import jax.numpy as jnp
import numpy as np
from dustin_cases import BUDGET, chosen_by, drafted, forward, state_after, text_of, weights, whole
from method_cases import GREEDY, LENGTHS, G, make_case, prompts, rounds_of

from jaxspec.dustin.refresh import run_refresh
from jaxspec.dustin.rivals import OBSERVED, POOL, Ranked, ranked_rows
from jaxspec.types import Finish


def test_a_refresh_renews_what_sparse_verification_wrote():
    """K/V, the newest query and the drift, against a dense forward over the whole text; layer 1 is what changes."""
    case = make_case(
        "dustin", refresh_every=3, signal="history", sparse_drafts="off", target_heads=((1, (0, 3)),), draft_heads=()
    )
    config, sparse = case.models.target.config, [[] for _ in range(3)]
    for number, (before, after, draft, out, verdict, _) in enumerate(rounds_of(case, num_rounds=5), start=1):
        refresh = after.method_state.refresh
        if number < 4:
            np.testing.assert_array_equal(refresh.start, LENGTHS)
            np.testing.assert_array_equal(refresh.checked, 0)
        else:
            np.testing.assert_array_equal(refresh.checked, refresh.start - LENGTHS)
        if number == 4:
            full = whole(case.models, [text_of(before, b) for b in range(3)], layers=(1,))
            logprobs = np.asarray(jax.nn.log_softmax(full.logits))
            for b in range(3):
                n, start = int(before.length[b]), int(LENGTHS[b])
                assert refresh.start[b] == n
                kept, dense = (np.asarray(cache[1].v[b, :n]) for cache in (out.cache, full.cache))
                np.testing.assert_allclose(kept, dense, atol=1e-5)
                after_row = text_of(before, b)[start + 1 :]
                expected = [logprobs[b, start + i, token] for i, token in enumerate(after_row)]
                gaps = np.abs(np.array(expected) - sparse[b])
                np.testing.assert_allclose(refresh.drift[b], gaps.sum(), atol=1e-4)
                hits = [np.argmax(logprobs[b, start + i]) == token for i, token in enumerate(after_row)]
                assert refresh.agreed[b] == np.sum(hits)
                if b == 0:
                    assert gaps.max() > 1e-2
                    query, keys = np.asarray(full.queries[0][b, n - 1]), np.asarray(full.cache[1].k[b])
                    history = np.mean(weights(query, keys, n - 1, config, (0, 3)), axis=0)
                    assert set(np.asarray(after.method_state.rows[0, b]).tolist()) == chosen_by(history, history, n, 0)
        for b in range(3):
            scores = np.asarray(jax.nn.log_softmax(out.logits[b]))
            tokens = [*np.asarray(draft.tokens[b])[: verdict.num_accepted[b]], int(verdict.next_token[b])]
            sparse[b] += [scores[i, token] for i, token in enumerate(tokens)]


def test_a_refresh_leaves_the_committed_rows_of_a_row_that_has_ended():
    """Also where the end of the cache makes its chunks reach back into them."""
    case = make_case(
        "dustin", refresh_every=8, signal="history", sparse_drafts="off", target_heads=((1, (0, 3)),), draft_heads=()
    )
    prompt = np.random.default_rng(5).integers(0, 18, (2, 60)).astype(np.int32)
    lengths = np.array([60, 40], np.int32)
    state, _ = state_after(case, GREEDY, 5, prompt, lengths)
    own, models = state.method_state, case.models
    state = state.replace(cache=jax.tree.map(lambda x: x[:, : int(state.length[0]) + 3], state.cache))

    @jax.jit
    def refreshed(state, refresh):
        return run_refresh(models.for_running(state), state, refresh, own.queries, (1,), jnp.array(True))[:2]

    cache, refresh = refreshed(state, own.refresh)
    ended = state.replace(cache=cache, finish=jnp.array([Finish.STOP, Finish.RUNNING], jnp.int8))
    again, _ = refreshed(ended, refresh.replace(start=refresh.start.at[1].set(40)))
    for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(again), strict=True):
        for b in range(2):
            n = int(state.length[b])
            np.testing.assert_allclose(before[b, :n], after[b, :n], atol=1e-5)


def test_rows_fall_back_by_themselves():
    """Watched is the mass of q_last's attention on the set; the rows below are verified in full, and only those."""
    case = make_case("self-dustin", signal="history", sparse_drafts="off", min_arr=0.5)
    config, fallbacks, newest, rounds = case.models.target.config, np.zeros(3, int), None, 0
    for before, after, draft, out, verdict, queries in rounds_of(case):
        own = after.method_state
        low = np.asarray(own.arr) < 0.5
        fallbacks += low
        np.testing.assert_array_equal(own.fallbacks, fallbacks)
        inputs = jnp.concatenate([before.last_token[:, None], draft.tokens], axis=1)
        full = forward(case.models, inputs, before.cache, before.length)
        for b in range(3):
            n = int(before.length[b])
            if newest is not None:
                history = np.mean(weights(newest[b], np.asarray(out.cache[0].k[b]), n - 1, config, (0, 3)), axis=0)
                rows = np.asarray(own.rows[0, b])
                np.testing.assert_allclose(own.arr[b], history[rows[rows >= 0]].sum(), atol=1e-5)
            block = slice(n, n + G + 1)
            gap = max(
                np.max(np.abs(out.logits[b] - full.logits[b])),
                np.max(np.abs(out.cache[1].v[b, block] - full.cache[1].v[b, block])),
            )
            assert gap < 1e-4 if n <= BUDGET or low[b] else gap > 1e-3
        rounds += 1
        newest = [np.asarray(queries[0])[b, int(verdict.num_accepted[b])] for b in range(3)]
    assert 0 < fallbacks[0] < rounds
    assert fallbacks[2] == 0


def test_snapkv_ranks_the_prompt_by_its_end():
    """Pooled mass of the last prompt tokens' attention, over all heads, by layer; they themselves come first."""
    case = make_case("dustin", signal="snapkv", budget=24, sparse_drafts="off", target_heads=(), draft_heads=())
    state, _ = state_after(case, GREEDY, 0, *prompts())
    config, n = case.models.target.config, int(LENGTHS[0])
    dense = whole(case.models, [text_of(state, 0)[:n]] * 3, layers=(0, 1))
    first = n - OBSERVED
    for layer in range(2):
        keys, mass = np.asarray(dense.cache[layer].k[0]), np.zeros(n)
        for place in range(first, n):
            query = np.asarray(dense.queries[layer][0, place])
            mass[: place + 1] += weights(query, keys, place, config, range(config.num_heads)).sum(axis=0)
        pooled = np.convolve(np.where(np.arange(n) < first, mass, 0), np.ones(POOL), "same")[:first]
        best = set(np.argsort(-pooled)[: 24 - OBSERVED])
        assert set(np.asarray(state.method_state.rows[layer, 0]).tolist()) == best | set(range(first, n))


def test_ranked_rows_make_room_for_generated_ones():
    ranked = Ranked(jnp.array([[[7, 3, 5, 1], [1, 0, -5, -5]]], jnp.int32), jnp.array([8, 2]))
    rows = [np.asarray(ranked_rows(ranked, jnp.array(length)))[0].tolist() for length in ([8, 2], [10, 3], [14, 9])]
    assert rows[0] == [[7, 3, 5, 1], [1, 0, -1, -1]]
    assert rows[1] == [[7, 3, 8, 9], [1, 0, 2, -1]]
    assert rows[2] == [[10, 11, 12, 13], [5, 6, 7, 8]]


def test_quest_reads_whole_pages_within_the_budget():
    """The unfinished page, and as many more as fit: those whose key bounds promise the round's queries most."""
    case = make_case("dustin", 1, signal="quest", budget=48, sparse_drafts="off", target_heads=(), draft_heads=())
    config = case.models.target.config
    prompt = np.random.default_rng(5).integers(0, 18, (2, 104)).astype(np.int32)
    state, request = state_after(case, GREEDY, 0, prompt, np.array([104, 20]))
    state, draft = drafted(case.models, state, request, case.method)
    inputs = jnp.concatenate([state.last_token[:, None], draft.tokens], axis=1)
    dense = forward(case.models, inputs, state.cache, state.length, layers=(0,))
    listed = np.full((1, 2, 48), -1, np.int32)
    for b in range(2):
        n, keys = int(state.length[b]), np.asarray(dense.cache[0].k[b])
        pages = [keys[16 * i : 16 * i + 16] for i in range(n // 16)]
        promise = np.zeros(len(pages))
        for query in np.asarray(dense.queries[0][b]):
            for head in range(config.num_heads):
                q = query[head]
                for i, page in enumerate(pages):
                    page = page[:, head // config.group_size]
                    promise[i] += np.maximum(q * page.min(axis=0), q * page.max(axis=0)).sum()
        kept = np.argsort(-promise)[: 3 - (n % 16 > 0)]
        rows = [row for i in sorted(kept) for row in range(16 * i, 16 * i + 16)] + list(range(n - n % 16, n))
        listed[0, b, : len(rows)] = rows
    expected = forward(case.models, inputs, state.cache, state.length, jnp.asarray(listed)).logits
    out = jax.jit(case.method.verify)(case.models, state, draft).logits
    np.testing.assert_allclose(out, expected, atol=1e-5)
    gap = np.max(np.abs(out - dense.logits), axis=(1, 2))
    assert gap[0] > 1e-3
    assert gap[1] < 1e-5


def test_refreshes_and_fallbacks_of_a_row_are_its_own():
    """A row of a batch decodes and counts as it does alone, although one row that is due makes all of them run."""
    case = make_case("dustin", 1, refresh_every=2, min_arr=0.6, sparse_drafts="last")
    prompt, length = prompts()
    keys = jax.random.split(jax.random.key(0), 3)
    batch = case.generate(prompt, length, keys, max_new_tokens=16)
    solo = case.generate(prompt[:1], length[:1], keys[:1], max_new_tokens=16)
    np.testing.assert_array_equal(solo.tokens[0], batch.tokens[0])
    assert batch.report.keys() == {"fallbacks", "checked", "agreed", "drift"}
    for name, mine in solo.report.items():
        np.testing.assert_allclose(mine[0], batch.report[name][0], atol=1e-5)
    assert 0 < batch.report["fallbacks"][0] <= batch.stats.rounds[0]
    assert 0 < batch.report["agreed"][0] <= batch.report["checked"][0] <= 15
