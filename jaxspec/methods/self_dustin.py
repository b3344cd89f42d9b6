"""Self-Dustin: sparse verification whose drafts are the target's own, made cheaper. Lossy."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxspec.drafting import draft_chain
from jaxspec.dustin.scoring import check_heads
from jaxspec.dustin.verification import SparseVerification
from jaxspec.methods.base import Models, option
from jaxspec.models.decoder import Decoder
from jaxspec.sampling import Sampling
from jaxspec.types import Array, Collect, DecodeState, Draft, KVCache, KVSelection, LayerMask


@dataclass(frozen=True)
class SelfDustin(SparseVerification):
    """Drafts with the target itself under a layer mask, a row selection or both; verifies sparsely. Lossy.

    Needs no second model. `skipped_layers` leaves out whole layers of the drafts; `sparse_drafts` limits their
    attention. `draft_heads` are heads of target layers that drafts run. Otherwise as `SparseVerification`.
    """

    skipped_layers: tuple[int, ...] = option((), low=0, high=2**20, help="layers that the drafts leave out")

    def __post_init__(self) -> None:
        super().__post_init__()
        skipped = sorted(set(self.skipped_layers) & set(self._scored_layers))
        if skipped:
            raise ValueError(f"SelfDustin draft_heads must lie in layers that run; skipped_layers holds {skipped}")

    def check_model(self, target: Decoder) -> None:
        super().check_model(target)
        config = target.config
        check_heads("SelfDustin draft_heads", self.draft_heads, config.num_layers, config.num_heads)
        if not set(self.skipped_layers) < set(range(config.num_layers)):
            raise ValueError(
                f"SelfDustin skipped_layers must be some, not all, of the model's layers 0..{config.num_layers - 1}, "
                f"got {self.skipped_layers}"
            )

    def run_drafts(
        self, models: Models, state: DecodeState, sampling: Sampling, keys: Array, selection: KVSelection | None
    ) -> tuple[Draft, KVCache, Any, KVCache, tuple[Array, ...]]:
        config, cache = models.target.config, state.cache
        run = tuple(layer not in self.skipped_layers for layer in range(config.num_layers))
        options = {
            "selection": selection,
            "layers": LayerMask(run, run) if self.skipped_layers else None,
            "collect": Collect(queries=self._scored_layers),
        }
        shape = (state.last_token.shape[0], self.num_draft, config.num_heads, config.head_dim)
        kept = tuple(jnp.zeros(shape, cache[0].k.dtype) for _ in self._scored_layers)

        def step(carry: tuple, token: Array, slot: Array) -> tuple[Array, tuple]:
            cache, kept = carry
            out = models.forward(token[:, None], cache, state.length + slot, **options)
            kept = tuple(rows.at[:, slot].set(q[:, 0]) for rows, q in zip(kept, out.queries, strict=True))
            return out.logits[:, 0], (out.cache, kept)

        carry = (cache, kept)
        draft, (cache, kept) = draft_chain(step, carry, state.last_token, self.num_draft, sampling, keys)
        return draft, cache, (), cache, kept
