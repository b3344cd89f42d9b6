"""Self-speculation with Quest drafts (arXiv 2406.10774): each layer's own query picks pages of the cache."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp

from jaxspec.cache_rows import put_rows, rows_from
from jaxspec.drafting import self_draft
from jaxspec.methods.base import Method, Models, draft_sampling_option, num_draft_option, option
from jaxspec.sampling import Sampling
from jaxspec.selection import budget, buffer_width
from jaxspec.types import Array, DecodeState, Draft, ForwardOut, KVCache, KVSelector, LayerCache, Verdict
from pallas_kernels import row_selection


class PageBounds(NamedTuple):
    """Extremes of the keys of each page of one layer, by channel."""

    low: Array  # [B, S / page_size, K, H]
    high: Array  # [B, S / page_size, K, H]


@dataclass(frozen=True)
class Quest(Method):
    """Drafts with the target's own weights over the most promising pages; verifies in full. Lossless.

    A page's promise is the largest logit that its key minima and maxima allow for the query (Quest, section 3.2), here
    summed over heads, so that all heads of a layer share one set. The budget is that of Vegas, rounded up to whole
    pages; the unfinished last page and the rows of the round come on top. `draft_sampling` draws drafts in another
    way than the output.
    """

    rho: float = option(0.07, low=0, high=1, help="share of the cache that drafts read")
    min_keep: int = option(256, low=1, high=2**20, help="least number of cache rows that drafts read")
    num_draft: int = num_draft_option(6)
    page_size: int = option(16, low=1, high=128, help="cache rows per page, a power of two")
    draft_sampling: Sampling | None = draft_sampling_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"Quest page_size must be a power of two in 1..128, got {self.page_size}")

    @property
    def max_draft(self) -> int:
        return self.num_draft

    def init(self, models: Models, prompt: Array, prompt_length: Array, out: ForwardOut) -> tuple[PageBounds, ...]:
        return tuple(page_bounds(layer.k, self.page_size) for layer in out.cache)

    def draft(
        self, models: Models, state: DecodeState, sampling: Sampling, keys: Array
    ) -> tuple[Draft, KVCache, tuple[PageBounds, ...]]:
        sampling = sampling if self.draft_sampling is None else self.draft_sampling
        selection = self.draft_selection(models, state)
        draft, cache = self_draft(models.forward, state, self.num_draft, sampling, keys, selection=selection)
        return draft, cache, state.method_state

    def draft_selection(self, models: Models, state: DecodeState) -> KVSelector:
        size, capacity = self.page_size, state.cache[0].k.shape[1]
        num_pages = state.length // size
        wanted = budget(self.rho, self.min_keep, state.length, state.length)
        select = partial(
            select_pages,
            page_size=size,
            width=-(-buffer_width(self.rho, self.min_keep, capacity) // size),
            backend=models.target.backend,
        )
        return KVSelector(
            state=(state.method_state, num_pages, -(-wanted // size)),
            valid=num_pages * size,
            select=select,
            window=size - 1 + max(self.num_draft, 1),
        )

    def observe(
        self,
        models: Models,
        method_state: tuple[PageBounds, ...],
        out: ForwardOut,
        draft: Draft,
        verdict: Verdict,
        length: Array,
    ) -> tuple[PageBounds, ...]:
        """Renews the bounds of the pages that the round's g + 1 rows can finish; unfinished pages are never read."""
        return renew_bounds(method_state, out.cache, length, self.num_draft, self.page_size)


def renew_bounds(
    bounds: tuple[PageBounds, ...], cache: KVCache, length: Array, num_draft: int, size: int
) -> tuple[PageBounds, ...]:
    """The bounds after a round that wrote rows length..length + num_draft: those of the pages it can have finished.

    Args:
        bounds: of pages of `size` rows, per layer.
        cache: after the round.
        length: int32 [B], committed rows before it.
    """
    total = cache[0].k.shape[1] // size
    touched = min(num_draft // size + 1, total)
    # starting earlier than the round's first page only renews finished pages with what they hold
    first = jnp.minimum(length // size, total - touched)

    def renew(bounds: PageBounds, keys: Array) -> PageBounds:
        new = page_bounds(rows_from(keys, first * size, touched * size), size)
        return PageBounds(*map(partial(put_rows, start=first), bounds, new))

    return tuple(renew(old, layer.k) for old, layer in zip(bounds, cache, strict=True))


def page_bounds(keys: Array, size: int) -> PageBounds:
    """The bounds of pages of `size` rows of keys [B, S, K, H]."""
    pages = keys.reshape(keys.shape[0], -1, size, *keys.shape[2:])
    return PageBounds(jnp.min(pages, axis=2), jnp.max(pages, axis=2))


def select_pages(
    layer: int,
    q: Array,
    cache: LayerCache,
    q_pos: Array,
    state: tuple[tuple[PageBounds, ...], Array, Array],
    *,
    page_size: int,
    width: int,
    backend: str | None,
) -> Array:
    """A `KVSelector.select`: the rows of the most promising pages, int32 [B, width * page_size].

    Its state holds the bounds per layer, and int32 [B] how many pages there are and how many are wanted.
    """
    bounds, num_pages, wanted = state
    promise = page_promise(q, bounds[layer])
    pages, _ = row_selection(promise, num_pages, wanted, width=min(width, promise.shape[1]), backend=backend)
    rows = pages[:, :, None] * page_size + jnp.arange(page_size, dtype=jnp.int32)
    return jnp.where(pages[:, :, None] >= 0, rows, -1).reshape(pages.shape[0], -1)


def page_promise(q: Array, bounds: PageBounds) -> Array:
    """The largest logit that each page's key bounds allow, summed over heads and query rows (Quest, section 3.2).

    Args:
        q: [B, T, N, H].
        bounds: [B, P, K, H] each.

    Returns:
        float32 [B, P], without the factor 1 / sqrt(H).
    """
    low, high = bounds
    batch, _, kv_heads, head_dim = low.shape
    # the bound of a head is max(q, 0) . high + min(q, 0) . low, so a group's sum needs its summed halves only
    grouped = q.astype(jnp.float32).reshape(batch, q.shape[1], kv_heads, -1, head_dim)
    up, down = jnp.sum(jnp.maximum(grouped, 0), axis=(1, 3)), jnp.sum(jnp.minimum(grouped, 0), axis=(1, 3))
    promise = jnp.einsum("bkh,bpkh->bp", up, high.astype(jnp.float32), precision="highest")
    return promise + jnp.einsum("bkh,bpkh->bp", down, low.astype(jnp.float32), precision="highest")
