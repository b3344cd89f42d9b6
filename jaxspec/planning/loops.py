"""The loops that `measure` times: forwards one after another on the device, each depending on the one before."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.decode import decode_all
from jaxspec.methods.base import Method, Models
from jaxspec.methods.plain import Plain
from jaxspec.requests import Request
from jaxspec.types import Array, DecodeState, Draft, KVCache, LayerMask, Stats, Verdict


@partial(jax.jit, static_argnames=("layers", "count", "steps"), donate_argnames="cache")
def forwards(
    models: Models, cache: KVCache, start: Array, *, layers: LayerMask | None, count: int, steps: int
) -> tuple[Array, KVCache]:
    """`steps` forwards of `count` query rows per sequence behind `start` cache rows; returns tokens and the cache."""

    def step(_: Array, carry: tuple[Array, KVCache]) -> tuple[Array, KVCache]:
        out = models.forward(carry[0], carry[1], start, layers=layers)
        return jnp.argmax(out.logits, axis=-1).astype(jnp.int32), out.cache

    # each forward reads what the one before chose, so that none can be left out
    return jax.lax.fori_loop(0, steps, step, (jnp.zeros((cache[0].k.shape[0], count), jnp.int32), cache))


@partial(jax.jit, static_argnames="method", donate_argnames="cache")
def selecting_state(models: Models, cache: KVCache, start: Array, *, method: Method) -> tuple[KVCache, DecodeState]:
    """The cache, and a state of `start` committed rows per sequence without it, with the method's own as it is after a
    prefill."""
    batch = cache[0].k.shape[0]
    zeros, length = jnp.zeros(batch, jnp.int32), jnp.full(batch, start, jnp.int32)
    out = models.forward(zeros[:, None], cache, length - 1, collect=method.prefill_collect(zeros))
    own = method.init(models, zeros[:, None], length, out)
    return out.cache, decode_state((), length, zeros, own, jax.random.split(jax.random.key(0), batch), 1)


@partial(jax.jit, static_argnames=("layers", "method", "steps"), donate_argnames="cache")
def selected_forwards(
    models: Models, cache: KVCache, state: DecodeState, *, layers: LayerMask, method: Method, steps: int
) -> tuple[Array, KVCache]:
    """`steps` forwards of one query row per sequence over the rows that the method selects."""
    selection = method.draft_selection(models, state.replace(cache=cache))

    def step(_: Array, carry: tuple[Array, KVCache]) -> tuple[Array, KVCache]:
        out = models.forward(carry[0], carry[1], state.length, layers=layers, selection=selection)
        return jnp.argmax(out.logits, axis=-1).astype(jnp.int32), out.cache

    return jax.lax.fori_loop(0, steps, step, (state.last_token[:, None], cache))


@partial(jax.jit, static_argnames=("count", "method", "steps"), donate_argnames="cache")
def scored_forwards(
    models: Models, cache: KVCache, state: DecodeState, *, count: int, method: Method, steps: int
) -> tuple[Array, KVCache]:
    """`steps` verifications of `count` query rows per sequence, each followed by what the method observes."""
    batch, zeros = state.length.shape[0], jnp.zeros_like(state.length)

    def step(_: Array, carry: tuple[Array, KVCache, Any]) -> tuple[Array, KVCache, Any]:
        tokens, cache, own = carry
        draft = Draft(tokens[:, 1:], zeros + count - 1, None)
        out = models.forward(tokens, cache, state.length, collect=method.verify_collect(draft))
        own = method.observe(models, own, out, draft, Verdict(zeros, tokens[:, 0]), state.length)
        # the next forward depends on the selection, so that it cannot be left out
        used = sum(jnp.sum(leaf[..., :1]).astype(jnp.float32) for leaf in jax.tree.leaves(own))
        tokens = jnp.argmax(out.logits + used * 1e-30, axis=-1).astype(jnp.int32)
        return tokens, out.cache, own

    carry = (jnp.zeros((batch, count), jnp.int32), cache, state.method_state)
    return jax.lax.fori_loop(0, steps, step, carry)[:2]


def decode_state(
    cache: KVCache, length: Array, token: Array, own: Any, keys: Array, max_new_tokens: int, max_draft: int = 0
) -> DecodeState:
    """A state after `length` tokens whose K/V are in the cache, at the first round.

    Args:
        cache: [B, S, K, H] per layer.
        length: int32 [B].
        token: int32 [B], the last token.
        own: the method state.
        keys: [B] PRNG keys.
        max_new_tokens: how many tokens the state has room for.
        max_draft: of the method.
    """
    zeros = jnp.zeros_like(length)
    trace = jnp.zeros((length.shape[0], max_new_tokens), jnp.int16)
    return DecodeState(
        tokens=jnp.zeros((length.shape[0], max_new_tokens + max_draft + 1), jnp.int32),
        num_tokens=zeros,
        length=length,
        last_token=token,
        finish=jnp.zeros(length.shape, jnp.int8),
        cache=cache,
        method_state=own,
        keys=keys,
        round=jnp.int32(1),
        stats=Stats(zeros, zeros, trace, trace),
        logprobs=None,
    )


@partial(jax.jit, static_argnames="steps", donate_argnames="cache")
def plain_loop(models: Models, cache: KVCache, start: Array, request: Request, steps: int) -> tuple[Array, KVCache]:
    """`steps` rounds of plain decoding in the decode loop, from `start` cache rows on."""
    batch = cache[0].k.shape[0]
    length = jnp.full(batch, start, jnp.int32)
    state = decode_state(cache, length, jnp.zeros(batch, jnp.int32), (), request.keys, steps)
    state = decode_all(models, state, request, Plain(), steps)
    return state.tokens, state.cache
