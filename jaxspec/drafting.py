"""Autoregressive drafting, with any step function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.sampling import Sampling, sample, to_probs
from jaxspec.types import Array, DecodeState, Draft, ForwardOut, KVCache


class ForcedDraws:
    """Stands in for keys and prescribes what is drawn, so that every path can be enumerated.

    It keeps the chances of its draws itself: what a method says about them later is what is to be checked. It lives
    inside one trace.
    """

    def __init__(self, tokens: Array) -> None:
        self.tokens = tokens  # int32 [B, g]
        self.chance: Array | None = None  # float32 [B], of the draws so far; None: nothing was drawn

    def draw(self, probs: Array, slot: int) -> Array:
        """The prescribed token of a slot, int32 [B], drawn from probs [B, V]."""
        token = self.tokens[:, slot]
        chance = jnp.take_along_axis(probs, token[:, None], axis=1)[:, 0]
        self.chance = chance if self.chance is None else self.chance * chance
        return token


def draft_chain(
    step: Callable[[Any, Array, int], tuple[Array, Any]],
    carry: Any,
    token: Array,
    num_draft: int,
    sampling: Sampling,
    keys: Array | ForcedDraws,
    *,
    ends: Callable[[Array], Array] | None = None,
) -> tuple[Draft, Any]:
    """Drafts `num_draft` tokens one after another; the steps are unrolled.

    Args:
        step: (carry, token int32 [B], slot) -> (logits float32 [B, V] of the next token, carry); slot is static.
        carry: any pytree, a cache as a rule.
        token: int32 [B], what the first step is fed.
        num_draft: static number of steps.
        sampling: the draft's.
        keys: [B] PRNG keys, or the outcomes of the draws.
        ends: logits [B, V] -> bool [B], whether the draft ends with the token drawn from them. It sees distributions
            only: dropping a token because of its own draw would bias what the accept rule emits.

    Returns:
        The draft, with the very probabilities its tokens were drawn from (None when greedy), and the last carry.
    """
    count = jnp.zeros(token.shape, jnp.int32)
    going = jnp.ones(token.shape, bool)
    tokens, probs = [], []
    for slot in range(num_draft):
        logits, carry = step(carry, token, slot)
        count += going
        if ends is not None:
            going &= ~ends(logits)
        if sampling.greedy:
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        else:
            probs.append(to_probs(logits, sampling))
            if isinstance(keys, ForcedDraws):
                token = keys.draw(probs[-1], slot)
            else:
                token = sample(probs[-1], jax.vmap(jax.random.fold_in, (0, None))(keys, slot))
        tokens.append(token)
    if not tokens:
        return Draft(jnp.zeros((token.shape[0], 0), jnp.int32), count, None), carry
    return Draft(jnp.stack(tokens, axis=1), count, jnp.stack(probs, axis=1) if probs else None), carry


def self_draft(
    forward: Callable[..., ForwardOut],
    state: DecodeState,
    num_draft: int,
    sampling: Sampling,
    keys: Array | ForcedDraws,
    **options: Any,
) -> tuple[Draft, KVCache]:
    """Drafts with the target's own weights into the scratch rows behind `state.length`.

    Args:
        forward: `Models.forward`.
        options: what makes these forwards cheaper than verification: `selection` or `layers` of `Decoder.__call__`.

        The others are those of `draft_chain`.
    """

    def step(cache: KVCache, token: Array, slot: int) -> tuple[Array, KVCache]:
        out = forward(token[:, None], cache, state.length + slot, **options)
        return out.logits[:, 0], out.cache

    return draft_chain(step, state.cache, state.last_token, num_draft, sampling, keys)
