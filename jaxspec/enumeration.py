"""Exact output distributions: every path of a few speculative rounds on a tiny model, weighted by its probability.

Each row of the batch plays one path, that is one outcome of every draw: the draft tokens, how many are accepted, and
the token after them. Nothing is sampled, so what is left of a difference is rounding.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.acceptance import acceptance
from jaxspec.decode import run_prefill
from jaxspec.drafting import ForcedDraws
from jaxspec.methods.base import Method, Models
from jaxspec.models.decoder import init_cache
from jaxspec.requests import check_request
from jaxspec.sampling import Sampling, to_probs
from jaxspec.types import Array, DecodeState, Verdict


def speculative_distribution(
    models: Models, method: Method, prompt: list[int], first: int, sampling: Sampling, rounds: int
) -> tuple[np.ndarray, float]:
    """The distribution of the first rounds * (g + 1) tokens after `first`, by enumeration.

    Tokens that the rounds of a path do not reach are drawn from the target itself.

    Args:
        models: a model with a vocabulary of two or three ids; there are (V^g (g + 1) V)^rounds paths.
        method: the method; its draft must draw with `draft_chain`, or not at all.
        prompt: token ids.
        first: the token that the prefill emits.
        sampling: the target's.
        rounds: how many rounds are enumerated, at least 1.

    Returns:
        float64 [V] * (rounds * (g + 1)), and the mean number of drafts accepted in a round.

    Raises:
        ValueError: the method draws its drafts in a way that cannot be forced.
    """
    vocab, g = models.target.config.vocab_size, method.max_draft
    drafts = list(itertools.product(range(vocab), repeat=g))
    outcomes = list(itertools.product(range(g + 1), range(vocab)))
    whole_rounds = [draft + outcome for draft in drafts for outcome in outcomes]
    # the outcomes of the last round change nothing that follows, so one row stands for all of them
    last_round = [(*draft, 0, 0) for draft in drafts]
    script = np.array(
        [sum(path, ()) for path in itertools.product(*[whole_rounds] * (rounds - 1), last_round)], np.int32
    ).reshape(-1, rounds, g + 2)
    rows = np.arange(len(script))
    state = _start(models, method, prompt, first, sampling, len(script), rounds * (g + 1) + 1)
    weight = np.ones(len(script))
    for r in range(rounds):
        before = state
        state, draft_chance, outcome_chance = _play(models, state, sampling, jnp.asarray(script[:, r]), method)
        weight = weight * np.asarray(draft_chance, np.float64)
        if np.any(np.isnan(weight)):
            raise ValueError(f"{type(method).__name__} does not follow forced draws; draft with draft_chain")
        outcome_chance = np.asarray(outcome_chance, np.float64)
        if r < rounds - 1:
            weight = weight * outcome_chance[rows, script[:, r, g], script[:, r, g + 1]]

    tokens, reached = np.asarray(before.tokens)[:, 1:], np.asarray(before.num_tokens) - 1
    paths = []
    for accepted, token in outcomes:
        path = tokens.copy()
        for i in range(g):
            path[rows, reached + i] = script[:, -1, i]
        path[rows, reached + accepted] = token
        paths.append((path, reached + accepted + 1, weight * outcome_chance[:, accepted, token]))
    tokens, reached, weight = map(np.concatenate, zip(*paths, strict=True))
    mean_accepted = float(np.sum(weight * (reached - rounds))) / rounds
    num_tokens = rounds * (g + 1)
    full = plain_distribution(models, prompt, first, sampling, num_tokens)
    return _completed(tokens[:, :num_tokens], reached, weight, full), mean_accepted


def plain_distribution(
    models: Models, prompt: list[int], first: int, sampling: Sampling, num_tokens: int
) -> np.ndarray:
    """The target's own distribution of `num_tokens` tokens after `first`: float64 [V] * num_tokens."""
    vocab = models.target.config.vocab_size
    paths = np.array(list(itertools.product(range(vocab), repeat=num_tokens)), np.int32)
    inputs = np.concatenate([np.tile([*prompt, first], (len(paths), 1)), paths[:, :-1]], axis=1).astype(np.int32)
    logits = _full_forward(models, jnp.asarray(inputs))[:, len(prompt) :]
    probs = np.asarray(to_probs(logits, sampling), np.float64)
    chosen = np.take_along_axis(probs, paths[:, :, None], axis=2)[:, :, 0]
    return np.prod(chosen, axis=1).reshape((vocab,) * num_tokens)


@jax.jit
def _full_forward(models: Models, tokens: Array) -> Array:
    cache = init_cache(models.target.config, *tokens.shape, models.params["embedding"].dtype)
    return models.forward(tokens, cache, jnp.int32(0)).logits


def _start(
    models: Models, method: Method, prompt: list[int], first: int, sampling: Sampling, rows: int, max_new_tokens: int
) -> DecodeState:
    request = check_request(
        models.target,
        np.tile(np.asarray(prompt, np.int32), (rows, 1)),
        np.full(rows, len(prompt), np.int32),
        jax.random.key(0),
        method,
        sampling,
        max_new_tokens,
        (),
        0,
        models.draft_params,
    )
    state = run_prefill(models, request, method, max_new_tokens)
    return state.replace(tokens=state.tokens.at[:, 0].set(first), last_token=jnp.full(rows, first, jnp.int32))


@partial(jax.jit, static_argnames="method")
def _play(
    models: Models, state: DecodeState, sampling: Sampling, script: Array, method: Method
) -> tuple[DecodeState, Array, Array]:
    """One round of each row's path: draft tokens, number of accepted ones and next token, script int32 [B, g + 2].

    Returns the state after it, the chance of the draft [B] (NaN if the draft did not follow) and, given the draft,
    that of every outcome [B, g + 1, V].
    """
    g = method.max_draft
    forced, accepted, token = script[:, :g], script[:, g], script[:, g + 1]
    draws = ForcedDraws(forced)
    draft, cache, method_state = method.draft(models, state, sampling, draws)
    follows = jnp.all(draft.tokens == forced, axis=1)
    # where nothing was drawn, of all paths the one with these tokens has the whole chance
    draft_chance = follows.astype(jnp.float32) if draws.chance is None else jnp.where(follows, draws.chance, jnp.nan)
    state = state.replace(cache=cache, method_state=method_state)
    out = method.verify(models, state, draft)
    accept_prob, next_probs = acceptance(draft, to_probs(out.logits, sampling))
    reach = jnp.cumprod(jnp.pad(accept_prob, ((0, 0), (1, 0)), constant_values=1), axis=1)
    outcome_chance = (reach * jnp.pad(1 - accept_prob, ((0, 0), (0, 1)), constant_values=1))[..., None] * next_probs

    emitted = jnp.where(jnp.arange(g + 1) < accepted[:, None], jnp.pad(forced, ((0, 0), (0, 1))), token[:, None])
    tokens = jax.vmap(lambda t, e, i: jax.lax.dynamic_update_slice(t, e, (i,)))(state.tokens, emitted, state.num_tokens)
    length = state.length
    state = state.replace(
        cache=out.cache,
        tokens=tokens,
        num_tokens=state.num_tokens + accepted + 1,
        length=length + accepted + 1,
        last_token=token,
        round=state.round + 1,
    )
    method_state = method.observe(models, state.method_state, out, draft, Verdict(accepted, token), length)
    return state.replace(method_state=method_state), draft_chance, outcome_chance


def _completed(tokens: np.ndarray, reached: np.ndarray, weight: np.ndarray, full: np.ndarray) -> np.ndarray:
    """The distribution over all of `full`'s tokens of weighted paths, of which the first `reached` tokens are set."""
    total = np.zeros_like(full)
    for n in np.unique(reached):
        at = reached == n
        mass = np.zeros(full.shape[:n])
        np.add.at(mass, tuple(tokens[at, :n].T), weight[at])
        later = tuple(range(n, full.ndim))
        prefix = np.sum(full, axis=later, keepdims=True)
        # mass on a prefix that the target never emits must show up, so it is spread instead of lost
        rest = np.where(prefix > 0, full / np.where(prefix > 0, prefix, 1), 1 / full[(0,) * n].size)
        total += np.expand_dims(mass, later) * rest
    return total
