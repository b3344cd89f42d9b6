"""Checks that a method's output is the target's own: exact on a tiny model, statistical and greedy on any model."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decode import generate
from jaxspec.enumeration import plain_distribution, speculative_distribution
from jaxspec.methods.base import Method, Models
from jaxspec.models import Decoder, ModelConfig, RopeConfig, init_cache, init_params
from jaxspec.prefill import fill_cache
from jaxspec.profiling import fused_step
from jaxspec.requests import bucket, check_request
from jaxspec.sampling import Sampling, to_probs
from jaxspec.stream import _prefill
from jaxspec.types import Array, DecodeState

MAX_DISTANCE = 1e-6  # total variation that rounding may leave
MIN_P_VALUE = 1e-3
TIE = 1e-4  # float32 logits this close may change places between programs of different shapes
LIKELIEST = 20  # tokens with a bin of their own


@dataclass(frozen=True)
class Check:
    """The verdict on one item."""

    name: str
    passed: bool
    detail: str


def check_enumeration(method: Method, sampling: Sampling, name: str) -> Check:
    """Every path of two rounds on a tiny random model, against the target's exact distribution.

    Options that only matter at length are reduced: at most two drafts, and budgets of a few rows.
    """
    target, params = _tiny_model(layers=2, seed=0)
    draft_params = None
    limits = {"num_draft": 2, "max_draft": 2, "min_keep": 3, "page_size": 2, "sinks": 1}
    options = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    changes: dict[str, Any] = {name: min(options[name], limit) for name, limit in limits.items() if name in options}
    if "plan" in options:
        changes["plan"] = None
    if "selection" in options:
        changes["selection"] = _with_two_shares(options["selection"])
    if method.needs_draft_params:
        changes["model"], draft_params = _tiny_model(layers=1, seed=1)
    prompt = [int(i) for i in np.random.default_rng(0).integers(0, 3, 24)]
    tiny = dataclasses.replace(_with_two_shares(method), **changes).fixed(target.config.num_layers)
    mine, accepted = speculative_distribution(Models(target, params, draft_params), tiny, prompt, 1, sampling, 2)
    expected = plain_distribution(Models(target, params), prompt, 1, sampling, mine.ndim)
    distance = 0.5 * float(np.sum(np.abs(mine - expected)))
    detail = f"total variation {distance:.1e} (limit {MAX_DISTANCE:.0e}), {accepted:.2f} drafts accepted per round"
    return Check(name, distance <= MAX_DISTANCE, detail)


def _with_two_shares(method: Any) -> Any:
    """Rows by layer, where the method has some, for a model of two layers: the least and the most."""
    shares = getattr(method, "layer_shares", "")
    return dataclasses.replace(method, layer_shares=(min(shares), max(shares))) if shares else method


def check_sampling(
    models: Models, method: Method, prompt: list[int], sampling: Sampling, draws: int, key: Array
) -> list[Check]:
    """Chi-square of sampled tokens after a fixed prefix: the prompt and two greedy rounds.

    One round is repeated with fresh keys. Its first token is compared with the target's distribution, and so is its
    second where the first is the most frequent one and a draft.

    Args:
        models: the user's models.
        method: the method.
        prompt: token ids.
        sampling: how tokens are drawn; not greedy.
        draws: how many rounds are drawn, rounded up to whole batches.
        key: a PRNG key.
    """
    method = method.fixed(models.target.config.num_layers)
    batch, rounds = min(draws, 16), 2
    max_new_tokens = (rounds + 1) * (method.max_draft + 1) + 2
    request = check_request(
        models.target,
        np.tile(np.asarray(prompt, np.int32), (batch, 1)),
        np.full(batch, len(prompt), np.int32),
        key,
        method,
        sampling,
        max_new_tokens,
        (),
        0,
        models.draft_params,
    )
    greedy = request.replace(sampling=Sampling())
    running = np.zeros(batch, bool)
    state, _ = _prefill(models, greedy, method, max_new_tokens)
    for _ in range(rounds):
        state, _ = fused_step(models, state, greedy, running, method, max_new_tokens)
    emitted = np.asarray(state.tokens)[:, : int(state.num_tokens[0])]
    if np.any(emitted != emitted[0]):
        raise ValueError("equal rows differ after greedy rounds")
    prefix = [*prompt, *emitted[0].tolist()]

    first, second, count = [], [], []
    for repeat in range(-(-draws // batch)):
        keys = jax.random.split(jax.random.fold_in(key, repeat), batch)
        tokens, emitted_count = _sampled_round(models, state, request, keys, method, max_new_tokens)
        first.append(tokens[:, 0])
        second.append(tokens[:, min(1, method.max_draft)])
        count.append(emitted_count)
    first, second, count = (np.concatenate(x) for x in (first, second, count))
    checks = [_chi_square("sampled tokens, first of a round", first, models, prefix, sampling)]
    likely = int(np.argmax(np.bincount(first)))
    after = second[(first == likely) & (count >= 2)]
    if after.size >= 100:
        name = "sampled tokens, second of a round"
        checks.append(_chi_square(name, after, models, [*prefix, likely], sampling))
    return checks


def check_greedy(models: Models, method: Method, prompts: list[list[int]], max_new_tokens: int) -> Check:
    """Greedy output against plain decoding's, up to each row's first difference.

    A difference is a tie, and passes, if the two tokens' logits lie closer than arithmetic can tell: within 1e-4 in
    float32, else within twice the error that the model's dtype makes at that place, both rescored in float32.
    """
    width = max(map(len, prompts))
    padded = np.array([ids + [0] * (width - len(ids)) for ids in prompts], np.int32)
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    run = partial(
        generate, models.target, models.params, padded, lengths, jax.random.key(0), max_new_tokens=max_new_tokens
    )
    expected = np.asarray(run().tokens)
    out = run(method=method, draft_params=models.draft_params)
    tokens = np.asarray(out.tokens)
    ties = []
    for b in np.flatnonzero(np.any(tokens != expected, axis=1)):
        at = int(np.argmax(tokens[b] != expected[b]))
        gap, limit = _gap(models, [*prompts[b], *expected[b, :at].tolist()], int(tokens[b, at]), int(expected[b, at]))
        if not gap <= limit:
            detail = f"row {b}: token {at} differs, logits {gap:.2e} apart (rounding explains {limit:.1e})"
            return Check("greedy output", False, detail)
        ties.append(f"row {b} parts at token {at}, logits {gap:.1e} apart (rounding explains {limit:.1e})")
    per_round = float(np.sum(out.stats.emitted) / np.sum(out.stats.rounds))
    detail = f"{tokens.size} tokens of {len(prompts)} prompts, {per_round:.2f} per round; "
    return Check("greedy output", True, detail + ("ties: " + "; ".join(ties) if ties else "identical"))


def _tiny_model(layers: int, seed: int) -> tuple[Decoder, dict]:
    config = ModelConfig("llama", 3, 8, 16, layers, 2, 1, 4, 512, RopeConfig())
    return Decoder(config), init_params(config, jax.random.key(seed))


@partial(jax.jit, static_argnames=("method", "max_new_tokens"))
def _one_round(
    models: Models, state: DecodeState, request: object, running: Array, method: Method, max_new_tokens: int
) -> tuple[Array, Array]:
    _, (tokens, count, *_) = fused_step(models, state, request, running, method, max_new_tokens)
    return tokens, count


def _sampled_round(
    models: Models, state: DecodeState, request: object, keys: Array, method: Method, max_new_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    running = np.zeros(keys.shape[0], bool)
    tokens, count = _one_round(models, state.replace(keys=keys), request, running, method, max_new_tokens)
    return np.asarray(tokens), np.asarray(count)


@jax.jit
def _logits_after(models: Models, tokens: Array, length: Array) -> Array:
    cache = init_cache(models.target.config, 1, tokens.shape[1], models.params["embedding"].dtype)
    cache = fill_cache(models.target, models.params, tokens, length, cache)
    last = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
    return models.forward(last, cache, length - 1).logits[0, 0]


def _logits(models: Models, tokens: list[int]) -> Array:
    padded = np.zeros((1, bucket(len(tokens))), np.int32)
    padded[0, : len(tokens)] = tokens
    return _logits_after(Models(models.target, models.params), padded, np.array([len(tokens)], np.int32))


def _chi_square(name: str, seen: np.ndarray, models: Models, prefix: list[int], sampling: Sampling) -> Check:
    probs = np.asarray(to_probs(_logits(models, prefix)[None], sampling)[0], np.float64)
    probs /= probs.sum()
    impossible = int(np.sum(probs[seen] == 0))
    if impossible:
        return Check(name, False, f"{impossible} of {seen.size} tokens have probability 0")
    likeliest = np.argsort(-probs, kind="stable")[:LIKELIEST]
    # bins with less than five expected tokens join the rest
    bins = [token for token in likeliest if probs[token] * seen.size >= 5]
    expected = np.array([*probs[bins], 1 - np.sum(probs[bins])]) * seen.size
    counts = np.array([*(np.sum(seen == token) for token in bins), np.sum(~np.isin(seen, bins))])
    if expected[-1] < 5 and bins:
        expected, counts = (np.array([*x[:-2], x[-2] + x[-1]]) for x in (expected, counts))
    if len(expected) < 2:
        return Check(name, True, f"one token has all the probability that {seen.size} draws can show")
    statistic = float(np.sum((counts - expected) ** 2 / expected))
    degrees = len(expected) - 1
    p_value = float(jax.scipy.special.gammaincc(degrees / 2, statistic / 2))
    detail = f"chi-square {statistic:.1f}, {degrees} degrees of freedom, p = {p_value:.3f}, {seen.size} draws"
    return Check(name, p_value >= MIN_P_VALUE, detail)


def _gap(models: Models, prefix: list[int], one: int, other: int) -> tuple[float, float]:
    """How far apart two tokens' logits are, and what rounding explains."""
    logits = np.asarray(_logits(models, prefix), np.float64)[[one, other]]
    if models.params["embedding"].dtype == jnp.float32:
        return abs(float(logits[0] - logits[1])), TIE
    exact_params = jax.tree.map(lambda x: x.astype(jnp.float32), models.params)
    exact = np.asarray(_logits(Models(models.target, exact_params), prefix), np.float64)[[one, other]]
    return abs(float(exact[0] - exact[1])), 2 * float(np.max(np.abs(exact - logits)))
