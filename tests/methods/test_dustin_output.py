"""Whose output Dustin's is: classic speculation's where the budget holds everything, else the sparse target's own."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dustin_cases import (
    BUDGET,
    SINKS,
    TARGET_HEADS,
    WINDOW,
    drafted,
    forward,
    state_after,
    text_of,
    whole,
)
from method_cases import (
    GREEDY,
    LENGTHS,
    ROUND_LIMIT,
    G,
    assert_same_greedy,
    make_case,
    plain_case,
    prompts,
    tiny_model,
)

from jaxspec import Decoder, Sampling
from jaxspec.dustin.scoring import choose_rows, head_scores
from jaxspec.lossless import MIN_P_VALUE
from jaxspec.methods import Dustin, Models, SelfDustin
from jaxspec.profiling import fused_step
from jaxspec.requests import check_request
from jaxspec.sampling import to_probs


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
