"""The accept rule of speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1), for every method."""

import jax
import jax.numpy as jnp

from jaxspec.sampling import Sampling, sample, to_probs
from jaxspec.types import Array, Draft, Verdict


def acceptance(draft: Draft, target_probs: Array) -> tuple[Array, Array]:
    """Chances of acceptance, and what is sampled instead.

    Args:
        draft: the draft; slots at or past `count` are ignored.
        target_probs: float32 [B, g+1, V]; row i is the target's distribution of the token after i accepted ones.

    Returns:
        accept_prob [B, g]: min(1, p / q) of each draft token, 0 at unused slots.
        next_probs [B, g+1, V]: distribution of the next token after exactly i acceptances: max(p - q, 0), normalised.
            With q = 0 past `count` this covers a rejection, an early stop and the bonus token alike.
    """
    g, vocab = draft.tokens.shape[1], target_probs.shape[-1]
    used = jnp.arange(g) < draft.count[:, None]
    q = jax.nn.one_hot(draft.tokens, vocab) if draft.probs is None else draft.probs
    q = jnp.where(used[..., None], q, 0)
    token = draft.tokens[..., None]
    p_token = jnp.take_along_axis(target_probs[:, :g], token, axis=-1)[..., 0]
    q_token = jnp.take_along_axis(q, token, axis=-1)[..., 0]
    accept_prob = jnp.where(used & (p_token > 0), jnp.minimum(p_token / jnp.where(used, q_token, 1), 1), 0)
    residual = jnp.maximum(target_probs - jnp.pad(q, ((0, 0), (0, 1), (0, 0))), 0)
    mass = jnp.sum(residual, axis=-1, keepdims=True)
    # no mass is left only where p = q up to rounding; a rejection has chance 0 there, and p is right
    return accept_prob, jnp.where(mass > 0, residual / jnp.where(mass > 0, mass, 1), target_probs)


def accept(draft: Draft, target_logits: Array, sampling: Sampling, keys: Array) -> Verdict:
    """Decides how many draft tokens stay and which token follows them.

    Args:
        draft: the draft, with the probabilities its tokens were sampled from (None: one-hot).
        target_logits: float32 [B, g+1, V].
        sampling: the target's; the same filters that made the output distribution of plain decoding.
        keys: [B] PRNG keys of this round.
    """
    g = draft.tokens.shape[1]
    if sampling.greedy:
        choice = jnp.argmax(target_logits, axis=-1).astype(jnp.int32)
        accepted = (draft.tokens == choice[:, :g]) & (jnp.arange(g) < draft.count[:, None])
    else:
        accept_prob, next_probs = acceptance(draft, to_probs(target_logits, sampling))
        uniform = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 0), (g,)))(keys)
        accepted = uniform < accept_prob
    num_accepted = jnp.sum(jnp.cumprod(accepted, axis=1, dtype=jnp.int32), axis=1)
    if sampling.greedy:
        next_token = jnp.take_along_axis(choice, num_accepted[:, None], axis=1)[:, 0]
    else:
        probs = jnp.take_along_axis(next_probs, num_accepted[:, None, None], axis=1)[:, 0]
        next_token = sample(probs, jax.vmap(jax.random.fold_in, (0, None))(keys, 1))
    return Verdict(num_accepted, next_token)
