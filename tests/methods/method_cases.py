"""Tiny models, and every method of the library with options under which it has something to lose."""

import dataclasses
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import Sampling, decode
from jaxspec.decode import commit, draft_tokens
from jaxspec.methods import Method, Models, Plain, find_methods
from jaxspec.models import Decoder, ModelConfig, RopeConfig, init_cache, init_params
from jaxspec.planning import Plan
from jaxspec.requests import check_request
from jaxspec.stream import _prefill
from jaxspec.types import Collect

VOCAB, NEVER = 19, 18  # greedy decoding never emits the id NEVER
G = 2  # drafts per round
ROUND_LIMIT = 16  # max_new_tokens of `rounds_of`
GREEDY = Sampling()

# on prompts of a few dozen tokens the default budgets would keep every row
SPARSE = {"num_draft": G, "budget": 12, "sinks": 2, "window": 3, "split": 3}
SPARSE |= {"target_heads": ((0, (0, 3)),), "draft_heads": ((0, (1, 2)),)}
OPTIONS = {
    "draft-model": {"num_draft": G},
    "dustin": {**SPARSE, "sparse_drafts": "last"},
    "self-dustin": {**SPARSE, "sparse_drafts": "recent"},
    # the last layer's attention is left out
    "knapspec": {"max_draft": G, "plan": lambda n: Plan((True,) * (n - 1) + (False,), (True,) * n, G)},
    "plain": {},
    "quest": {"num_draft": G, "rho": 0.1, "min_keep": 4, "page_size": 4},
    "streaming": {"num_draft": G, "rho": 0.1, "min_keep": 6},
    # rows by layer: 3 of 4 in the first one
    "vegas": {
        "num_draft": G,
        "rho": 0.1,
        "min_keep": 4,
        "layer_shares": lambda n: tuple(0.6 + 0.8 * i / max(n - 1, 1) for i in range(n)),
    },
}


@dataclass(frozen=True)
class Case:
    """A method with its models."""

    name: str
    method: Method
    models: Models

    def generate(self, prompt, length, key, **options):
        method = options.pop("method", self.method)
        params = options.pop("params", self.models.params)
        return decode.generate(
            self.models.target,
            params,
            prompt,
            length,
            key,
            method=method,
            draft_params=self.models.draft_params,
            **options,
        )


@cache
def tiny_model(layers=2, vocab=VOCAB, seed=0):
    config = ModelConfig("llama", vocab, 16, 32, layers, 4, 2, 8, 4096, RopeConfig())
    params = init_params(config, jax.random.key(seed))
    params["lm_head"] = params["lm_head"] * 2  # some tokens shall be likely
    if vocab == VOCAB:
        params["lm_head"] = params["lm_head"].at[NEVER].set(0)
    return Decoder(config), params


@cache
def similar_model(layers=2, vocab=VOCAB, extra=5, seed=0):
    """The same model with noise in its weights and `extra` more (or, negative, fewer) ids: a fair draft model."""
    target, params = tiny_model(layers, vocab, seed)
    config = dataclasses.replace(target.config, vocab_size=vocab + extra)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    leaves = [x + 0.15 * jnp.std(x) * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    noisy = jax.tree.unflatten(tree, leaves)
    for name in ("embedding", "lm_head"):
        noisy[name] = jnp.pad(noisy[name], ((0, max(extra, 0)), (0, 0)), constant_values=0.5)[: vocab + extra]
    return Decoder(config), noisy


def make_case(name, layers=2, vocab=VOCAB, **changes):
    method = find_methods()[name]
    options = {**OPTIONS.get(name, {"num_draft": G}), **changes}
    options = {key: value(layers) if callable(value) else value for key, value in options.items()}
    target, params = tiny_model(layers, vocab)
    draft_params = None
    if method.needs_draft_params:
        options["model"], draft_params = similar_model(layers, vocab)
    return Case(name, method(**options), Models(target, params, draft_params))


def plain_case(layers=2, vocab=VOCAB):
    return Case("plain", Plain(), Models(*tiny_model(layers, vocab)))


LENGTHS = np.array([40, 7, 1], np.int32)


def prompts(vocab=VOCAB - 1):
    """Ragged prompts, int32 [3, 40] and [3]; what stands behind their ends is another valid id."""
    return np.random.default_rng(1).integers(0, vocab, (3, 40)).astype(np.int32), LENGTHS


def full_logits(models, tokens):
    """Teacher-forced logits [n, V] of one sequence, in one dense forward."""
    # one program for every length
    width = -(-len(tokens) // 128) * 128
    padded = np.pad(np.asarray(tokens, np.int32), (0, width - len(tokens)))
    return np.asarray(_dense_logits(Models(models.target, models.params), padded)[: len(tokens)], np.float64)


@jax.jit
def _dense_logits(models, tokens):
    cache = init_cache(models.target.config, 1, len(tokens), jnp.float32)
    return models.forward(tokens[None], cache, jnp.int32(0)).logits[0]


def assert_same_greedy(models, prompt, tokens, expected):
    """Equal, except after a place where the two likeliest tokens are within 1e-4 of each other; says where."""
    tokens, expected = np.asarray(tokens), np.asarray(expected)
    different = np.flatnonzero(tokens != expected)
    if different.size:
        at = different[0]
        logits = np.sort(full_logits(models, [*prompt, *expected[:at]])[-1])
        gap = logits[-1] - logits[-2]
        assert gap < 1e-4, f"token {at} is {tokens[at]} instead of {expected[at]}, {gap} apart"
        print(f"tie at token {at}: {gap}")


@partial(jax.jit, static_argnames=("method", "layers"))
def one_round(models, state, request, method, layers):
    """A round by its phases, and each layer's queries of the verification, from a forward of their own."""
    before = state
    state, draft = draft_tokens(models, state, request, method)
    out = method.verify(models, state, draft)
    state, verdict, *_ = commit(state.replace(cache=out.cache), draft, out, request, ROUND_LIMIT)
    method_state = method.observe(models, state.method_state, out, draft, verdict, before.length)
    inputs = jnp.concatenate([before.last_token[:, None], draft.tokens], axis=1)
    queries = models.forward(inputs, before.cache, before.length, collect=Collect(queries=tuple(range(layers)))).queries
    return state.replace(method_state=method_state), draft, out, verdict, queries


def rounds_of(case, sampling=GREEDY, num_rounds=5):
    """Yields (state before, state after, draft, out, verdict, queries) of each round, keys aside in NumPy."""
    prompt, length = prompts()
    models, keys = case.models, jax.random.key(3)
    request = check_request(
        models.target, prompt, length, keys, case.method, sampling, ROUND_LIMIT, (), 0, case.models.draft_params
    )
    state, _ = _prefill(models, request, case.method, ROUND_LIMIT)
    for _ in range(num_rounds):
        after, *rest = one_round(models, state, request, case.method, models.target.config.num_layers)
        # every eager index into a JAX array would compile a program
        yield jax.tree.map(_on_host, (state, after, *rest))
        state = after


def _on_host(x):
    return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)
