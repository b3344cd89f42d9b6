"""Attention recall of row sets, and the greedy search of Dustin's configuration (arXiv 2606.24957, algorithm 1)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

SAME_ARR = 2e-3  # ARR is an average over some dozens of rounds; closer than this two head sets are as good


@dataclass(frozen=True)
class HeadSet:
    """A candidate signal: some heads of one layer."""

    layer: int
    heads: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """One verification round of one sequence with n committed rows, under full attention."""

    weights: np.ndarray  # float32 [L, n]: mean attention over heads and the g+1 queries, each over rows < n
    history: np.ndarray  # float32 [C, n]: S_target of each target candidate
    draft: np.ndarray  # float32 [D, n]: S_draft of each draft candidate


@dataclass(frozen=True)
class Budget:
    """How many rows are read, and which of them always are."""

    rows: int
    sinks: int = 4
    window: int = 16

    @property
    def free(self) -> int:
        """Rows that scores choose."""
        return self.rows - self.sinks - self.window

    def protected(self, n: int) -> np.ndarray:
        """bool [n]: the first `sinks` and the newest `window` rows."""
        row = np.arange(n)
        return (row < self.sinks) | (row >= n - self.window)


def top(scores: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest scores, in any order; -inf is never among them."""
    count = min(count, int(np.sum(scores > -np.inf)))
    return np.argpartition(-scores, count - 1)[:count] if count else np.empty(0, np.int64)


def choose(budget: Budget, history: np.ndarray | None, draft: np.ndarray | None, split: int) -> np.ndarray:
    """The row set of Dustin's SELECT, int64 [min(rows, n)]: protected rows, `split` rows by the draft, the rest by
    history. One of the scores [n] may be None; the other then chooses all."""
    scores = draft if history is None else history
    n = scores.size
    if n <= budget.rows:
        return np.arange(n)
    taken = budget.protected(n)
    if history is not None and draft is not None and split:
        taken[top(np.where(taken, -np.inf, draft), split)] = True
    taken[top(np.where(taken, -np.inf, scores), budget.rows - int(taken.sum()))] = True
    return np.flatnonzero(taken)


def recency(budget: Budget, n: int) -> np.ndarray:
    """Sinks and the newest rows, the set of StreamingLLM."""
    return choose(budget, np.arange(n, dtype=np.float32), None, 0)


def oracle(budget: Budget, weights: np.ndarray) -> np.ndarray:
    """The set of at most `rows` rows with the highest ARR that one set for all layers can have."""
    return top(np.mean(weights, axis=0), budget.rows)


def arr(weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Attention recall of a set per layer [L]: true attention mass on it over that on all committed rows, mean over
    heads and queries."""
    return np.sum(weights[:, rows], axis=1) / np.sum(weights, axis=1)


def mean_arr(traces: Sequence[Trace], select: Callable[[Trace], np.ndarray]) -> np.ndarray:
    """Mean ARR per layer [L] over traces of the sets that `select` chooses."""
    return np.mean([arr(trace.weights, select(trace)) for trace in traces], axis=0)


@dataclass(frozen=True)
class Found:
    """What the search chose."""

    target: int  # index of the target candidate
    draft: tuple[int, ...]  # indices of the draft candidates
    split: int
    steps: tuple[dict, ...]  # what was tried, for the record


def search(
    traces: Sequence[Trace],
    target: Sequence[HeadSet],
    draft: Sequence[HeadSet],
    budget: Budget,
    *,
    most_draft_layers: int = 4,
    progress: Callable[[str], None] = lambda what: None,
) -> Found:
    """Best target candidate by the ARR of history alone; then draft candidates added greedily while the ARR of the
    hybrid at half a split grows, one per layer; then the split with the highest ARR, by trying every one.

    Several candidates of one layer are variants of it: one that reads fewer kv heads is preferred where the ARR is the
    same up to `SAME_ARR`. Candidates must be sorted so that the preferred variant of a layer comes last.

    Args:
        traces: at least one, whose `history` and `draft` rows are the candidates'.
        target, draft: the candidates.
        budget: the rows to choose.
        most_draft_layers: bound of the greedy search.
        progress: called once per step, with what was chosen.
    """
    score = cached_scores(traces, budget)
    steps = []

    def best(options: Sequence[HeadSet], value: Callable[[int], float], banned: set[int]) -> tuple[int, float]:
        values = {i: value(i) for i, option in enumerate(options) if option.layer not in banned}
        first = max(values, key=values.get)
        variants = [i for i in values if options[i].layer == options[first].layer]
        chosen = max(i for i in variants if values[i] >= values[first] - SAME_ARR)
        return chosen, values[chosen]

    chosen_target, value = best(target, lambda i: score(i, (), 0), set())
    steps.append({"step": "target", "layer": target[chosen_target].layer, "arr": value})
    progress(f"target layer {target[chosen_target].layer}, ARR {value:.3f}")
    half, chosen = budget.free // 2, ()
    while len(chosen) < most_draft_layers:
        used = {draft[i].layer for i in chosen}
        if len(used) == len({option.layer for option in draft}):
            break
        more, grown = best(draft, lambda i, chosen=chosen: score(chosen_target, (*chosen, i), half), used)
        if grown <= value and chosen:
            break
        chosen, value = (*chosen, more), grown
        steps.append({"step": "draft", "layer": draft[more].layer, "arr": value})
        progress(f"draft layer {draft[more].layer}, ARR {value:.3f}")
    split, value = best_split(traces, chosen_target, chosen, budget)
    steps.append({"step": "split", "split": split, "arr": value})
    progress(f"split {split}, ARR {value:.3f}")
    return Found(chosen_target, chosen, split, tuple(steps))


def cached_scores(traces: Sequence[Trace], budget: Budget) -> Callable[[int, tuple[int, ...], int], float]:
    """Mean ARR over layers and traces of a configuration (target candidate, draft candidates, split)."""
    means = [np.mean(t.weights / np.sum(t.weights, axis=1, keepdims=True), axis=0) for t in traces]

    def score(target: int, draft: tuple[int, ...], split: int) -> float:
        total = 0.0
        for trace, mean in zip(traces, means, strict=True):
            ahead = np.mean(trace.draft[list(draft)], axis=0) if draft else None
            total += float(np.sum(mean[choose(budget, trace.history[target], ahead, split)]))
        return total / len(traces)

    return score


def best_split(traces: Sequence[Trace], target: int, draft: tuple[int, ...], budget: Budget) -> tuple[int, float]:
    """The split with the highest mean ARR among all of 0..free, the smallest of equals; exact."""
    total = np.zeros(budget.free + 1)
    for trace in traces:
        total += arr_by_split(trace, target, draft, budget)
    best = int(np.argmax(total))
    return best, float(total[best] / len(traces))


def arr_by_split(trace: Trace, target: int, draft: tuple[int, ...], budget: Budget) -> np.ndarray:
    """Mean ARR over layers of the hybrid set for every split 0..free: float64 [free + 1].

    The rows by history shrink from their lowest rank as the draft's rows, in order of rank, come in.
    """
    mean = np.mean(trace.weights / np.sum(trace.weights, axis=1, keepdims=True), axis=0, dtype=np.float64)
    n, free = mean.size, budget.free
    if n <= budget.rows or not draft:
        return np.full(free + 1, np.sum(mean[choose(budget, trace.history[target], None, 0)]))
    protected = budget.protected(n)
    ahead = np.mean(trace.draft[list(draft)], axis=0)

    def ranked(scores: np.ndarray) -> np.ndarray:
        rows = top(np.where(protected, -np.inf, scores), 2 * free)
        return rows[np.argsort(-scores[rows], kind="stable")]

    by_draft, by_history = ranked(ahead)[:free], ranked(trace.history[target])
    base, values = float(np.sum(mean[protected])), []
    for split in range(free + 1):
        first = by_draft[:split]
        rest = by_history[~np.isin(by_history, first)][: free - first.size]
        values.append(base + np.sum(mean[first]) + np.sum(mean[rest]))
    return np.array(values)
