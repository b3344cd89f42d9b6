"""Scanning a model for retrieval heads: needles at many lengths and depths, resumable."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.calibration.heads import answer
from jaxspec.calibration.needles import Encode, Needle, make_needle
from jaxspec.calibration.records import HEADS, describe, read_record, write_record
from jaxspec.methods.base import Models

TOKENS_AT_ONCE = 65536  # of the needles of one batch
RECALLED = 0.5  # only answers that hold more of the needle count


@dataclass(frozen=True)
class Scan:
    """What to scan."""

    lengths: tuple[int, ...]
    depths: int = 10
    repeats: int = 1  # needles per length and depth
    seed: int = 0

    def check(self, limit: int) -> None:
        """Raises ValueError for lengths that the model lacks."""
        if not self.lengths or min(self.lengths) < 1 or max(self.lengths) > limit - 16:
            raise ValueError(f"lengths must lie in 1..{limit - 16}, the model's positions, got {list(self.lengths)}")
        if self.depths < 1 or self.repeats < 1:
            raise ValueError(f"depths and repeats must be at least 1, got {self.depths} and {self.repeats}")

    def jobs(self) -> list[tuple[str, int, float, int]]:
        """Every needle: a name, its length, depth and seed."""
        depths = [(i + 0.5) / self.depths for i in range(self.depths)]
        return [
            (f"{length}/{depth:.3f}/{repeat}", length, depth, self.seed + 1000 * repeat + i)
            for length in self.lengths
            for repeat in range(self.repeats)
            for i, depth in enumerate(depths)
        ]


def default_lengths(limit: int, most: int = 32768) -> tuple[int, ...]:
    """1K, 2K, 4K ... up to the model's limit."""
    return tuple(2**i for i in range(10, 20) if 2**i <= min(limit - 16, most)) or (limit // 2,)


def scan_heads(
    name: str,
    models: Models,
    encode: Encode,
    texts: Sequence[Sequence[int]],
    scan: Scan,
    path: Path,
    *,
    wrap: tuple[str, str] = ("", ""),
    eos_ids: tuple[int, ...] = (),
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:
    """Scores every head of the model and writes the record to `path`.

    After every batch the results so far go into a file beside it, from which a run that was interrupted goes on.

    Args:
        name: of the model, for the record.
        models: the model to scan, as target.
        encode: text to token ids, without special tokens.
        texts: haystacks, used in turn.
        scan: what to scan.
        path: the record's file.
        wrap: a chat template's two ends.
        eos_ids: ids that end an answer.
        progress: called with the numbers of needles that are done and of all.

    Returns:
        The record: `scores` [L][N], the mean over answers that recall more than half of the needle of the softmax mass
        on it per payload token; `runs`, each needle's recall; settings and the model's hash.

    Raises:
        ValueError: impossible settings, before `progress` is first called; a file of an interrupted run with others;
            or no needle was answered, and then no file is left.
    """
    scan.check(models.target.config.capacity_limit)
    settings = {**vars(scan), "lengths": list(scan.lengths), "texts": [len(text) for text in texts], "wrap": list(wrap)}
    head = {"model": describe(name, models.target, models.params), "settings": settings}
    partial = path.with_name(path.name + ".partial")
    runs: dict[str, Any] = _resume(partial, head) if partial.exists() else {}
    jobs = scan.jobs()
    # all of them first: a length that is too short is refused before any work
    left = [
        (key, length, make_needle(encode, texts[seed % len(texts)], length, depth, seed, wrap))
        for key, length, depth, seed in jobs
        if key not in runs
    ]
    progress(len(runs), len(jobs))
    for batch in _batches(left):
        needles = [needle for *_, needle in batch]
        # every batch of one length has one size, so that it needs one program
        length = batch[0][1]
        size = min(_batch_size(length), scan.depths * scan.repeats)
        answers = answer(models, [*needles, *needles[:1] * (size - len(needles))], length, eos_ids)
        for i, (key, *_) in enumerate(batch):
            mass = answers.mass[i] / len(needles[i].payload)
            runs[key] = {"recall": float(answers.recall[i]), "mass": mass.round(6).tolist()}
        write_record(partial, HEADS, {**head, "runs": runs})
        progress(len(runs), len(jobs))
    recalled = [run["mass"] for run in runs.values() if run["recall"] > RECALLED]
    if not recalled:
        # a finished run: there is nothing to go on with
        partial.unlink(missing_ok=True)
        raise ValueError(f"{name} answered none of {len(runs)} needles; retrieval heads cannot be told from the others")
    recalls = {key: runs[key]["recall"] for key, *_ in jobs}
    record = {**head, "answered": len(recalled), "recall": recalls, "scores": np.mean(recalled, axis=0).tolist()}
    write_record(path, HEADS, record)
    partial.unlink(missing_ok=True)
    return record


def _resume(partial: Path, head: dict[str, Any]) -> dict[str, Any]:
    record = read_record(partial, HEADS)
    if {key: record.get(key) for key in head} != head:
        raise ValueError(f"{partial} is of another model or other settings; finish that run or delete the file")
    return record["runs"]


def _batch_size(length: int) -> int:
    return max(TOKENS_AT_ONCE // length, 1)


def _batches(jobs: list[tuple[str, int, Needle]]) -> Iterator[list[tuple[str, int, Needle]]]:
    while jobs:
        batch = [job for job in jobs if job[1] == jobs[0][1]][: _batch_size(jobs[0][1])]
        yield batch
        jobs = [job for job in jobs if job not in batch]
