"""Choosing a plan: which sublayers a draft skips and how many tokens it drafts (KnapSpec, arXiv 2602.20217)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.methods.base import Models
from jaxspec.models.decoder import Decoder
from jaxspec.planning.knapsack import Frontier, knapsack, reference_tokens
from jaxspec.planning.latency import LatencyProfile, RoundCosts, expected_tokens
from jaxspec.types import Array, KVCache, KVSelection, KVSelector, LayerMask


@dataclass(frozen=True)
class Plan:
    """The sublayers that drafts run (True) and how many tokens a round drafts. Hashable."""

    attn: tuple[bool, ...]  # [L]
    mlp: tuple[bool, ...]  # [L]
    num_draft: int

    def __post_init__(self) -> None:
        """Raises ValueError for masks that are not equally long or not of booleans, and for a wrong `num_draft`."""
        for name in ("attn", "mlp"):
            values = getattr(self, name)
            if not isinstance(values, Sequence | np.ndarray) or not all(isinstance(x, bool | np.bool_) for x in values):
                raise ValueError(f"plan: {name} must be booleans, one per layer, got {values!r}")
            object.__setattr__(self, name, tuple(map(bool, values)))
        if not self.attn or len(self.attn) != len(self.mlp):
            raise ValueError(f"plan: attn and mlp must have one entry per layer, got {len(self.attn)}, {len(self.mlp)}")
        if isinstance(self.num_draft, bool) or not isinstance(self.num_draft, int | np.integer) or self.num_draft < 0:
            raise ValueError(f"plan: num_draft must be an integer >= 0, got {self.num_draft!r}")
        object.__setattr__(self, "num_draft", int(self.num_draft))

    @property
    def layers(self) -> LayerMask:
        """The mask for `Decoder.__call__`, static."""
        return LayerMask(attn=self.attn, mlp=self.mlp)

    @property
    def num_attention(self) -> int:
        """Attention sublayers that run."""
        return sum(self.attn)

    @property
    def num_mlp(self) -> int:
        """MLP sublayers that run."""
        return sum(self.mlp)

    def __str__(self) -> str:
        total = len(self.attn)
        return f"{self.num_draft} drafts, attention {self.num_attention}/{total}, MLP {self.num_mlp}/{total}"


@dataclass(frozen=True)
class PlannerOptions:
    """How the planner searches; `KnapSpec` documents the meaning and checks the values."""

    max_draft: int = 10
    tau: float = 0.5
    clip: int = 5
    max_cells: int = 64
    max_skipped: float = 0.5
    reference_tokens: int = 32
    items: str = "sublayers"  # or "blocks"
    value: str = "tpt"  # or "tpl"
    alpha: str = "smoothed"  # or "raw"


@dataclass(frozen=True)
class Candidate:
    """A cell of the frontier with its best number of drafts."""

    plan: Plan
    weight: int  # total skipped weight
    similarity: float  # mean cosine with the full model's last hidden state
    alpha: float  # predicted chance that a draft token is accepted
    tokens_per_second: float  # predicted, per sequence


@dataclass(frozen=True)
class Planned:
    """What `plan` found."""

    plan: Plan
    alpha: float
    tokens_per_second: float  # TPT: predicted tokens per second and sequence
    plain_tokens_per_second: float  # of plain decoding
    weights: tuple[int, int]  # of an attention and an MLP sublayer
    frontier: tuple[Candidate, ...]  # by skipped weight; the first one skips nothing


class Search(NamedTuple):
    """`plan` on the device: the frontier with its predicted values."""

    frontier: Frontier
    weights: Array  # int32 [2]
    alpha: Array  # float32 [C]
    value: Array  # float32 [C, max_draft + 1]: what is maximised; -inf for dropped cells
    rate: Array  # float32 [C, max_draft + 1]: tokens per second and sequence
    plain_rate: Array  # float32 []: that of plain decoding, which scores no rows
    cell: Array  # int32 []: the best one
    num_draft: Array  # int32 []


def plan(
    models: Models,
    cache: KVCache,
    prompt: Array,
    prompt_length: Array,
    emitted: Array,
    length: Array,
    profile: LatencyProfile,
    options: PlannerOptions = PlannerOptions(),
    *,
    selection: KVSelection | KVSelector | None = None,
) -> Planned:
    """The draft that promises the most tokens per second after the tokens committed so far.

    "Skip nothing" and "do not speculate" are among the candidates, so the prediction falls below plain decoding by no
    more than scoring rows takes.

    Args:
        models: the target.
        cache: [B, S, K, H] per layer; rows 0..length-1 are the committed tokens'. It is only read.
        prompt: int32 [B, P].
        prompt_length: int32 [B].
        emitted: int32 [B, W], the tokens after the prompts.
        length: int32 [B], at least 1.
        profile: measured latencies.
        options: how to search.
        selection: the rows that drafts attend to, at the cost that `profile.selected` states.

    Raises:
        ValueError: the profile is that of a model with another number of layers, or has no figures of a selection.
    """
    check_profile(profile, models.target)
    costs = profile.costs(selection is not None)
    search = search_plan(models, cache, prompt, prompt_length, emitted, length, costs, options, selection)
    return read_search(jax.tree.map(np.asarray, search._replace(frontier=search.frontier._replace(states=()))))


def check_profile(profile: LatencyProfile, target: Decoder) -> None:
    """Raises ValueError if the profile is that of a model with another number of layers."""
    num_layers = target.config.num_layers
    if profile.num_layers != num_layers:
        raise ValueError(f"the latency profile is of a model with {profile.num_layers} layers, this one: {num_layers}")


@partial(jax.jit, static_argnames="options")
def search_plan(
    models: Models,
    cache: KVCache,
    prompt: Array,
    prompt_length: Array,
    emitted: Array,
    length: Array,
    costs: RoundCosts,
    options: PlannerOptions,
    selection: KVSelection | KVSelector | None = None,
) -> Search:
    """`plan` as one program, which may be part of a larger one; `costs` are traced, the others as in `plan`."""
    num_layers = models.target.config.num_layers
    tokens, start, valid = reference_tokens(prompt, prompt_length, emitted, length, options.reference_tokens)
    n = jnp.mean(length.astype(jnp.float32))
    weights, limit = _skippable(options, costs, num_layers, n, jnp)
    frontier = knapsack(
        models,
        cache,
        tokens,
        start,
        valid,
        weights,
        limit,
        cells=options.max_cells,
        tau=options.tau,
        blocks=options.items == "blocks",
        selection=selection,
    )
    alpha = acceptance_of(frontier.hits, frontier.count, options.alpha, selects=selection is not None)
    ran = jnp.sum(frontier.attn, axis=1), jnp.sum(frontier.mlp, axis=1)
    price, seconds = round_prices(*ran, costs, n, options)
    gained = expected_tokens(alpha[:, None], jnp.arange(options.max_draft + 1))
    value, rate = gained / price, gained / seconds
    # not to speculate stays a choice even where a selection alone loses too much
    plain = (jnp.arange(options.max_cells) == 0)[:, None] & (jnp.arange(options.max_draft + 1) == 0)
    value = jnp.where(frontier.alive[:, None] | plain, value, -jnp.inf)
    best = jnp.argmax(value)
    cell, num_draft = jnp.unravel_index(best, value.shape)
    return Search(frontier, weights, alpha, value, rate, 1 / costs.plain_step(n), cell, num_draft)


def round_prices(
    num_attention: Any, num_mlp: Any, costs: RoundCosts, n: Any, options: PlannerOptions, xp: Any = jnp
) -> tuple[Any, Any]:
    """What a round costs with every number of drafts.

    Args:
        num_attention: [C], attention sublayers that drafts run.
        num_mlp: [C], MLPs that they run.
        costs: measured latencies.
        n: context length.
        options: how to search.
        xp: jnp or np, which computes.

    Returns:
        Two arrays [C, max_draft + 1]: what the planner weighs tokens against, seconds or with `value="tpl"` layers,
        infinite where verification was not timed; and seconds.
    """
    g = xp.arange(options.max_draft + 1)
    seconds = costs.round(num_attention[:, None], num_mlp[:, None], g, n)
    layers = g * (num_attention + num_mlp)[:, None] / 2 + costs.num_layers
    # what more drafts cost was not measured, and attention over more rows than fit a tile costs a multiple
    return xp.where(g < costs.rows, layers if options.value == "tpl" else seconds, xp.inf), seconds


def sublayer_weights(costs: RoundCosts, n: Any, clip: int, xp: Any = jnp) -> Any:
    """int32 [2]: weights of an attention and an MLP sublayer at context length n, the smaller one 1, at most `clip`.
    Computed by `xp`, jnp or np."""
    seconds = xp.stack([xp.asarray(x, xp.float32) for x in (costs.draft_attention.at(n), costs.mlp)])
    smaller = xp.maximum(xp.min(seconds), 1e-12)
    return xp.clip(xp.round(seconds / smaller), 1, clip).astype(xp.int32)


def fitted(options: PlannerOptions, costs: RoundCosts, num_layers: int, lengths: Sequence[float]) -> PlannerOptions:
    """The options with no more branches than the largest skipped weight needs, in eights. Host only.

    The plan that is found stays the same, and a branch less is computed for every one left out. Their number is part of
    the planner's program, which should therefore be fitted once for all context lengths of a run.

    Args:
        options: how to search.
        costs: measured latencies; plain numbers.
        num_layers: of the model.
        lengths: the shortest and the longest context that is planned for. No weight between them is larger than at
            both ends, as the ratio of the two sublayers' times only rises or only falls.
    """
    most = max(int(_skippable(options, costs, num_layers, n, np)[1]) for n in lengths)
    return replace(options, max_cells=min(options.max_cells, -(-(most + 1) // 8) * 8))


def _skippable(options: PlannerOptions, costs: RoundCosts, num_layers: int, n: Any, xp: Any) -> tuple[Any, Any]:
    """int32 [2], the items' weights at context length n, and int32 [], the most weight that may be skipped."""
    blocks = options.items == "blocks"
    clip = largest_weight(num_layers, options)
    weights = xp.ones(2, xp.int32) if blocks else sublayer_weights(costs, n, clip, xp)
    total = num_layers * (1 if blocks else xp.sum(weights))
    limit = xp.minimum(xp.floor(options.max_skipped * total).astype(xp.int32), options.max_cells - 1)
    return weights, limit


def largest_weight(num_layers: int, options: PlannerOptions) -> int:
    """The clip for weights: `options.clip`, or less, so that the largest skipped weight has a cell of its own."""
    for clip in range(options.clip, 1, -1):
        if int(options.max_skipped * num_layers * (1 + clip)) < options.max_cells:
            return clip
    return 1


# drafts accepted of drafts made that stand for what is known of drafts over selected rows
SELECTED = (0.97 * 64, 64)


def acceptance_of(hits: Any, count: Any, kind: str, *, selects: bool) -> Any:
    """The predicted chances of acceptance [C] of cells, the first of which skips nothing.

    `raw` is hits / count (the published code). `smoothed` is that of drafts that skip nothing, times what a cell leaves
    of them: both are judged on the same few tokens, and what makes those easy or hard says nothing of skipping. Of the
    h0 tokens that cell 0 hits, h are left to a cell: the posterior of that share under a uniform prior is
    Beta(h + 1, h0 - h + 1), and its mean less its standard deviation counts, since the best of many cells is likely one
    that was lucky. Cell 0 is the model itself without a selection, and accepted whole. With one, 64 drafts of which 97%
    are accepted count beside its hits: so many are with Vegas in long texts (docs/performance.md), while the tokens of
    a prompt, which others wrote, are hit less often than the model's own will be.

    Args:
        hits: int [C], tokens of the full model that each cell predicts. More than cell 0's count as many as those.
        count: reference tokens.
        kind: `smoothed` or `raw`.
        selects: drafts attend to selected rows, so that those that skip nothing may be rejected.
    """
    if kind == "raw":
        return hits / count
    accepted, drafted = SELECTED if selects else (0, 0)
    base = (hits[0] + accepted) / (count + drafted)
    mean = (jnp.minimum(hits, hits[0]) + 1) / (hits[0] + 2)
    deviation = jnp.sqrt(mean * (1 - mean) / (hits[0] + 3))
    return base * jnp.where(jnp.arange(hits.size) == 0, 1, mean - deviation)


def read_search(search: Search) -> Planned:
    """A `Search` of concrete arrays as plain values."""
    frontier, candidates = search.frontier, []
    for cell in np.flatnonzero(frontier.alive):
        num_draft = int(np.argmax(search.value[cell]))
        candidates.append(
            Candidate(
                plan=Plan(tuple(frontier.attn[cell]), tuple(frontier.mlp[cell]), num_draft),
                weight=int(cell),
                similarity=float(frontier.similarity[cell]),
                alpha=float(search.alpha[cell]),
                tokens_per_second=float(search.rate[cell, num_draft]),
            )
        )
    cell, num_draft = int(search.cell), int(search.num_draft)
    return Planned(
        plan=Plan(tuple(frontier.attn[cell]), tuple(frontier.mlp[cell]), num_draft),
        alpha=float(search.alpha[cell]),
        tokens_per_second=float(search.rate[cell, num_draft]),
        plain_tokens_per_second=float(search.plain_rate),
        weights=tuple(map(int, search.weights)),
        frontier=tuple(candidates),
    )
