"""How many cache rows each layer of Vegas' drafts is worth."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decode import run_prefill
from jaxspec.methods.base import Models
from jaxspec.methods.vegas import Vegas
from jaxspec.requests import check_request
from jaxspec.sampling import Sampling
from jaxspec.types import Array, Draft, KVCache, KVSelection, Verdict

LEAST, MOST = 0.125, 3.0  # shares lie between


def overlaps(models: Models, texts: Sequence[Sequence[int]], method: Vegas, rounds: int) -> Iterator[np.ndarray]:
    """How well drafts predict a text when one layer reads few rows, round by round.

    A round's drafts take the text's own tokens, so that all of them are compared in one forward over the rows that the
    verification before has selected. The overlap of two next-token distributions, sum of min(p, q), is the chance that
    a draft sampled from one is accepted by the other (Leviathan et al., arXiv 2211.17192, Theorem 3.5).

    Args:
        models: the target.
        texts: token ids, all of one length; the last `rounds` * (num_draft + 1) + 1 of each are predicted.
        method: the drafts, without `layer_shares`.
        rounds: how many rounds.

    Yields:
        float [L + 1]: the mean overlap with the full model when layer l reads `LEAST` of its rows, and when none does.
    """
    tokens, step = np.array(texts, np.int32), method.num_draft + 1
    batch, length = tokens.shape
    predicted = rounds * step
    prompt, lengths = tokens[:, : length - predicted], np.full(batch, length - predicted, np.int32)
    request = check_request(
        models.target, prompt, lengths, jax.random.key(0), method, Sampling(), predicted + step, (), 0, None
    )
    state = run_prefill(models, request, method, predicted + step)
    # both kinds of lists are made of the same scores, those of the first round excepted
    cache, lists = state.cache, (state.method_state, state.method_state)
    for i in range(rounds):
        start = length - predicted + i * step
        cache, lists, found = _round(models, cache, lists, np.int32(start), tokens[:, start : start + step], method)
        if i:
            yield np.asarray(found)


@partial(jax.jit, static_argnames="method", donate_argnames="cache")
def _round(
    models: Models, cache: KVCache, lists: tuple[KVSelection, KVSelection], start: Array, tokens: Array, method: Vegas
) -> tuple[KVCache, tuple[KVSelection, KVSelection], Array]:
    batch, num_layers = tokens.shape[0], models.target.config.num_layers
    length = jnp.full(batch, start, jnp.int32)
    draft = Draft(tokens[:, 1:], jnp.full(batch, method.num_draft, jnp.int32), None)
    out = models.forward(tokens, cache, length, collect=method.verify_collect(draft))
    full = jax.nn.softmax(out.logits[:, :-1])
    usual, few = lists
    missing = usual.rows.shape[2] - few.rows.shape[2]
    few_rows = jnp.pad(few.rows, ((0, 0), (0, 0), (0, missing)), constant_values=-1)

    def overlap(cache: KVCache, layer: Array) -> tuple[KVCache, Array]:
        here = jnp.arange(num_layers)[:, None] == layer
        rows = jnp.where(here[:, :, None], few_rows, usual.rows)
        selection = usual.replace(rows=rows, count=jnp.where(here, few.count, usual.count))
        drafted = models.forward(tokens[:, :-1], cache, length, selection=selection)
        common = jnp.minimum(full, jax.nn.softmax(drafted.logits))
        return drafted.cache, jnp.mean(jnp.sum(common, axis=-1))

    cache, found = jax.lax.scan(overlap, out.cache, jnp.arange(num_layers + 1))
    # the rows of the drafts give way to the full model's
    cache = models.forward(tokens, cache, length).cache
    verdict = Verdict(draft.count, tokens[:, -1])
    methods = method, replace(method, layer_shares=(LEAST,) * num_layers)
    made = tuple(one.observe(models, usual, out, draft, verdict, length) for one in methods)
    return cache, made, found


def shares_of(overlap: np.ndarray) -> tuple[float, ...]:
    """Shares of the rows by layer, their mean 1, from the mean overlaps of `overlaps` [L + 1].

    If a layer that reads k rows costs a_l / k of the overlap, the rows that cost least in all are proportional to the
    root of a_l, which is in proportion to what the layer was seen to cost.
    """
    root = np.sqrt(np.maximum(overlap[-1] - overlap[:-1], 0))
    if not root.any():
        return (1.0,) * root.size
    low, high = 0.0, MOST / root[root > 0].min()
    for _ in range(100):
        middle = (low + high) / 2
        shares = np.clip(middle * root, LEAST, MOST)
        low, high = (middle, high) if shares.mean() < 1 else (low, middle)
    return tuple(float(share) for share in shares.round(3))
