"""Row sets of other methods in place of Dustin's: SnapKV's and Quest's, within the same budget of rows."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.methods.base import Models
from jaxspec.methods.quest import PageBounds, page_bounds, renew_bounds, select_pages
from jaxspec.types import Array, Collect, ForwardOut, KVSelector

OBSERVED = 16  # last prompt tokens whose attention SnapKV ranks by; its paper takes 16 to 64
POOL = 7  # rows that a score is averaged over, as in the paper
PAGE = 16  # rows per page of Quest, as in the paper


@struct.dataclass
class Ranked:
    """Prompt rows by the attention that the end of the prompt paid them, best first (SnapKV, arXiv 2404.14469)."""

    rows: Array  # int32 [L, B, M]
    prompt_length: Array  # int32 [B]


def rank_prompt(models: Models, prompt: Array, prompt_length: Array, out: ForwardOut, budget: int) -> Ranked:
    """Ranks each layer's prompt rows: the observed window first, then by pooled softmax mass over its queries.

    Args:
        models: the models.
        prompt: int32 [B, P].
        prompt_length: int32 [B].
        out: of the last prompt token's forward.
        budget: static size of the ranking.
    """
    capacity = out.cache[0].k.shape[1]
    observed = min(OBSERVED, prompt.shape[1])
    start = jnp.maximum(prompt_length - observed, 0)
    tokens = jnp.take_along_axis(prompt, start[:, None] + jnp.arange(observed), axis=1)
    # a prompt shorter than the window names its last token again
    scored = jnp.minimum(jnp.arange(observed, dtype=jnp.int32), prompt_length[:, None] - 1)
    # the same tokens at the same rows: the cache that this forward returns would be the one it was given
    scores = models.forward(tokens, out.cache, start, collect=Collect(scored_rows=scored)).row_scores
    row = jnp.arange(capacity)
    before = row < start[:, None]
    scores = jnp.where(before, scores, 0)
    pooled = jax.lax.reduce_window(scores, 0.0, jax.lax.add, (1, 1, POOL), (1, 1, 1), "SAME")
    newest = jnp.where(row < prompt_length[:, None], jnp.inf, -jnp.inf)
    ranks = jnp.where(before, pooled, newest)
    rows = jax.lax.top_k(ranks, min(budget, capacity))[1].astype(jnp.int32)
    return Ranked(rows, prompt_length)


def ranked_rows(ranked: Ranked, length: Array) -> Array:
    """The newest generated rows, and the best prompt rows in what they leave of the budget; int32 [L, B, M]."""
    width = ranked.rows.shape[2]
    k = jnp.minimum(width, length)
    generated = jnp.minimum(length - ranked.prompt_length, k)
    kept = (k - generated)[:, None]
    slot = jnp.arange(width, dtype=jnp.int32)
    newest = jnp.where(slot < k[:, None], length[:, None] - generated[:, None] + slot - kept, -1)
    return jnp.where(slot < kept, ranked.rows, newest)


def quest_selector(
    bounds: tuple[PageBounds, ...], length: Array, budget: int, rows: int, backend: str | None
) -> KVSelector:
    """Pages ranked by what their key bounds promise the verification's own queries (Quest, arXiv 2406.10774).

    The unfinished last page is always read and counts as one of the budget's pages.

    Args:
        bounds: per layer, of pages of `PAGE` rows.
        length: int32 [B], committed rows.
        budget: rows to read.
        rows: query rows of the verification.
        backend: see `pallas_kernels.dispatch`.
    """
    num_pages = length // PAGE
    wanted = jnp.clip(budget // PAGE - (length % PAGE > 0), 0, num_pages)
    select = partial(select_pages, page_size=PAGE, width=max(budget // PAGE, 1), backend=backend)
    return KVSelector(
        state=(bounds, num_pages, wanted.astype(jnp.int32)), valid=num_pages * PAGE, select=select, window=PAGE + rows
    )


@struct.dataclass
class Rival:
    """State of a rival's selection; one of the fields is set, or none."""

    ranked: Ranked | None = None
    bounds: tuple[PageBounds, ...] | None = None


def init_rival(signal: str, models: Models, prompt: Array, prompt_length: Array, out: ForwardOut, budget: int) -> Rival:
    """The state after prefill of the rival that `signal` names, empty for Dustin's own signals."""
    if signal == "snapkv":
        return Rival(ranked=rank_prompt(models, prompt, prompt_length, out, budget))
    if signal == "quest":
        return Rival(bounds=tuple(page_bounds(layer.k, PAGE) for layer in out.cache))
    return Rival()


def observe_rival(rival: Rival, out: ForwardOut, length: Array, num_draft: int) -> Rival:
    """After a round: Quest's bounds of the pages that it finished."""
    if rival.bounds is None:
        return rival
    return rival.replace(bounds=renew_bounds(rival.bounds, out.cache, length, num_draft, PAGE))
