"""Speculative decoding with a separate draft model (Leviathan et al., arXiv 2211.17192)."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from flax import struct

from jaxspec.drafting import draft_chain
from jaxspec.methods.base import Method, Models, draft_sampling_option, num_draft_option
from jaxspec.models.decoder import Decoder, init_cache
from jaxspec.prefill import fill_cache
from jaxspec.sampling import Sampling
from jaxspec.types import Array, Collect, DecodeState, Draft, ForwardOut, KVCache, KVSelection


@struct.dataclass
class DraftModelState:
    """The draft model's own cache, which follows the target's length."""

    cache: KVCache  # [B, S, K, H] per layer of the draft model, S that of the target's cache
    last_prompt_token: Array  # int32 [B]


@dataclass(frozen=True)
class DraftModel(Method):
    """Drafts with a small model of its own; verifies with the target. Lossless.

    Both models read the same token ids; vocabularies may differ in padding: ids that the draft model lacks are never
    drafted, and those that only it has are left out before it samples. Beyond the draft model's own positions drafts
    get worse, the output does not. `generate(draft_params=...)` takes its parameters. `draft_sampling` draws drafts
    in another way than the output.
    """

    needs_draft_params: ClassVar[bool] = True

    model: Decoder
    num_draft: int = num_draft_option(4)
    draft_sampling: Sampling | None = draft_sampling_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.model, Decoder):
            raise ValueError(f"DraftModel model must be a Decoder, got {self.model!r}")

    @property
    def max_draft(self) -> int:
        return self.num_draft

    def init(self, models: Models, prompt: Array, prompt_length: Array, out: ForwardOut) -> DraftModelState:
        batch, capacity = out.cache[0].k.shape[:2]
        cache = init_cache(self.model.config, batch, capacity, models.draft_params["embedding"].dtype)
        cache = fill_cache(self.model, models.draft_params, self._known(prompt), prompt_length, cache)
        return DraftModelState(cache, jnp.take_along_axis(prompt, prompt_length[:, None] - 1, axis=1)[:, 0])

    def draft(
        self, models: Models, state: DecodeState, sampling: Sampling, keys: Array
    ) -> tuple[Draft, KVCache, DraftModelState]:
        sampling = sampling if self.draft_sampling is None else self.draft_sampling
        draft, own, _ = self.run(models, state, sampling, keys)
        return draft, state.cache, own

    def run(
        self,
        models: Models,
        state: DecodeState,
        sampling: Sampling,
        keys: Array,
        *,
        selection: KVSelection | None = None,
        query_layers: tuple[int, ...] = (),
    ) -> tuple[Draft, DraftModelState, tuple[Array, ...]]:
        """Drafts `num_draft` tokens.

        Args:
            selection: what the draft model reads of its cache; None: all of it.
            query_layers: layers of the draft model whose queries are handed out.

            The others are those of `draft`.

        Returns:
            The draft, the new state, and per entry of `query_layers` the queries [B, g, N, H] of the tokens that
            drafts were drawn after: the last token and all drafts but the last.
        """
        own, vocab = state.method_state, models.target.config.vocab_size
        index = jnp.maximum(state.num_tokens - 2, 0)[:, None]
        emitted = jnp.take_along_axis(state.tokens, index, axis=1)[:, 0]
        previous = jnp.where(state.num_tokens >= 2, emitted, own.last_prompt_token)

        def forward(tokens: Array, carry: tuple, start: Array, slot: Array | int) -> tuple[Array, tuple]:
            cache, kept = carry
            out = self.model.apply(
                {"params": models.draft_params},
                self._known(tokens),
                cache,
                start,
                selection=selection,
                collect=Collect(queries=query_layers),
                running=models.running,
            )
            logits = out.logits[:, -1, :vocab]
            padding = ((0, 0), (0, vocab - logits.shape[1]))
            kept = tuple(rows.at[:, slot].set(q[:, -1]) for rows, q in zip(kept, out.queries, strict=True))
            return jnp.pad(logits, padding, constant_values=-jnp.inf), (out.cache, kept)

        def first(carry: tuple, token: Array) -> tuple[Array, tuple]:
            # rewriting the row before the last token's covers every case in which the draft model has not seen that
            # token: after a round that accepted everything, and after rounds without drafts
            return forward(jnp.stack([previous, token], axis=1), carry, jnp.maximum(state.length - 1, 0), 0)

        def step(carry: tuple, token: Array, slot: Array) -> tuple[Array, tuple]:
            return forward(token[:, None], carry, state.length + slot, slot)

        config, batch = self.model.config, state.last_token.shape[0]
        shape = (batch, self.num_draft, config.num_heads, config.head_dim)
        kept = tuple(jnp.zeros(shape, own.cache[0].k.dtype) for _ in query_layers)
        carry = (own.cache, kept)
        draft, (cache, kept) = draft_chain(step, carry, state.last_token, self.num_draft, sampling, keys, first=first)
        return draft, own.replace(cache=cache), kept

    def _known(self, tokens: Array) -> Array:
        return jnp.minimum(tokens, self.model.config.vocab_size - 1)
