"""The accept rule: exact enumeration of every path of a round, and draws of `accept`."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec import Sampling
from jaxspec.acceptance import accept, acceptance
from jaxspec.sampling import sample, to_probs
from jaxspec.types import Draft

acceptance_of = jax.jit(acceptance)


class Chain:
    """Random next-token distributions of every context of up to `depth` tokens."""

    def __init__(self, vocab, depth, seed, sampling=None, dtype=jnp.float32):
        rng = np.random.default_rng(seed)
        self.vocab = vocab
        self.levels = []
        for n in range(depth + 1):
            logits = rng.normal(0, 1.5, (vocab**n, vocab)).astype(dtype).astype(np.float32)
            if sampling is None:
                probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
            else:
                probs = np.asarray(to_probs(jnp.asarray(logits), sampling))
            self.levels.append(probs.reshape((vocab,) * n + (vocab,)))

    def __call__(self, *context):
        return self.levels[len(context)][tuple(context)]


def target_joint(target, length):
    joint = target().astype(np.float64)
    for n in range(1, length):
        joint = joint[..., None] * target.levels[n].astype(np.float64)
    return joint


def output_joint(target, draft_probs, g, count_of, one_hot=False):
    """The exact distribution of the g + 1 tokens after one round; what the round leaves open the target draws.

    draft_probs(*context) [V]; count_of(path) how many of a path's draft tokens are used.
    """
    vocab = target.vocab
    if one_hot:
        path = []
        for _ in range(g):
            path.append(int(np.argmax(draft_probs(*path))))
        paths = [tuple(path)]
    else:
        paths = list(itertools.product(range(vocab), repeat=g))
    batch = len(paths)
    q = np.stack([[draft_probs(*path[:i]) for i in range(g)] for path in paths]).reshape(batch, g, vocab)
    p = np.stack([[target(*path[:i]) for i in range(g + 1)] for path in paths])
    counts = np.array([count_of(path) for path in paths], np.int32)
    draft = Draft(
        tokens=jnp.array(paths, jnp.int32).reshape(batch, g),
        count=jnp.asarray(counts),
        probs=None if one_hot else jnp.asarray(q, jnp.float32),
    )
    before = p.copy()
    accept_prob, next_probs = (np.asarray(x, np.float64) for x in acceptance_of(draft, jnp.asarray(p)))
    np.testing.assert_array_equal(p, before)
    assert not np.isnan(accept_prob).any()
    np.testing.assert_allclose(next_probs.sum(-1), 1, atol=1e-6)
    joint = np.zeros((vocab,) * (g + 1))
    for b, path in enumerate(paths):
        # slots at or past the count are drawn too, and ignored
        chance = 1.0 if one_hot else np.prod([q[b, i, path[i]] for i in range(g)], dtype=np.float64)
        for accepted in range(g + 1):
            stop = (1 - accept_prob[b, accepted]) if accepted < g else 1.0
            for token in range(vocab):
                emitted = (*path[:accepted], token)
                rest = np.ones(())
                for n in range(accepted + 1, g + 1):
                    rest = rest[..., None] * target.levels[n][emitted].astype(np.float64)
                joint[emitted] += chance * stop * next_probs[b, accepted, token] * rest
            if accepted < g:
                chance = chance * accept_prob[b, accepted]
    return joint


def total_variation(a, b):
    return 0.5 * np.abs(a - b).sum()


COUNTS = {
    "all": lambda draft, g: lambda path: g,
    "none": lambda draft, g: lambda path: 0,
    "one": lambda draft, g: lambda path: 1,
    # an early stop may see earlier tokens and the distribution of the slot, never the token drawn there
    "confident": lambda draft, g: lambda path: next((i for i in range(g) if draft(*path[:i]).max() < 0.4), g),
    "by first token": lambda draft, g: lambda path: g if path[0] % 2 else 1,
}


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("g", "vocab"), [(1, 8), (2, 4), (2, 6)])
def test_every_path(g, vocab, counts, one_hot):
    for seed in range(2):
        target, draft = Chain(vocab, g, seed), Chain(vocab, g, 100 + seed)
        joint = output_joint(target, draft, g, COUNTS[counts](draft, g), one_hot)
        assert total_variation(joint, target_joint(target, g + 1)) < 1e-6


FILTERS = {
    "draft top_k 2, target top_k 3": (Sampling(temperature=1.0, top_k=2), Sampling(temperature=1.0, top_k=3)),
    "draft wider": (Sampling(temperature=1.0), Sampling(temperature=0.5, top_k=2)),
    "draft greedy": (Sampling(), Sampling(temperature=1.0, top_p=0.9)),
    "target greedy": (Sampling(temperature=1.0, top_k=3), Sampling()),
    "min_p": (Sampling(temperature=2.0), Sampling(temperature=1.0, min_p=0.2)),
}


@pytest.mark.parametrize("case", FILTERS)
def test_draft_and_target_filtered_differently(case):
    of_draft, of_target = FILTERS[case]
    target, draft = Chain(8, 2, 5, of_target), Chain(8, 2, 6, of_draft)
    joint = output_joint(target, draft, 2, lambda path: 2)
    expected = target_joint(target, 3)
    assert total_variation(joint, expected) < 1e-6
    assert joint[expected == 0].sum() < 1e-12


def test_draft_from_rounded_logits():
    """A draft whose bfloat16 logits tie: the ratio must use the very array that was sampled from, not a finer one."""
    target, draft = Chain(6, 2, 3), Chain(6, 2, 3, dtype=jnp.bfloat16)
    assert total_variation(target(), draft()) > 1e-4
    joint = output_joint(target, draft, 2, lambda path: 2)
    assert total_variation(joint, target_joint(target, 3)) < 1e-6


def test_residual_that_vanishes():
    """p = q, exactly and up to rounding: all is accepted, and what would follow a rejection is a distribution."""
    target = Chain(8, 2, 0)
    joint = output_joint(target, target, 2, lambda path: 2)
    assert total_variation(joint, target_joint(target, 3)) < 1e-6
    p = np.stack([target() for _ in range(3)])[None]
    draft = Draft(jnp.array([[2, 5]]), jnp.array([2]), jnp.asarray(p[:, :2]))
    accept_prob, next_probs = acceptance_of(draft, jnp.asarray(p))
    np.testing.assert_array_equal(accept_prob, 1)
    np.testing.assert_allclose(next_probs, p, rtol=1e-6)
    almost = Draft(jnp.array([[2, 5]]), jnp.array([2]), jnp.asarray(np.nextafter(p[:, :2], np.float32(1))))
    accept_prob, next_probs = acceptance_of(almost, jnp.asarray(p))
    assert np.all(np.asarray(accept_prob) > 1 - 1e-6)
    assert np.all(np.isfinite(next_probs))
    np.testing.assert_allclose(next_probs.sum(-1), 1, rtol=1e-6)


def test_unused_slots_may_hold_anything():
    target = Chain(5, 2, 1)
    p = jnp.asarray(np.stack([target(), target(3), target(3, 1)])[None])
    q = jnp.asarray(np.stack([Chain(5, 2, 2)(), Chain(5, 2, 2)(3)])[None])
    clean = acceptance(Draft(jnp.array([[3, 1]]), jnp.array([1]), q), p)
    for rubbish in (np.nan, np.inf, 0.0, 1e30):
        dirty = acceptance(Draft(jnp.array([[3, 4]]), jnp.array([1]), q.at[:, 1].set(rubbish)), p)
        for a, b in zip(clean, dirty, strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(clean[0][0, 1], 0)
    np.testing.assert_allclose(clean[1][0, 1], p[0, 1], rtol=1e-6)


def test_rows_with_disjoint_supports():
    """Five rows, each with two tokens of its own: what follows a draft from elsewhere stays in the row's support."""
    p = np.zeros((5, 3, 10), np.float32)
    q = np.zeros((5, 2, 10), np.float32)
    for b in range(5):
        p[b, :, 2 * b : 2 * b + 2] = 0.5
        q[b, :, (2 * b + 2) % 10] = 1.0
    draft = Draft(jnp.asarray(q.argmax(-1), jnp.int32), jnp.full(5, 2), jnp.asarray(q))
    accept_prob, next_probs = acceptance_of(draft, jnp.asarray(p))
    np.testing.assert_array_equal(accept_prob, 0)
    np.testing.assert_allclose(next_probs, p, rtol=1e-6)
    keys = jax.random.split(jax.random.key(0), 5)
    verdict = accept(draft, jnp.log(jnp.asarray(p)), Sampling(temperature=1.0), keys)
    np.testing.assert_array_equal(verdict.num_accepted, 0)
    np.testing.assert_array_equal(np.asarray(verdict.next_token) // 2, np.arange(5))


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=np.zeros(5)), Sampling(temperature=1.0, top_k=1)]
)
def test_greedy_verdicts(sampling):
    """Rejections forced at every position, and counts below g; the bonus token may be id 0."""
    g, vocab = 4, 7
    logits = np.random.default_rng(0).normal(0, 3, (5, g + 1, vocab)).astype(np.float32)
    logits[:, :, 0] += 4
    logits[:, 0, 3] += 20
    choice = logits.argmax(-1)
    assert np.any(choice == 0)
    verdict_of = jax.jit(accept)
    for count in range(g + 1):
        for wrong in range(g + 1):
            tokens = choice[:, :g].copy()
            tokens[:, wrong:] = (tokens[:, wrong:] + 1) % vocab
            draft = Draft(jnp.asarray(tokens, jnp.int32), jnp.full(5, count, jnp.int32), None)
            verdict = verdict_of(draft, jnp.asarray(logits), sampling, jax.random.split(jax.random.key(count), 5))
            accepted = min(count, wrong)
            np.testing.assert_array_equal(verdict.num_accepted, accepted)
            np.testing.assert_array_equal(verdict.next_token, choice[:, accepted])
            assert verdict.next_token.dtype == jnp.int32


def test_draws_have_the_targets_distribution():
    draws, vocab, g = 200_000, 6, 2
    target, draft = Chain(vocab, g, 11), Chain(vocab, g, 12)
    p_levels = [jnp.asarray(level) for level in target.levels]
    q_levels = [jnp.asarray(level) for level in draft.levels]

    @jax.jit
    def rounds(keys):
        fold = jax.vmap(jax.random.fold_in, (0, None))
        q0 = jnp.broadcast_to(q_levels[0], (draws, vocab))
        d0 = sample(q0, fold(keys, 10))
        d1 = sample(q_levels[1][d0], fold(keys, 11))
        drafted = Draft(jnp.stack([d0, d1], 1), jnp.full(draws, g), jnp.stack([q0, q_levels[1][d0]], 1))
        p = jnp.stack([jnp.broadcast_to(p_levels[0], (draws, vocab)), p_levels[1][d0], p_levels[2][d0, d1]], 1)
        verdict = accept(drafted, jnp.log(p), Sampling(temperature=1.0), fold(keys, 12))
        first = jnp.where(verdict.num_accepted > 0, d0, verdict.next_token)
        second = jnp.where(verdict.num_accepted > 1, d1, verdict.next_token)
        # a round that ended at the first token leaves the second to the target
        second = jnp.where(verdict.num_accepted > 0, second, sample(p_levels[1][first], fold(keys, 13)))
        return first, second, verdict.num_accepted

    first, second, accepted = rounds(jax.random.split(jax.random.key(2), draws))
    counts = np.bincount(np.asarray(first) * vocab + np.asarray(second), minlength=vocab**2)
    expected = target_joint(target, 2).ravel()
    assert stats.chisquare(counts, draws * expected / expected.sum()).pvalue > 1e-3
    # the rule accepts with chance sum(min(p, q)), no less
    overlap = np.minimum(target(), draft()).sum()
    assert abs(np.mean(np.asarray(accepted) > 0) - overlap) < 5 * np.sqrt(overlap * (1 - overlap) / draws)
