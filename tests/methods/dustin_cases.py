"""What the tests of Dustin share: a row budget, forwards over chosen rows, and references in NumPy and plain Python."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from method_cases import LENGTHS, ROUND_LIMIT, G, prompts

from jaxspec.decode import draft_tokens
from jaxspec.models import init_cache
from jaxspec.profiling import fused_step
from jaxspec.requests import check_request
from jaxspec.stream import _prefill
from jaxspec.types import Collect, KVSelection

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
