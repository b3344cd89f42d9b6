"""Verification that reads a fixed number of cache rows (Dustin, arXiv 2606.24957), whatever drafts. Lossy."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.cache_rows import put_rows, rows_from
from jaxspec.dustin.refresh import Refresh, init_refresh, note_round, run_refresh
from jaxspec.dustin.rivals import Rival, init_rival, observe_rival, quest_selector, ranked_rows
from jaxspec.dustin.scoring import Heads, check_heads, choose_rows, head_scores, layers_of, mass_on, recent_rows
from jaxspec.methods.base import Method, Models, draft_sampling_option, num_draft_option, option
from jaxspec.models.decoder import Decoder
from jaxspec.sampling import Sampling
from jaxspec.types import (
    Array,
    Collect,
    DecodeState,
    Draft,
    Finish,
    ForwardOut,
    KVCache,
    KVSelection,
    KVSelector,
    Verdict,
)

SIGNALS = ("hybrid", "history", "draft", "recency", "snapkv", "quest")


@struct.dataclass
class SparseState:
    """The method state of sparse verification."""

    own: Any  # of what drafts
    queries: tuple[Array, ...]  # per target layer [B, N, H]: of the token at row length - 1 (q_last)
    rows: Array  # int32 [1 or L, B, M]: what the last verification reads, all < valid
    valid: Array  # int32 [B]
    arr: Array  # float32 [B]: share of q_last's attention, in the chosen heads, on `rows`; 1 where it is not watched
    fallbacks: Array  # int32 [B]: rounds verified in full because `arr` was too low
    rival: Rival
    refresh: Refresh | None


@dataclass(frozen=True)
class SparseVerification(Method):
    """Verifies with the target's attention limited to `budget` committed rows and the round's own. Lossy.

    One set of rows per sequence serves all layers and heads: the first `sinks` and the newest `window` rows, the
    `split` rows that the draft's attention ranks highest, and in what is left of the budget those that the target's
    own attention ranked highest in the round before, both in a few heads only. While the sequence fits the budget,
    verification is full. K/V of accepted tokens stay as sparse attention computed them.

    `signal` names the ranking: `hybrid`; one of its halves, `history` or `draft`; or a rival's, `recency`
    (StreamingLLM), `snapkv` or `quest`, which need no heads. `target_heads` and `draft_heads` come from
    `jaxspec calibrate dustin`. `sparse_drafts` limits what the drafts read, too: the rows of the verification before
    (`last`) or the sinks and the newest rows (`recent`), besides all newer ones.

    With `refresh_every` R > 0 every R rounds one full forward over the tokens since replaces their K/V, see `Refresh`.
    With `min_arr` > 0 a row is verified in full in rounds in which its set holds less than that share of q_last's
    attention in the target heads.
    """

    lossless: ClassVar[bool] = False

    num_draft: int = num_draft_option(4)
    budget: int = option(512, low=1, high=2**20, help="committed cache rows that verification reads")
    sinks: int = option(4, low=0, high=2**20, help="first rows of the sequence, always read")
    window: int = option(16, low=0, high=2**20, help="newest committed rows, always read")
    split: int = option(-1, low=-1, high=2**20, help="rows that the draft's attention chooses; -1: half of the rest")
    signal: str = option("hybrid", choices=SIGNALS, help="what ranks the rows of verification")
    sparse_drafts: str = option("off", choices=("off", "last", "recent"), help="rows that drafts are limited to")
    min_arr: float = option(0.0, low=-1, high=1, help="verify in full below this share of attention; 0: never")
    refresh_every: int = option(0, low=0, high=2**20, help="rounds between full forwards that refresh; 0: never")
    target_heads: Heads = ()
    draft_heads: Heads = ()
    draft_sampling: Sampling | None = draft_sampling_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        check_heads(f"{name} target_heads", self.target_heads)
        check_heads(f"{name} draft_heads", self.draft_heads)
        rest = self.budget - self.sinks - self.window
        if rest < max(self.split, 0):
            raise ValueError(
                f"{name} budget must be at least sinks + window + split = "
                f"{self.sinks + self.window + max(self.split, 0)}, got {self.budget}"
            )
        if not self.target_heads and (self._history or self.min_arr > 0):
            raise ValueError(
                f"{name} with signal {self.signal} needs target_heads: jaxspec calibrate dustin finds them"
            )
        if not self.draft_heads and self._draft_rows:
            raise ValueError(f"{name} with signal {self.signal} needs draft_heads: jaxspec calibrate dustin finds them")
        if self._draft_rows and not self.num_draft:
            raise ValueError(f"{name} num_draft must be at least 1 with signal {self.signal}")
        if self.signal in ("snapkv", "quest") and (self.sparse_drafts == "last" or self.min_arr > 0):
            raise ValueError(
                f"{name} signal {self.signal} excludes sparse_drafts='last' and min_arr: its sets differ by layer"
            )

    @property
    def max_draft(self) -> int:
        return self.num_draft

    @property
    def _draft_rows(self) -> int:
        """How many rows the draft's scores choose; static."""
        rest = self.budget - self.sinks - self.window
        by_signal = {"hybrid": rest // 2 if self.split < 0 else self.split, "draft": rest}
        return by_signal.get(self.signal, 0)

    @property
    def _history(self) -> bool:
        """Whether the target's scores choose rows; static."""
        rest = self.budget - self.sinks - self.window
        return self.signal in ("hybrid", "history") and self._draft_rows < max(rest, 1)

    @property
    def _target_heads(self) -> Heads:
        return self.target_heads if self._history or self.min_arr > 0 else ()

    @property
    def _scored_layers(self) -> tuple[int, ...]:
        """The drafting model's layers whose queries the drafts hand out."""
        return layers_of(self.draft_heads) if self._draft_rows else ()

    def init_drafts(self, models: Models, prompt: Array, prompt_length: Array, out: ForwardOut) -> Any:
        """What drafting needs after prefill."""
        return ()

    def run_drafts(
        self, models: Models, state: DecodeState, sampling: Sampling, keys: Array, selection: KVSelection | None
    ) -> tuple[Draft, KVCache, Any, KVCache, tuple[Array, ...]]:
        """Drafts `num_draft` tokens, reading `selection` if there is one.

        Returns:
            The draft, the target's cache, the state of what drafts, the cache of the drafting model, and its queries
            [B, g, N, H] in the layers of `draft_heads`.
        """
        raise NotImplementedError

    def check_model(self, target: Decoder) -> None:
        config = target.config
        check_heads(f"{type(self).__name__} target_heads", self.target_heads, config.num_layers, config.num_heads)

    def prefill_collect(self, last: Array) -> Collect:
        return Collect(queries=layers_of(self._target_heads))

    def init(self, models: Models, prompt: Array, prompt_length: Array, out: ForwardOut) -> SparseState:
        own = self.init_drafts(models, prompt, prompt_length, out)
        return self.start(models, prompt, prompt_length, out, own)

    def start(self, models: Models, prompt: Array, prompt_length: Array, out: ForwardOut, own: Any) -> SparseState:
        """The state after prefill around `own`, the state of what drafts. Other arguments are those of `init`."""
        most = self.refresh_every * (self.num_draft + 1)
        batch = prompt.shape[0]
        state = SparseState(
            own=own,
            queries=tuple(q[:, 0] for q in out.queries),
            rows=jnp.zeros((1, batch, 0), jnp.int32),
            valid=prompt_length,
            arr=jnp.ones(batch),
            fallbacks=jnp.zeros(batch, jnp.int32),
            rival=init_rival(self.signal, models, prompt, prompt_length, out, self.budget),
            refresh=init_refresh(prompt, prompt_length, most) if most else None,
        )
        # the first drafts have no verification before them to take their rows from
        history = self._history_scores(models, out.cache, state.queries, prompt_length)
        return self._choose(models, out.cache, state, prompt_length, history, None)

    def draft(
        self, models: Models, state: DecodeState, sampling: Sampling, keys: Array
    ) -> tuple[Draft, KVCache, SparseState]:
        sampling = sampling if self.draft_sampling is None else self.draft_sampling
        own: SparseState = state.method_state
        if self.refresh_every:
            # the prefill is round 0
            due = (state.round > 1) & ((state.round - 1) % self.refresh_every == 0)
            layers = layers_of(self._target_heads)
            cache, refresh, queries = run_refresh(models, state, own.refresh, own.queries, layers, due)
            own = own.replace(refresh=refresh, queries=queries)
            state = state.replace(cache=cache)
        state = state.replace(method_state=own.own)
        selection = self._draft_selection(state, own)
        draft, cache, drafts, draft_cache, queries = self.run_drafts(models, state, sampling, keys, selection)
        own, length = own.replace(own=drafts), models.visible(state.length)
        history = self._history_scores(models, cache, own.queries, length)
        ahead = None
        if self._draft_rows:
            q_pos = length[:, None] + jnp.arange(self.num_draft, dtype=jnp.int32)
            ahead = head_scores(queries, draft_cache, self.draft_heads, q_pos, length, models.target.backend)
        own = self._choose(models, cache, own, length, history, ahead)
        falls_back = (own.arr < self.min_arr) & (state.finish == Finish.RUNNING)
        return draft, cache, own.replace(fallbacks=own.fallbacks + falls_back)

    def verify_collect(self, draft: Draft) -> Collect:
        return Collect(queries=layers_of(self._target_heads))

    def verify(self, models: Models, state: DecodeState, draft: Draft) -> ForwardOut:
        own: SparseState = state.method_state
        tokens = jnp.concatenate([state.last_token[:, None], draft.tokens], axis=1)
        collect = self.verify_collect(draft)
        selection = self._verify_selection(models, state, own)
        out = models.forward(tokens, state.cache, state.length, selection=selection, collect=collect)
        if self.min_arr <= 0:
            return out
        low, length = own.arr < self.min_arr, state.length
        sparse_rows = jax.tree.map(lambda x: rows_from(x, length, tokens.shape[1]), out.cache)

        def pick(full: Array, sparse: Array) -> Array:
            return jnp.where(low.reshape(-1, *[1] * (full.ndim - 1)), full, sparse)

        def run_full(_: Array, sparse: tuple) -> tuple:
            full = models.forward(tokens, sparse[0], length, collect=collect)

            def settle(x: Array, rows: Array) -> Array:
                return put_rows(x, pick(rows_from(x, length, tokens.shape[1]), rows), length)

            cache = jax.tree.map(settle, full.cache, sparse_rows)
            return cache, pick(full.logits, sparse[1]), tuple(map(pick, full.queries, sparse[2]))

        # a loop of no or one trip: the branches of lax.cond would copy the caches
        any_low = jnp.any(low & (state.finish == Finish.RUNNING)).astype(jnp.int32)
        cache, logits, queries = jax.lax.fori_loop(0, any_low, run_full, (out.cache, out.logits, out.queries))
        return out._replace(cache=cache, logits=logits, queries=queries)

    def observe(
        self, models: Models, method_state: SparseState, out: ForwardOut, draft: Draft, verdict: Verdict, length: Array
    ) -> SparseState:
        accepted = verdict.num_accepted[:, None]
        queries = tuple(jnp.take_along_axis(q, accepted[:, :, None, None], axis=1)[:, 0] for q in out.queries)
        refresh = method_state.refresh
        if refresh is not None:
            slot = jnp.arange(self.num_draft + 1)
            tokens = jnp.where(slot < accepted, jnp.pad(draft.tokens, ((0, 0), (0, 1))), verdict.next_token[:, None])
            refresh = note_round(refresh, out.logits, tokens, length)
        return method_state.replace(
            queries=queries,
            refresh=refresh,
            rival=observe_rival(method_state.rival, out, length, self.num_draft),
        )

    def report(self, method_state: SparseState) -> dict[str, Array]:
        """`fallbacks`: rounds verified in full; of refreshes, `checked`: tokens compared with the full model, `agreed`:
        those that are its likeliest, `drift`: mean difference of their log-probabilities, full against sparse."""
        found = {"fallbacks": method_state.fallbacks} if self.min_arr > 0 else {}
        if (refresh := method_state.refresh) is not None:
            drift = refresh.drift / jnp.maximum(refresh.checked, 1)
            found |= {"checked": refresh.checked, "agreed": refresh.agreed, "drift": drift}
        return found

    def _history_scores(
        self, models: Models, cache: KVCache, queries: tuple[Array, ...], length: Array
    ) -> Array | None:
        if not self._target_heads:
            return None
        queries = tuple(q[:, None] for q in queries)
        return head_scores(queries, cache, self.target_heads, length[:, None] - 1, length, models.target.backend)

    def _choose(
        self,
        models: Models,
        cache: KVCache,
        own: SparseState,
        length: Array,
        history: Array | None,
        ahead: Array | None,
    ) -> SparseState:
        capacity = cache[0].k.shape[1]
        if own.rival.ranked is not None:
            rows = ranked_rows(own.rival.ranked, length)
        elif own.rival.bounds is not None:
            rows = own.rows
        elif (history if self._history else None) is None and ahead is None:
            rows = recent_rows(length, capacity, budget=self.budget, sinks=self.sinks)
        else:
            rows = choose_rows(
                history if self._history else None,
                ahead,
                length,
                budget=self.budget,
                sinks=self.sinks,
                window=self.window,
                split=self._draft_rows,
                backend=models.target.backend,
            )
        arr = own.arr if self.min_arr <= 0 else mass_on(history, rows[0])
        return own.replace(rows=rows, valid=length, arr=arr)

    def _verify_selection(self, models: Models, state: DecodeState, own: SparseState) -> KVSelection | KVSelector:
        rows = self.num_draft + 1
        if own.rival.bounds is not None:
            return quest_selector(own.rival.bounds, state.length, self.budget, rows, models.target.backend)
        return KVSelection(rows=own.rows, valid=state.length, window=rows)

    def _draft_selection(self, state: DecodeState, own: SparseState) -> KVSelection | None:
        if self.sparse_drafts == "off":
            return None
        if self.sparse_drafts == "last":
            # up to g + 1 rows are newer than that set, and g are in flight
            return KVSelection(rows=own.rows, valid=own.valid, window=2 * self.num_draft + 1)
        rows = recent_rows(state.length, state.cache[0].k.shape[1], budget=self.budget, sinks=self.sinks)
        return KVSelection(rows=rows, valid=state.length, window=max(self.num_draft, 1))
