"""Attention scores of chosen heads in chosen layers, and the one set of cache rows that they choose."""

from typing import TypeAlias

import jax.numpy as jnp

from jaxspec.selection import promote, protect, sink_and_recent_rows, top_rows
from jaxspec.types import Array, KVCache
from pallas_kernels import attention_scores

# ((layer, (query head, ...)), ...): static, hashable; layers and the heads of a layer are distinct
Heads: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]


def layers_of(heads: Heads) -> tuple[int, ...]:
    """The layers that `heads` names, in its order."""
    return tuple(layer for layer, _ in heads)


def check_heads(name: str, heads: Heads, num_layers: int | None = None, num_heads: int | None = None) -> None:
    """Raises ValueError unless `heads` is as the type says, within the model's sizes where these are given."""
    form = f"{name} must be ((layer, (head, ...)), ...) of distinct layers and heads"
    try:
        entries = [(layer, *chosen) for layer, chosen in heads]
        numbers = all(type(number) is int and number >= 0 for entry in entries for number in entry)
        hash(heads)
    except (TypeError, ValueError):
        raise ValueError(f"{form}, as nested tuples; got {heads!r}") from None
    distinct = all(len(entry) > 1 and len(set(entry[1:])) == len(entry) - 1 for entry in entries)
    if not numbers or not distinct or len({entry[0] for entry in entries}) != len(entries):
        raise ValueError(f"{form}; got {heads!r}")
    layers, chosen = [entry[0] for entry in entries], [head for entry in entries for head in entry[1:]]
    for limit, got, what in ((num_layers, layers, "layers"), (num_heads, chosen, "heads")):
        if limit is not None and max(got, default=0) >= limit:
            raise ValueError(f"{name} names {what} up to {max(got)}; the model has {what} 0..{limit - 1}")


def head_scores(
    queries: tuple[Array, ...], cache: KVCache, heads: Heads, q_pos: Array, length: Array, backend: str | None
) -> Array:
    """Mean softmax weight of each cache row over the chosen heads and R queries (S_target and S_draft of Dustin).

    Each query's softmax runs over the rows up to its own position; rows below `length` are handed out.

    Args:
        queries: per entry of `heads`, [B, R, N, H] (after rope) of that layer.
        cache: of the same model.
        heads: the chosen heads, at least one.
        q_pos: int32 [B, R].
        length: int32 [B].
        backend: see `pallas_kernels.dispatch`.

    Returns:
        float32 [B, S], -inf at rows >= length.
    """
    total = sum(len(chosen) for _, chosen in heads)
    scores = 0.0
    for q, (layer, chosen) in zip(queries, heads, strict=True):
        keys, scale = cache[layer].k, q.shape[-1] ** -0.5
        scores += attention_scores(q, keys, q_pos, length, chosen, scale=scale, backend=backend) * len(chosen) / total
    return scores


def choose_rows(
    history: Array | None,
    draft: Array | None,
    length: Array,
    *,
    budget: int,
    sinks: int,
    window: int,
    split: int,
    backend: str | None,
) -> Array:
    """The k = min(budget, length) committed rows that verification reads, one set for all layers (Dustin, SELECT).

    Inside the budget go, in this order: the first `sinks` and the newest `window` rows; the `split` rows that the draft
    ranks highest; the rows that the target's history ranks highest. Where one ranking is missing the other takes all.

    Args:
        history: float32 [B, S], S_target, or None.
        draft: float32 [B, S], S_draft, or None.
        length: int32 [B], committed rows.
        budget: static, at least sinks + window + split.
        sinks, window, split: static.
        backend: see `pallas_kernels.dispatch`.

    Returns:
        int32 [1, B, min(budget, S)], as in `KVSelection.rows`.
    """
    scores = draft if history is None else history
    width = min(budget, scores.shape[1])
    scores = protect(scores, length, sinks, window)
    if history is not None and draft is not None and split:
        scores = promote(scores, draft, length, split, backend)
    return top_rows(scores[None], length, jnp.minimum(budget, length), width, backend)


def recent_rows(length: Array, capacity: int, *, budget: int, sinks: int) -> Array:
    """The set of StreamingLLM verification, int32 [1, B, min(budget, capacity)]: sinks and the newest rows."""
    return sink_and_recent_rows(length, jnp.minimum(budget, length), sinks, min(budget, capacity))


def mass_on(scores: Array, rows: Array) -> Array:
    """How much of `scores` [B, S] lies on `rows` [B, M] (-1 pads): [B]."""
    taken = jnp.take_along_axis(scores, jnp.maximum(rows, 0), axis=1)
    return jnp.sum(jnp.where(rows >= 0, taken, 0), axis=1)
