"""Vegas (arXiv 2602.07223): drafts read the few cache rows that the last verification found important."""

from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from jaxspec.drafting import self_draft
from jaxspec.methods.base import Method, Models, draft_sampling_option, num_draft_option, option
from jaxspec.models.decoder import Decoder
from jaxspec.sampling import Sampling
from jaxspec.selection import buffer_width, layer_budgets, top_rows
from jaxspec.types import Array, Collect, DecodeState, Draft, ForwardOut, KVCache, KVSelection, Verdict

LEAST_SHARE, MOST_SHARE = 0.001, 16  # of the budget, in one layer


@dataclass(frozen=True)
class Vegas(Method):
    """Drafts with the target's own weights and sparse attention; verifies with full attention. Lossless.

    Every layer of a draft step attends to its own min(max(min_keep, ceil(rho * length)), rows there are) best rows,
    one set for all heads, and to every row that is newer than the scored ones. The scores are a by-product of the
    verification before it, so the set is one round old; the first round takes the last prompt token's.

    `layer_shares` gives a layer that many times the rows instead, since layers differ in what they lose by reading few:
    a share per layer, their mean 1, or a file of `jaxspec calibrate rows`, which measures them.

    `collect` names the verification rows that are scored: `two` the first and the last, `all`, or `last` the one of
    the last accepted token (an ablation of the paper). `score_mode` ranks by softmax weight or by raw logit.
    `draft_sampling` draws drafts in another way than the output.
    """

    rho: float = option(0.07, low=0, high=1, help="share of the cache that drafts read")
    min_keep: int = option(256, low=1, high=2**20, help="least number of cache rows that drafts read")
    num_draft: int = num_draft_option(6)
    score_mode: str = option("weight", choices=("weight", "logit"), help="how cache rows are ranked")
    collect: str = option("two", choices=("two", "all", "last"), help="verification rows scored")
    layer_shares: tuple[float, ...] | str = option(
        "", help="JSON file of `jaxspec calibrate rows`: rows by layer", metavar="FILE"
    )
    draft_sampling: Sampling | None = draft_sampling_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = self.layer_shares
        if isinstance(shares, str):
            object.__setattr__(self, "layer_shares", read_layer_shares(shares) if shares else "")
        elif not isinstance(shares, tuple) or not all(map(_is_share, shares)):
            allowed = f"a tuple of numbers in {LEAST_SHARE}..{MOST_SHARE}"
            raise ValueError(f"Vegas layer_shares must be {allowed}, got {shares!r}")
        elif not shares:
            object.__setattr__(self, "layer_shares", "")

    def check_model(self, target: Decoder) -> None:
        if self.layer_shares and len(self.layer_shares) != target.config.num_layers:
            shares, layers = len(self.layer_shares), target.config.num_layers
            raise ValueError(f"Vegas layer_shares are those of {shares} layers, the model has {layers}")

    @property
    def max_draft(self) -> int:
        return self.num_draft

    def prefill_collect(self, last: Array) -> Collect:
        return Collect(scored_rows=last[:, None], score_mode=self.score_mode)

    def init(self, models: Models, prompt: Array, prompt_length: Array, out: ForwardOut) -> KVSelection:
        return self._select(models, out.row_scores, prompt_length, prompt_length)

    def draft(
        self, models: Models, state: DecodeState, sampling: Sampling, keys: Array
    ) -> tuple[Draft, KVCache, KVSelection]:
        sampling = sampling if self.draft_sampling is None else self.draft_sampling
        selection = self.draft_selection(models, state)
        draft, cache = self_draft(models.forward, state, self.num_draft, sampling, keys, selection=selection)
        return draft, cache, selection

    def draft_selection(self, models: Models, state: DecodeState) -> KVSelection:
        return state.method_state

    def verify_collect(self, draft: Draft) -> Collect:
        if self.collect == "two":
            rows = jnp.stack([jnp.zeros_like(draft.count), draft.count], axis=1)
        else:
            rows = jnp.tile(jnp.arange(self.num_draft + 1, dtype=jnp.int32), (draft.count.shape[0], 1))
        # which row is the last accepted one is known after verification only
        return Collect(scored_rows=rows, score_mode=self.score_mode, per_row=self.collect == "last")

    def observe(
        self,
        models: Models,
        method_state: KVSelection,
        out: ForwardOut,
        draft: Draft,
        verdict: Verdict,
        length: Array,
    ) -> KVSelection:
        scores = out.row_scores
        if self.collect == "last":
            scores = jnp.take_along_axis(scores, verdict.num_accepted[None, :, None, None], axis=2)[:, :, 0]
        # scored are the rows that every scored query sees: those up to the first query's own position
        return self._select(models, scores, length + verdict.num_accepted + 1, length + 1)

    def _select(self, models: Models, scores: Array, length: Array, valid: Array) -> KVSelection:
        length, valid = models.visible(length), models.visible(valid)
        shares = self.layer_shares or (1.0,)
        k = layer_budgets(self.rho, self.min_keep, shares, length, valid)
        k = jnp.broadcast_to(k, scores.shape[:2])
        width = buffer_width(self.rho, self.min_keep, scores.shape[-1], shares)
        # rounded as everything else of a 16-bit model is, which halves the passes of the selection
        if models.params["embedding"].dtype.itemsize == 2:
            scores = scores.astype(jnp.bfloat16)
        rows = top_rows(scores, valid, k, width, models.target.backend)
        # newer than `valid` are the accepted drafts of the scored round and those in flight
        return KVSelection(rows=rows, valid=valid, window=max(2 * self.num_draft, 1), count=k)


def read_layer_shares(path: str) -> tuple[float, ...]:
    """The shares in a file of `jaxspec calibrate rows`.

    Raises:
        ValueError: it cannot be read or is not such a file.
    """
    from jaxspec.calibration.records import ROWS, read_record

    shares = read_record(Path(path), ROWS).get("shares")
    if not isinstance(shares, list) or not shares:
        raise ValueError(f"{path}: shares must be a list of numbers, got {shares!r}")
    for layer, share in enumerate(shares):
        if not _is_share(share):
            allowed = f"numbers in {LEAST_SHARE}..{MOST_SHARE}"
            raise ValueError(f"{path}: shares must be {allowed}, got {share!r} for layer {layer}")
    return tuple(shares)


def _is_share(share: object) -> bool:
    return isinstance(share, int | float) and not isinstance(share, bool) and LEAST_SHARE <= share <= MOST_SHARE
