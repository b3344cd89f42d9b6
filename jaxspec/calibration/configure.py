"""From traces to the configuration file of Dustin."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.calibration.heads import retrieval_heads
from jaxspec.calibration.records import DUSTIN, describe, write_record
from jaxspec.calibration.search import (
    Budget,
    HeadSet,
    Trace,
    arr,
    best_split,
    choose,
    mean_arr,
    oracle,
    recency,
    search,
)
from jaxspec.calibration.traces import collect_traces
from jaxspec.methods.base import Models
from jaxspec.models import Decoder

SIGNALS = ("hybrid", "history", "draft", "recency", "oracle")


def configure(
    names: tuple[str, str],
    models: Models,
    draft_model: Decoder,
    head_scores: tuple[np.ndarray, np.ndarray],
    prompts: Sequence[list[int]],
    path: Path | None,
    *,
    budgets: Sequence[int] = (512,),
    num_draft: int = 4,
    rounds: int = 8,
    sinks: int = 4,
    window: int = 16,
    per_layer: int = 4,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Runs algorithm 1 for a pair of models.

    Args:
        names: of target and draft model, for the record.
        models: the target, its parameters and the draft model's.
        draft_model: the draft model.
        head_scores: [L, N] of both models, see `scan_heads`.
        prompts: token ids; rounds of greedy speculation after each are the traces.
        path: where the record goes; None: nowhere.
        budgets: rows; layers are chosen for the first, and a split for each.
        num_draft, rounds: of the traces.
        sinks, window: rows that are always read.
        per_layer: heads of a candidate layer.
        progress: called with one line per step.

    Returns:
        The record, which `Dustin` takes: heads, splits by budget, ARR by budget, signal and layer.

    Raises:
        ValueError: budgets that leave nothing to choose, or prompts that all fit the budget.
    """
    wrong = [rows for rows in budgets if rows <= sinks + window]
    if wrong or not budgets:
        raise ValueError(f"budgets must exceed sinks + window = {sinks + window}, got {list(budgets)}")
    if max(map(len, prompts), default=0) <= budgets[0]:
        raise ValueError(f"calibration needs prompts longer than the budget of {budgets[0]} rows")
    configs = models.target.config, draft_model.config
    target, draft = (
        retrieval_heads(np.asarray(scores), config.num_kv_heads, per_layer)
        for scores, config in zip(head_scores, configs, strict=True)
    )
    traces: list[Trace] = []
    for number, found in enumerate(
        collect_traces(models, draft_model, prompts, target, draft, num_draft=num_draft, rounds=rounds)
    ):
        traces += [trace for trace in found if trace.weights.shape[1] > budgets[0]]
        progress(f"traces of round {number + 1} of {rounds}")
    chosen = search(traces, target, draft, Budget(budgets[0], sinks, window), progress=progress)
    heads, ahead = target[chosen.target], tuple(draft[i] for i in chosen.draft)
    splits, table = {}, {}
    for rows in budgets:
        budget = Budget(rows, sinks, window)
        splits[str(rows)] = best_split(traces, chosen.target, chosen.draft, budget)[0]
        table[str(rows)] = arr_table(traces, chosen.target, chosen.draft, splits[str(rows)], budget)
        progress(f"ARR with {rows} rows: " + ", ".join(f"{s} {np.mean(table[str(rows)][s]):.3f}" for s in SIGNALS))
    record = {
        "target": describe(names[0], models.target, models.params),
        "draft": describe(names[1], draft_model, models.draft_params),
        "settings": {
            "prompts": [len(ids) for ids in prompts],
            "num_draft": num_draft,
            "rounds": rounds,
            "sinks": sinks,
            "window": window,
            "heads_per_layer": per_layer,
        },
        "budget": budgets[0],
        "target_heads": [[heads.layer, list(heads.heads)]],
        "draft_heads": [[found.layer, list(found.heads)] for found in ahead],
        "splits": splits,
        "search": list(chosen.steps),
        "arr": table,
        "arr_by_target_layer": layer_values(traces, target, Budget(budgets[0], sinks, window)),
    }
    if path is not None:
        write_record(path, DUSTIN, record)
    return record


def arr_table(
    traces: Sequence[Trace], target: int, draft: Sequence[int], split: int, budget: Budget
) -> dict[str, list[float]]:
    """Mean ARR per target layer of the sets of each signal at one budget."""

    def ahead(trace: Trace) -> np.ndarray:
        return np.mean(trace.draft[list(draft)], axis=0)

    select = {
        "hybrid": lambda t: choose(budget, t.history[target], ahead(t), split),
        "history": lambda t: choose(budget, t.history[target], None, 0),
        "draft": lambda t: choose(budget, None, ahead(t), 0),
        "recency": lambda t: recency(budget, t.weights.shape[1]),
        "oracle": lambda t: oracle(budget, t.weights),
    }
    return {signal: mean_arr(traces, select[signal]).tolist() for signal in SIGNALS}


def layer_values(traces: Sequence[Trace], candidates: Sequence[HeadSet], budget: Budget) -> list[list[float]]:
    """[layer, ARR] of history-only sets by each candidate's heads: what the target layer was chosen by."""
    values = []
    for i, candidate in enumerate(candidates):
        found = [np.mean(arr(t.weights, choose(budget, t.history[i], None, 0))) for t in traces]
        values.append([candidate.layer, float(np.mean(found))])
    return values
