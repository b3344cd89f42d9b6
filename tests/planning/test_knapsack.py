"""The dynamic program against forwards of single masks, exhaustive search, and a float64 decoder."""

import itertools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.methods import Models
from jaxspec.models import Decoder, init_cache
from jaxspec.planning.knapsack import knapsack, reference_tokens
from jaxspec.types import Collect, LayerMask
from pallas_kernels.prefix_attention import xla
from tests import reference
from tests.reference import jax_model, random_weights, tiny_config

LAYERS, R, CELLS = 5, 6, 12
LENGTHS = np.array([30, 3], np.int32)  # the second has fewer tokens than are asked for
ATOL = 2e-5  # float32 rounding of residual streams of order 1


class Setup(NamedTuple):
    hf: dict
    weights: dict
    models: Models
    prompt: np.ndarray  # [B, P]; only LENGTHS of each row are real
    cache: tuple  # all of them
    tokens: np.ndarray  # [B, R], from `start` on
    start: np.ndarray
    valid: np.ndarray


@pytest.fixture(scope="module")
def setup():
    # of the families the one with the most parts: head norms, and biases on request
    hf = tiny_config("qwen3", num_hidden_layers=LAYERS, attention_bias=True)
    weights = random_weights(hf, seed=2)
    models = Models(*jax_model(hf, weights))
    prompt = np.random.default_rng(0).integers(0, 61, (2, 32)).astype(np.int32)
    cache = init_cache(models.target.config, 2, 64, jnp.float32)
    cache = jax.jit(models.forward)(prompt, cache, jnp.int32(0)).cache
    emitted = np.zeros((2, 1), np.int32)
    tokens, start, valid = map(np.asarray, reference_tokens(prompt, LENGTHS, emitted, LENGTHS, 2 * R))
    return Setup(hf, weights, models, prompt, cache, tokens, start, valid)


@partial(jax.jit, static_argnames=("blocks", "cells"))
def search(models, cache, tokens, start, valid, weights, limit, tau, blocks=False, cells=CELLS):
    options = {"cells": cells, "tau": tau, "blocks": blocks}
    return knapsack(models, cache, tokens, start, valid, weights, limit, **options)


def run(s, weights=(1, 2), limit=7, tau=-1.0, **options):
    arguments = s.models, options.pop("cache", s.cache), s.tokens, s.start, s.valid
    found = search(*arguments, np.array(weights, np.int32), np.int32(limit), np.float32(tau), **options)
    return jax.tree.map(np.asarray, found)


@jax.jit
def masked(models, cache, tokens, start, attn, mlp):
    return models.forward(tokens, cache, start, layers=LayerMask(attn, mlp), collect=Collect(hidden=True))


def forward(s, attn, mlp):
    """Residual streams [2L+1, B, R, D] and logits of one mask, in a forward of its own over the full model's prefix."""
    out = masked(s.models, s.cache, s.tokens, s.start, jnp.array(attn), jnp.array(mlp))
    return np.asarray(out.hidden, np.float64), np.asarray(out.logits)


def cosine(s, x, y):
    each = np.sum(x * y, axis=-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)
    return each[s.valid].mean()


def all_masks(blocks=False):
    """Every mask in which the first and the last block run."""
    inner = LAYERS - 2
    for bits in itertools.product((True, False), repeat=inner if blocks else 2 * inner):
        attn, mlp = (bits, bits) if blocks else (bits[:inner], bits[inner:])
        yield (True, *attn, True), (True, *mlp, True)


def weight(attn, mlp, weights):
    return (LAYERS - sum(attn)) * weights[0] + (LAYERS - sum(mlp)) * weights[1]


def test_reference_tokens_are_the_last_committed_ones(setup):
    s = setup
    np.testing.assert_array_equal(s.start, [24, 0])
    np.testing.assert_array_equal(s.tokens[0], s.prompt[0, 24:30])
    np.testing.assert_array_equal(s.tokens[1, :3], s.prompt[1, :3])
    np.testing.assert_array_equal(s.valid, [[True] * 6, [True] * 3 + [False] * 3])
    # across the end of the prompt, and of more sequences than tokens are wanted
    prompt = np.arange(50).reshape(5, 10)
    emitted = 100 + np.arange(20).reshape(5, 4)
    tokens, start, valid = reference_tokens(prompt, np.full(5, 8), emitted, np.array([10, 7, 8, 9, 11]), 4)
    np.testing.assert_array_equal(tokens, [[101], [16], [27], [112]])
    np.testing.assert_array_equal(start, [9, 6, 7, 8])
    assert np.all(valid)
    tokens, *_ = reference_tokens(prompt[:1], np.array([8]), emitted[:1], np.array([11]), 5)
    np.testing.assert_array_equal(tokens, [[6, 7, 100, 101, 102]])


def test_cell_0_is_the_full_model(setup):
    s, found = setup, run(setup)
    assert found.attn[0].all()
    assert found.mlp[0].all()
    assert found.alive[0]
    assert found.similarity[0] == pytest.approx(1, abs=1e-6)
    assert found.hits[0] == found.count == s.valid.sum()
    for b in range(2):
        expected = reference.decoder(s.hf, s.weights, s.prompt[b, : LENGTHS[b]]).hidden[-1, -R:]
        np.testing.assert_allclose(found.states[b, 0][s.valid[b]], expected, atol=ATOL)


@pytest.mark.parametrize(("weights", "blocks"), [((1, 1), False), ((1, 2), False), ((2, 1), False), ((1, 1), True)])
def test_a_cells_mask_weighs_its_number_and_a_fresh_forward_reproduces_it(setup, weights, blocks):
    s, found = setup, run(setup, weights, blocks=blocks)
    full, full_logits = forward(s, (True,) * LAYERS, (True,) * LAYERS)
    assert found.alive.sum() == (4 if blocks else 7 if weights == (1, 1) else 8)
    for cell in np.flatnonzero(found.alive):
        attn, mlp = found.attn[cell], found.mlp[cell]
        assert (attn[0], mlp[0], attn[-1], mlp[-1]) == (True,) * 4
        skipped = LAYERS - sum(attn) if blocks else weight(attn, mlp, weights)
        assert skipped == cell
        hidden, logits = forward(s, attn, mlp)
        np.testing.assert_allclose(found.states[:, cell][s.valid], hidden[-1][s.valid], atol=ATOL)
        assert found.similarity[cell] == pytest.approx(cosine(s, hidden[-1], full[-1]), abs=1e-5)
        agree = np.argmax(logits, axis=-1) == np.argmax(full_logits, axis=-1)
        assert found.hits[cell] == agree[s.valid].sum()
        if blocks:
            np.testing.assert_array_equal(attn, mlp)


@pytest.mark.parametrize("weights", [(1, 1), (1, 2)])
def test_never_better_than_exhaustive_search(setup, weights):
    """The program is greedy in depth: its best cosine per weight is at most that of all 64 masks, and close to it."""
    s, found = setup, run(setup, weights)
    full, _ = forward(s, (True,) * LAYERS, (True,) * LAYERS)
    best = {}
    for attn, mlp in all_masks():
        j = weight(attn, mlp, weights)
        best[j] = max(best.get(j, -1), cosine(s, forward(s, attn, mlp)[0][-1], full[-1]))
    gaps = [best[cell] - found.similarity[cell] for cell in np.flatnonzero(found.alive)]
    assert min(gaps) > -1e-5
    assert max(gaps) < 0.05, gaps
    print(f"weights {weights}: largest gap to exhaustive search {max(gaps):.4f}")


def one_at_a_time(s, weights, limit, tau):
    """The same program, every branch in a forward of its own: {cell: (attn, mlp)}, or less where branches are tied."""
    full, _ = forward(s, (True,) * LAYERS, (True,) * LAYERS)
    cells = {0: ((), ())}
    for item in range(2 * LAYERS):
        kind, layer, new = item % 2, item // 2, {}
        candidates = [(j, masks, True) for j, masks in cells.items()]
        if 0 < layer < LAYERS - 1:
            candidates += [
                (j + weights[kind], masks, False) for j, masks in cells.items() if j + weights[kind] <= limit
            ]
        for j, masks, runs in candidates:
            masks = [*masks]
            masks[kind] = (*masks[kind], runs)
            filled = [mask + (True,) * (LAYERS - len(mask)) for mask in masks]
            score = cosine(s, forward(s, *filled)[0][item + 1], full[item + 1])
            if score >= tau and score > new.get(j, (-2,))[0]:
                new[j] = score, tuple(masks)
        cells = {j: masks for j, (_, masks) in new.items()}
    return cells


@pytest.mark.parametrize(("weights", "limit", "tau"), [((1, 2), 6, -1.0), ((2, 1), 11, 0.93), ((1, 1), 2, 0.9)])
def test_all_branches_at_once_are_the_branches_one_at_a_time(setup, weights, limit, tau):
    found, expected = run(setup, weights, limit, tau=tau), one_at_a_time(setup, weights, limit, tau)
    assert set(np.flatnonzero(found.alive)) == set(expected)
    for cell, (attn, mlp) in expected.items():
        np.testing.assert_array_equal(found.attn[cell], attn)
        np.testing.assert_array_equal(found.mlp[cell], mlp)
    if tau > 0:
        assert len(expected) < len(one_at_a_time(setup, weights, limit, -1.0)) or limit == 2
    assert max(expected) <= limit


def test_only_committed_rows_of_the_prefix_are_read(setup):
    """NaN in every row from `start` on, the reference tokens' own rows among them, changes nothing."""
    s = setup
    scratch = np.arange(64)[None, :, None, None] >= s.start[:, None, None, None]
    dirty = jax.tree.map(lambda x: jnp.where(scratch, jnp.nan, x), s.cache)
    jax.tree.map(np.testing.assert_array_equal, run(s, cache=dirty), run(s))


def test_a_long_prefix_and_few_cells(setup, monkeypatch):
    """Chunks of the prefix that do not divide the cache's 64 rows; cells beyond the number asked for do not exist."""
    s, whole = setup, run(setup, limit=3)
    monkeypatch.setattr(xla, "CHUNK", 7)
    parts = run(s, limit=3, cells=4)
    assert parts.alive.tolist() == [True] * 4
    assert whole.alive.tolist() == [True] * 4 + [False] * (CELLS - 4)
    np.testing.assert_array_equal(parts.attn, whole.attn[:4])
    np.testing.assert_array_equal(parts.mlp, whole.mlp[:4])
    for cell in range(4):
        np.testing.assert_allclose(parts.states[:, cell][s.valid], whole.states[:, cell][s.valid], atol=ATOL)


def test_with_kernels(setup):
    """Interpreted. Cells that no longer count are not computed, and nothing of the others changes."""
    s, plain = setup, run(setup, tau=0.9)
    kernels = s._replace(models=s.models.replace(target=Decoder(s.models.target.config, "interpret")))
    found = run(kernels, tau=0.9)
    np.testing.assert_array_equal(found.alive, plain.alive)
    assert not found.alive.all()
    for cell in np.flatnonzero(found.alive):
        np.testing.assert_array_equal(found.attn[cell], plain.attn[cell])
        np.testing.assert_array_equal(found.mlp[cell], plain.mlp[cell])
        np.testing.assert_allclose(found.states[:, cell][s.valid], plain.states[:, cell][s.valid], atol=ATOL)
    np.testing.assert_array_equal(found.hits[found.alive], plain.hits[plain.alive])
    assert np.all(np.isfinite(found.states))


def test_a_limit_of_0_leaves_the_full_model(setup):
    assert run(setup, (1, 1), 0).alive.tolist() == [True] + [False] * (CELLS - 1)
