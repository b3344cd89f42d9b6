"""Retrieval heads: those that attend to a needle while its tokens are being answered (as in CompressKV)."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.calibration.needles import Needle
from jaxspec.calibration.search import HeadSet
from jaxspec.methods.base import Models
from jaxspec.models.decoder import cache_capacity, init_cache
from jaxspec.prefill import fill_cache
from jaxspec.requests import bucket
from jaxspec.types import Array, Collect


class Answers(NamedTuple):
    """Greedy answers to needles."""

    tokens: np.ndarray  # int32 [B, new tokens]
    recall: np.ndarray  # float64 [B]: share of the needle's payload that was emitted
    mass: np.ndarray  # float32 [B, L, N]: softmax mass on the needle, summed over emitted payload tokens


def answer(models: Models, needles: Sequence[Needle], width: int, eos_ids: tuple[int, ...] = ()) -> Answers:
    """Decodes greedily after each prompt, with as many tokens as the longest payload has and four more.

    Whenever the emitted token is one of the payload, every head earns its softmax mass on the needle.

    Args:
        models: the model; parameters of a draft model are not used.
        needles: the prompts, one ragged batch.
        width: at least the longest prompt; fixed, so that all calls of one length share a program.
        eos_ids: ids that end an answer.
    """
    batch, most = len(needles), max(len(n.payload) for n in needles)
    prompt, payload = np.zeros((batch, bucket(width)), np.int32), np.full((batch, most), -1, np.int32)
    for b, needle in enumerate(needles):
        prompt[b, : len(needle.ids)] = needle.ids
        payload[b, : len(needle.payload)] = needle.payload
    length = np.array([len(n.ids) for n in needles], np.int32)
    span = np.array([n.span for n in needles], np.int32)
    ends = np.array(eos_ids or (-1,), np.int32)
    tokens, mass = map(np.asarray, _answer(models, prompt, length, span, payload, ends, most + 4))
    recall = np.array([needle.recall(row.tolist()) for needle, row in zip(needles, tokens, strict=True)])
    return Answers(tokens, recall, mass)


@partial(jax.jit, static_argnames="new_tokens")
def _answer(
    models: Models, prompt: Array, length: Array, span: Array, payload: Array, ends: Array, new_tokens: int
) -> tuple[Array, Array]:
    config, (batch, width) = models.target.config, prompt.shape
    cache = init_cache(config, batch, cache_capacity(width + new_tokens), models.params["embedding"].dtype)
    cache = fill_cache(models.target, models.params, prompt, length, cache)
    collect = Collect(queries=tuple(range(config.num_layers)))

    def step(i: Array, carry: tuple) -> tuple:
        cache, token, done, tokens, mass = carry
        position = length - 1 + i
        out = models.forward(token[:, None], cache, position, collect=collect)
        token = jnp.argmax(out.logits[:, 0], axis=-1).astype(jnp.int32)
        earned = jnp.any(token[:, None] == payload, axis=1) & ~done
        on_span = [mass_on_span(q[:, 0], c.k, position, span) for q, c in zip(out.queries, out.cache, strict=True)]
        mass += jnp.where(earned[:, None, None], jnp.stack(on_span, axis=1), 0)
        done |= jnp.any(token[:, None] == ends, axis=1)
        return out.cache, token, done, tokens.at[:, i].set(jnp.where(done, -1, token)), mass

    last = jnp.take_along_axis(prompt, length[:, None] - 1, axis=1)[:, 0]
    tokens = jnp.full((batch, new_tokens), -1, jnp.int32)
    mass = jnp.zeros((batch, config.num_layers, config.num_heads), jnp.float32)
    *_, tokens, mass = jax.lax.fori_loop(0, new_tokens, step, (cache, last, jnp.zeros(batch, bool), tokens, mass))
    return tokens, mass


def mass_on_span(q: Array, k: Array, position: Array, span: Array) -> Array:
    """Softmax mass that each head's query pays the rows of a span: float32 [B, N].

    Args:
        q: [B, N, H].
        k: [B, S, K, H].
        position: int32 [B], the query's own; it sees rows up to there.
        span: int32 [B, 2], first row and end.
    """
    batch, heads, head_dim = q.shape
    grouped = q.reshape(batch, k.shape[2], -1, head_dim)
    logits = jnp.einsum("bkgh,bskh->bkgs", grouped, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    row = jnp.arange(k.shape[1])
    seen, inside = row <= position[:, None], (row >= span[:, :1]) & (row < span[:, 1:])
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], logits, -jnp.inf), axis=-1)
    return jnp.sum(jnp.where(inside[:, None, None], weights, 0), axis=-1).reshape(batch, heads)


def retrieval_heads(scores: np.ndarray, num_kv_heads: int, per_layer: int = 4) -> list[HeadSet]:
    """Candidate signals of every layer: its best heads, and its best heads that share one kv head.

    The second kind, left out where it equals the first, comes after it: it reads less, and `search` prefers it where it
    is as good.

    Args:
        scores: [L, N], by `answer`.
        num_kv_heads: of the model.
        per_layer: heads of a candidate, fewer where a kv head has fewer.
    """
    layers, heads = scores.shape
    group = heads // num_kv_heads
    found = []
    for layer in range(layers):
        ranked = np.argsort(-scores[layer], kind="stable")
        best = tuple(sorted(int(head) for head in ranked[:per_layer]))
        by_group = [ranked[ranked // group == kv_head][:per_layer] for kv_head in range(num_kv_heads)]
        sharing = max(by_group, key=lambda group: float(np.sum(scores[layer, group])))
        found.append(HeadSet(layer, best))
        if num_kv_heads > 1 and tuple(sorted(map(int, sharing))) != best:
            found.append(HeadSet(layer, tuple(sorted(map(int, sharing)))))
    return found
