"""What a method is: how to draft, how to verify, and what to remember between rounds."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import struct

from jaxspec.models.decoder import Decoder
from jaxspec.sampling import Sampling
from jaxspec.types import Array, Collect, DecodeState, Draft, ForwardOut, KVCache, Params, Verdict


@struct.dataclass
class Models:
    """The target model with its parameters, and the parameters of a draft model where the method has one."""

    target: Decoder = struct.field(pytree_node=False)
    params: Params
    draft_params: Params | None = None

    def forward(self, tokens: Array, cache: KVCache, start: Array, **options: Any) -> ForwardOut:
        """The target's forward, see `Decoder.__call__`."""
        return self.target.apply({"params": self.params}, tokens, cache, start, **options)


@dataclass(frozen=True)
class Method:
    """Base of all methods; by itself it drafts nothing and verifies with the full model.

    A method holds hashable fields only: it is a static argument of the jitted loop, so an equal method never
    recompiles. What changes between rounds lives in the method state, any pytree of arrays whose shapes stay the same.
    """

    lossless: ClassVar[bool] = True  # the output distribution is the target's own
    needs_draft_params: ClassVar[bool] = False

    @property
    def max_draft(self) -> int:
        """The most tokens that one round drafts; static."""
        return 0

    def prefill_collect(self, last: Array) -> Collect:
        """What the forward of the last prompt token hands to `init`; `last` is its query row, int32 [B] of zeros."""
        return Collect()

    def init(self, models: Models, prompt: Array, prompt_length: Array, out: ForwardOut) -> Any:
        """The method state after prefill.

        Args:
            models: the models.
            prompt: int32 [B, P].
            prompt_length: int32 [B], also the number of valid cache rows.
            out: of the forward of each row's last prompt token, T = 1.
        """
        return ()

    def draft(self, models: Models, state: DecodeState, sampling: Sampling, keys: Array) -> tuple[Draft, KVCache, Any]:
        """Drafts up to `max_draft` tokens after `state.last_token`; returns the draft, the cache with scratch rows
        written, and the method state. `keys` [B] are this round's."""
        batch = state.last_token.shape[0]
        empty = Draft(jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32), None)
        return empty, state.cache, state.method_state

    def verify(self, models: Models, state: DecodeState, draft: Draft) -> ForwardOut:
        """The target's forward over [last_token, draft tokens] at rows length..length + g."""
        tokens = jnp.concatenate([state.last_token[:, None], draft.tokens], axis=1)
        return models.forward(tokens, state.cache, state.length)

    def observe(self, method_state: Any, out: ForwardOut, draft: Draft, verdict: Verdict, length: Array) -> Any:
        """The method state after a round; `length` int32 [B] is the committed length before it."""
        return method_state
