"""A method that drafts from a script, so that what a round accepts is known beforehand."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import Method
from jaxspec.types import Draft


@dataclass(frozen=True)
class Scripted(Method):
    """Drafts `num_draft` tokens of `draft_params["tokens"]` [B, n] behind those emitted, `draft_params["count"]` [B] of
    them used, the one in slot `draft_params["wrong"]` [B] and those after it replaced by other tokens."""

    num_draft: int = 3
    needs_draft_params: ClassVar[bool] = True

    @property
    def max_draft(self):
        return self.num_draft

    def init(self, models, prompt, prompt_length, out):
        return models.draft_params

    def draft(self, models, state, sampling, keys):
        script = state.method_state
        slot = jnp.arange(self.num_draft)
        # the first token is emitted by the prefill
        place = jnp.minimum(state.num_tokens[:, None] + slot, script["tokens"].shape[1] - 1)
        tokens = jnp.take_along_axis(script["tokens"], place, axis=1)
        vocab = models.target.config.vocab_size
        tokens = jnp.where(slot >= script["wrong"][:, None], (tokens + 1) % vocab, tokens)
        return Draft(tokens, script["count"], None), state.cache, script


def script(tokens, wrong, count):
    """The draft_params of `Scripted`; `wrong` and `count` are one number or one per row."""
    batch = len(tokens)
    per_row = {name: np.broadcast_to(np.int32(value), batch) for name, value in (("wrong", wrong), ("count", count))}
    return jax.tree.map(jnp.asarray, {"tokens": np.asarray(tokens, np.int32), **per_row})
