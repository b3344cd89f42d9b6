"""Self-speculation with StreamingLLM drafts: attention sinks and the newest rows (arXiv 2309.17453, 2408.11049)."""

from dataclasses import dataclass

from jaxspec.drafting import self_draft
from jaxspec.methods.base import Method, Models, draft_sampling_option, num_draft_option, option
from jaxspec.sampling import Sampling
from jaxspec.selection import budget, buffer_width, sink_and_recent_rows
from jaxspec.types import Array, DecodeState, Draft, KVCache, KVSelection


@dataclass(frozen=True)
class Streaming(Method):
    """Drafts with the target's own weights over the first rows and the newest; verifies in full. Lossless.

    The budget is that of Vegas: min(max(min_keep, ceil(rho * length)), length) committed rows, `sinks` of which are
    the first of the sequence; rows drafted in the same round come on top. `draft_sampling` draws drafts in another
    way than the output.
    """

    rho: float = option(0.07, low=0, high=1, help="share of the cache that drafts read")
    min_keep: int = option(256, low=1, high=2**20, help="least number of cache rows that drafts read")
    num_draft: int = num_draft_option(6)
    sinks: int = option(4, low=0, high=2**20, help="first rows of the sequence, always read")
    draft_sampling: Sampling | None = draft_sampling_option()

    @property
    def max_draft(self) -> int:
        return self.num_draft

    def draft(
        self, models: Models, state: DecodeState, sampling: Sampling, keys: Array
    ) -> tuple[Draft, KVCache, tuple]:
        sampling = sampling if self.draft_sampling is None else self.draft_sampling
        selection = self.draft_selection(models, state)
        draft, cache = self_draft(models.forward, state, self.num_draft, sampling, keys, selection=selection)
        return draft, cache, ()

    def draft_selection(self, models: Models, state: DecodeState) -> KVSelection:
        capacity = state.cache[0].k.shape[1]
        k = budget(self.rho, self.min_keep, state.length, state.length)
        width = buffer_width(self.rho, self.min_keep, capacity)
        rows = sink_and_recent_rows(state.length, k, self.sinks, width)
        return KVSelection(rows=rows, valid=state.length, window=max(self.num_draft, 1), count=k[None])
