"""Dustin (arXiv 2606.24957): a draft model, and a target that verifies over a few cache rows. Lossy."""

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxspec.dustin.scoring import check_heads
from jaxspec.dustin.verification import SparseVerification
from jaxspec.methods.base import Models
from jaxspec.methods.draft_model import DraftModel, DraftModelState
from jaxspec.models.decoder import Decoder
from jaxspec.sampling import Sampling
from jaxspec.types import Array, DecodeState, Draft, ForwardOut, KVCache, KVSelection


@dataclass(frozen=True)
class Dustin(SparseVerification):
    """Drafts with a small model of its own; verifies with sparse attention. Lossy: see `SparseVerification`.

    The rows of verification are chosen by the draft model's attention as well as by the target's. Vocabularies may
    differ as with `DraftModel`. `generate(draft_params=...)` takes the draft model's parameters. `draft_heads` are the
    draft model's.
    """

    needs_draft_params: ClassVar[bool] = True

    model: Decoder | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.model, Decoder):
            raise ValueError(f"Dustin model must be a Decoder, the draft model's, got {self.model!r}")
        config = self.model.config
        check_heads("Dustin draft_heads", self.draft_heads, config.num_layers, config.num_heads)

    @property
    def _classic(self) -> DraftModel:
        return DraftModel(model=self.model, num_draft=self.num_draft)

    def init_drafts(self, models: Models, prompt: Array, prompt_length: Array, out: ForwardOut) -> DraftModelState:
        return self._classic.init(models, prompt, prompt_length, out)

    def run_drafts(
        self, models: Models, state: DecodeState, sampling: Sampling, keys: Array, selection: KVSelection | None
    ) -> tuple[Draft, KVCache, Any, KVCache, tuple[Array, ...]]:
        draft, own, queries = self._classic.run(
            models, state, sampling, keys, selection=selection, query_layers=self._scored_layers
        )
        return draft, state.cache, own, own.cache, queries
