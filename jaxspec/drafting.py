"""Autoregressive drafting, with any step function."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.sampling import Sampling, sample, to_probs
from jaxspec.types import Array, DecodeState, Draft, Finish, ForwardOut, KVCache


class ForcedDraws:
    """Stands in for keys and prescribes what is drawn, so that every path can be enumerated.

    It keeps the chances of its draws itself: what a method says about them later is what is to be checked. It lives
    inside one trace.
    """

    def __init__(self, tokens: Array) -> None:
        self.tokens = tokens  # int32 [B, g]
        self.chance: Array | None = None  # float32 [B], of the draws so far; None: nothing was drawn


class _Chain(NamedTuple):
    """The carry of the loop over slots."""

    slot: Array  # int32 []
    carry: Any  # the caller's
    token: Array  # int32 [B], fed to the next step
    draft: Draft
    going: Array  # bool [B], rows that `ends` has not stopped


def draft_chain(
    step: Callable[[Any, Array, Array], tuple[Array, Any]],
    carry: Any,
    token: Array,
    num_draft: int,
    sampling: Sampling,
    keys: Array | ForcedDraws,
    *,
    first: Callable[[Any, Array], tuple[Array, Any]] | None = None,
    ends: Callable[[Array], Array] | None = None,
    limit: Array | None = None,
) -> tuple[Draft, Any]:
    """Drafts `num_draft` tokens one after another, in a loop: the program holds one step, however many there are.

    Args:
        step: (carry, token int32 [B], slot int32 []) -> (logits float32 [B, V] of the next token, carry).
        carry: any pytree, a cache as a rule.
        token: int32 [B], what the first step is fed.
        num_draft: static number of steps.
        sampling: the draft's.
        keys: [B] PRNG keys, or the outcomes of the draws.
        first: (carry, token) -> (logits, carry), in place of the step of slot 0 where that one differs.
        ends: logits [B, V] -> bool [B], whether the draft ends with the token drawn from them; the loop ends with its
            last row. It sees distributions only: dropping a token because of its own draw would bias what the accept
            rule emits.
        limit: int32 [], draft no more tokens than this, decided before the round; None: `num_draft`.

    Returns:
        The draft, with the very probabilities its tokens were drawn from (None when greedy), and the last carry.
    """
    batch = token.shape[0]
    draft = Draft(jnp.zeros((batch, num_draft), jnp.int32), jnp.zeros(batch, jnp.int32), None)
    if not num_draft:
        return draft, carry
    if not sampling.greedy:
        logits, _ = jax.eval_shape(first or partial(step, slot=0), carry, token)
        draft = draft.replace(probs=jnp.zeros((batch, num_draft, logits.shape[1]), jnp.float32))

    def add_token(chain: _Chain, logits: Array, carry: Any) -> _Chain:
        draft, slot = chain.draft, chain.slot
        if sampling.greedy:
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        else:
            probs = to_probs(logits, sampling)
            draft = draft.replace(probs=draft.probs.at[:, slot].set(probs))
            if isinstance(keys, ForcedDraws):
                token = keys.tokens[:, slot]
            else:
                token = sample(probs, jax.vmap(jax.random.fold_in, (0, None))(keys, slot))
        draft = draft.replace(tokens=draft.tokens.at[:, slot].set(token), count=draft.count + chain.going)
        going = chain.going if ends is None else chain.going & ~ends(logits)
        return _Chain(slot + 1, carry, token, draft, going)

    def next_step(chain: _Chain) -> _Chain:
        return add_token(chain, *step(chain.carry, chain.token, chain.slot))

    chain = _Chain(jnp.int32(0), carry, token, draft, jnp.ones(batch, bool))
    if first is not None:
        chain = add_token(chain, *first(carry, token))
    # forced draws are made in every slot, used or not, so that the chances of all of them sum to 1
    most = num_draft if limit is None or isinstance(keys, ForcedDraws) else jnp.minimum(limit, num_draft)
    if ends is None or isinstance(keys, ForcedDraws):
        chain = jax.lax.fori_loop(0 if first is None else 1, most, lambda _, chain: next_step(chain), chain)
    else:
        chain = jax.lax.while_loop(lambda c: (c.slot < most) & jnp.any(c.going), next_step, chain)
    if isinstance(keys, ForcedDraws) and not sampling.greedy:
        chances = jnp.take_along_axis(chain.draft.probs, keys.tokens[..., None], axis=2)[..., 0]
        keys.chance = jnp.prod(chances, axis=1)
    draft = chain.draft
    if limit is not None:
        draft = draft.replace(count=jnp.minimum(draft.count, limit))
    return draft, chain.carry


def self_draft(
    forward: Callable[..., ForwardOut],
    state: DecodeState,
    num_draft: int,
    sampling: Sampling,
    keys: Array | ForcedDraws,
    *,
    ends: Callable[[Array], Array] | None = None,
    limit: Array | None = None,
    **options: Any,
) -> tuple[Draft, KVCache]:
    """Drafts with the target's own weights into the scratch rows behind `state.length`.

    Args:
        forward: `Models.forward`.
        options: what makes these forwards cheaper than verification: `selection` or `layers` of `Decoder.__call__`.

        The others are those of `draft_chain`.
    """

    def row_ends(logits: Array) -> Array:
        # the loop goes on for its slowest row, which must not be one that has ended
        return ends(logits) | (state.finish != Finish.RUNNING)

    def step(cache: KVCache, token: Array, slot: Array) -> tuple[Array, KVCache]:
        out = forward(token[:, None], cache, state.length + slot, **options)
        return out.logits[:, 0], out.cache

    ends_at = None if ends is None else row_ends
    return draft_chain(step, state.cache, state.last_token, num_draft, sampling, keys, ends=ends_at, limit=limit)
