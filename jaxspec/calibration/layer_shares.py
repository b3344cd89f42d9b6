"""How many cache rows each layer of Vegas' drafts is worth."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.calibration.records import ROWS, describe, write_record
from jaxspec.decode import run_prefill
from jaxspec.methods.base import Models
from jaxspec.methods.vegas import Vegas
from jaxspec.requests import check_request
from jaxspec.sampling import Sampling
from jaxspec.selection import buffer_width
from jaxspec.types import Array, Draft, KVCache, KVSelection, Verdict

LEAST, MOST = 0.125, 3.0  # shares lie between


def overlaps(models: Models, texts: Sequence[Sequence[int]], method: Vegas, rounds: int) -> Iterator[np.ndarray]:
    """How well drafts predict texts when one layer reads few rows, text by text and round by round.

    A round's drafts take the text's own tokens, so that all of them are compared in one forward over the rows that the
    verification before has selected. The overlap of two next-token distributions, sum of min(p, q), is the chance that
    a draft sampled from one is accepted by the other (Leviathan et al., arXiv 2211.17192, Theorem 3.5).

    Args:
        models: the target.
        texts: token ids; the last (`rounds` + 1) * (num_draft + 1) of each are predicted.
        method: the drafts, without `layer_shares`.
        rounds: how many rounds in each text, after a first one that selects rows.

    Yields:
        float [L + 1]: the mean overlap with the full model when layer l reads `LEAST` of its rows, and when none does.
    """
    # one after another: a cache for each would not fit where contexts are long
    for text in texts:
        yield from _overlaps_of(models, np.array([text], np.int32), method, rounds)


def _overlaps_of(models: Models, tokens: np.ndarray, method: Vegas, rounds: int) -> Iterator[np.ndarray]:
    step, length = method.num_draft + 1, tokens.shape[1]
    predicted = (rounds + 1) * step
    prompt, lengths = tokens[:, : length - predicted], np.array([length - predicted], np.int32)
    request = check_request(
        models.target, prompt, lengths, jax.random.key(0), method, Sampling(), predicted + step, (), 0, None
    )
    state = run_prefill(models, request, method, predicted + step)
    # in the first round, which is not handed out, both lists are the usual ones
    cache, lists = state.cache, (state.method_state, state.method_state)
    for i in range(rounds + 1):
        start = length - predicted + i * step
        cache, lists, found = _round(models, cache, lists, np.int32(start), tokens[:, start : start + step], method)
        if i:
            yield np.asarray(found)


@partial(jax.jit, static_argnames="method", donate_argnames="cache")
def _round(
    models: Models, cache: KVCache, lists: tuple[KVSelection, KVSelection], start: Array, tokens: Array, method: Vegas
) -> tuple[KVCache, tuple[KVSelection, KVSelection], Array]:
    """One round from row `start` on: the cache with the rows of tokens [B, g + 1], the next round's lists, and the
    overlaps [L + 1]. Of the two lists one has the usual rows in every layer, the other few."""
    batch, num_layers = tokens.shape[0], models.target.config.num_layers
    length = jnp.full(batch, start, jnp.int32)
    draft = Draft(tokens[:, 1:], jnp.full(batch, method.num_draft, jnp.int32), None)
    out = models.forward(tokens, cache, length, collect=method.verify_collect(draft))
    full = jax.nn.softmax(out.logits[:, :-1])
    usual, few = lists

    def overlap(cache: KVCache, layer: Array) -> tuple[KVCache, Array]:
        here = jnp.arange(num_layers)[:, None] == layer
        rows = jnp.where(here[:, :, None], few.rows, usual.rows)
        selection = usual.replace(rows=rows, count=jnp.where(here, few.count, usual.count))
        drafted = models.forward(tokens[:, :-1], cache, length, selection=selection)
        common = jnp.minimum(full, jax.nn.softmax(drafted.logits))
        return drafted.cache, jnp.mean(jnp.sum(common, axis=-1))

    cache, found = jax.lax.scan(overlap, out.cache, jnp.arange(num_layers + 1))
    # the rows of the drafts give way to the full model's
    cache = models.forward(tokens, cache, length).cache
    verdict = Verdict(draft.count, tokens[:, -1])
    methods = method, replace(method, layer_shares=(LEAST,) * num_layers)
    usual, few = (one.observe(models, usual, out, draft, verdict, length) for one in methods)
    missing = usual.rows.shape[2] - few.rows.shape[2]
    few = few.replace(rows=jnp.pad(few.rows, ((0, 0), (0, 0), (0, missing)), constant_values=-1))
    return cache, (usual, few), found


def shares_of(overlap: np.ndarray) -> tuple[float, ...]:
    """Shares of the rows by layer, their mean 1, from the mean overlaps of `overlaps` [L + 1].

    If a layer that reads k rows costs a_l / k of the overlap, the rows that cost least in all are proportional to the
    root of a_l, which is in proportion to what the layer was seen to cost.
    """
    if not np.all(np.isfinite(overlap)):
        raise ValueError(f"overlaps must be finite, got {overlap}")
    # above 0, so that what layers at `MOST` leave goes to those that lose nothing
    root = np.sqrt(np.maximum(overlap[-1] - overlap[:-1], 1e-12))
    low, high = 0.0, MOST / root.min()
    for _ in range(100):
        middle = (low + high) / 2
        shares = np.clip(middle * root, LEAST, MOST)
        low, high = (middle, high) if shares.mean() < 1 else (low, middle)
    return tuple(round(float(share), 3) for share in shares)


def calibrate_rows(
    name: str,
    models: Models,
    texts: Sequence[Sequence[int]],
    method: Vegas,
    path: Path,
    *,
    context: int,
    rounds: int,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = lambda rounds: rounds,
) -> dict[str, Any]:
    """Measures what `Vegas.layer_shares` should be, and writes the record to `path`.

    Args:
        name: of the model, for the record.
        models: the target.
        texts: token ids; the `context` tokens in the middle of each are taken.
        method: the drafts, without `layer_shares`.
        path: the record's file.
        context: tokens of each text, those that are predicted included.
        rounds: rounds in each text.
        progress: goes round the rounds of all texts.

    Returns:
        The record: `shares` [L]; `overlap` [L] and `overlap_of_equal_rows`, as in `overlaps`; settings and the model.

    Raises:
        ValueError: impossible settings, or a text that is too short, before anything is computed.
    """
    least, limit = 2 * (rounds + 1) * (method.num_draft + 1), models.target.config.capacity_limit
    if method.layer_shares:
        raise ValueError("method must be without layer_shares, which are what is measured")
    for what, value in (("rounds", rounds), ("num_draft", method.num_draft)):
        if value < 1:
            raise ValueError(f"{what} must be at least 1, got {value}")
    if not least <= context <= limit - method.num_draft - 1:
        raise ValueError(
            f"context must lie in {least}..{limit - method.num_draft - 1} for {rounds} rounds of {method.num_draft} "
            f"drafts with this model, got {context}"
        )
    if (rows := buffer_width(method.rho, method.min_keep, context)) < 1 / LEAST:
        raise ValueError(f"rho and min_keep must give {1 / LEAST:g} rows or more at {context} tokens, got {rows}")
    if not texts or min(map(len, texts)) < context:
        raise ValueError(f"texts need {context} tokens each, the shortest has {min(map(len, texts), default=0)}")
    starts = [(len(text) - context) // 2 for text in texts]
    pieces = [text[start : start + context] for text, start in zip(texts, starts, strict=True)]
    mean = np.mean(list(progress(overlaps(models, pieces, method, rounds))), axis=0)
    record = {
        "model": describe(name, models.target, models.params),
        "settings": {
            "context": context,
            "rounds": rounds,
            "texts": [len(text) for text in texts],
            **{key: getattr(method, key) for key in ("rho", "min_keep", "num_draft", "score_mode", "collect")},
        },
        "least_share": LEAST,
        "overlap_of_equal_rows": float(mean[-1]),
        "overlap": mean[:-1].tolist(),
        "shares": list(shares_of(mean)),
    }
    write_record(path, ROWS, record)
    return record
