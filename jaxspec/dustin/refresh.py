"""A full forward over tokens that were verified sparsely: it renews their K/V and measures the drift."""

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.methods.base import Models
from jaxspec.types import Array, Collect, DecodeState, Finish, KVCache

CHUNK = 16  # query rows of one forward: the kernel of verification takes them in one tile


@struct.dataclass
class Refresh:
    """What has been verified sparsely since the last refresh, and the drift that refreshes have found so far."""

    start: Array  # int32 [B]: first cache row that sparse verification wrote
    # float32 [B, W]: column i is the log-probability of the token after row start + i under the sparse target
    logprobs: Array
    prompt: Array  # int32 [B, P]
    checked: Array  # int32 [B]: tokens that were compared
    agreed: Array  # int32 [B]: those that are the full model's likeliest
    drift: Array  # float32 [B]: sum over them of |log-probability, full - sparse|


def init_refresh(prompt: Array, prompt_length: Array, most: int) -> Refresh:
    """The state after prefill; `most` tokens can be committed between two refreshes."""
    batch = prompt.shape[0]
    zeros = jnp.zeros(batch, jnp.int32)
    return Refresh(prompt_length, jnp.zeros((batch, most)), prompt, zeros, zeros, jnp.zeros(batch))


def note_round(refresh: Refresh, logits: Array, tokens: Array, length: Array) -> Refresh:
    """Keeps the log-probabilities [B, g+1] of the round's tokens int32 [B, g+1] under its logits [B, g+1, V].

    `length` int32 [B] is the committed length before the round. Columns behind the accepted tokens are scratch.
    """
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)
    # a clamped write could only overwrite columns of a row that has ended
    place = length - refresh.start
    logprobs = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))(
        refresh.logprobs, chosen, place
    )
    return refresh.replace(logprobs=logprobs)


def run_refresh(
    models: Models,
    state: DecodeState,
    refresh: Refresh,
    queries: tuple[Array, ...],
    layers: tuple[int, ...],
    due: Array,
) -> tuple[KVCache, Refresh, tuple[Array, ...]]:
    """If `due`, runs the committed tokens since the last refresh through the full model, in chunks of 16.

    Their K/V and the queries of the newest committed token are replaced; the tokens stay.

    Args:
        models: the models.
        state: at the start of a round.
        refresh: what to refresh.
        queries: per entry of `layers`, [B, N, H]: of the token at row length - 1.
        layers: whose queries to renew.
        due: bool [].

    Returns:
        The target's cache, the new state, and the queries.
    """
    capacity, length = state.cache[0].k.shape[1], state.length
    prompt_length = length + 1 - state.num_tokens
    row = jnp.arange(length.shape[0])[:, None]
    running = (state.finish == Finish.RUNNING)[:, None]

    def token_at(place: Array) -> Array:
        emitted = state.tokens[row, jnp.clip(place - prompt_length[:, None], 0, state.tokens.shape[1] - 1)]
        given = refresh.prompt[row, jnp.clip(place, 0, refresh.prompt.shape[1] - 1)]
        return jnp.where(place < prompt_length[:, None], given, emitted)

    def chunk(i: Array, carry: tuple) -> tuple:
        cache, queries, checked, agreed, drift = carry
        wanted = refresh.start + i * CHUNK
        # at the end of the cache a chunk begins earlier, and rows before `wanted` get the same values again
        begin = jnp.minimum(wanted, capacity - CHUNK)
        place = begin[:, None] + jnp.arange(CHUNK)
        # behind a row's committed tokens a chunk writes scratch only; before them it must write what is there
        attending = models.replace(running=begin < length)
        out = attending.forward(token_at(place), cache, begin, collect=Collect(queries=layers))
        newest = place == length[:, None] - 1
        at, found = jnp.argmax(newest, axis=1)[:, None], jnp.any(newest, axis=1)[:, None, None]
        queries = tuple(jnp.where(found, q[row, at][:, 0], old) for q, old in zip(out.queries, queries, strict=True))
        counted = (place >= wanted[:, None]) & (place < length[:, None]) & running
        after = token_at(place + 1)
        full = jnp.take_along_axis(out.logits, after[..., None], axis=-1)[..., 0]
        full -= jax.nn.logsumexp(out.logits, axis=-1)
        column = jnp.clip(place - refresh.start[:, None], 0, refresh.logprobs.shape[1] - 1)
        gap = jnp.abs(full - refresh.logprobs[row, column])
        hit = counted & (jnp.argmax(out.logits, axis=-1) == after)
        return (
            out.cache,
            queries,
            checked + jnp.sum(counted, axis=1),
            agreed + jnp.sum(hit, axis=1),
            drift + jnp.sum(jnp.where(counted, gap, 0), axis=1),
        )

    # no lax.cond: a loop without a trip hands its carry on in place, where branches would copy the caches
    chunks = jnp.where(due, (jnp.max(length - refresh.start) + CHUNK - 1) // CHUNK, 0)
    carry = (state.cache, queries, refresh.checked, refresh.agreed, refresh.drift)
    cache, queries, checked, agreed, drift = jax.lax.fori_loop(0, chunks, chunk, carry)
    start = jnp.where(due, length, refresh.start)
    return cache, refresh.replace(start=start, checked=checked, agreed=agreed, drift=drift), queries
