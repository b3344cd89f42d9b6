"""Figures of speculative decoding from a run's counters and trace.

A round is one verification in which a row was active; the token that the prefill samples belongs to none. What a stop
rule cut off is not counted: a row's last round counts the tokens it put into the output, and stays out of acceptance.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxspec.types import Stats


@dataclass(frozen=True)
class Mean:
    """A ratio over a batch, in two weightings; None where nothing was counted."""

    per_row: float | None  # mean of the rows' own ratios: every row counts alike
    token_weighted: float | None  # total over total: long rows count more


@dataclass(frozen=True)
class Metrics:
    """Figures of a run."""

    rounds: int
    emitted: int  # tokens put into the output by these rounds
    tokens_per_round: Mean
    acceptance: Mean  # accepted / offered draft tokens
    # by draft position i: of the rounds that offered a token i and accepted all before it, the share that accepted it
    acceptance_by_position: tuple[float | None, ...]
    offered_by_position: tuple[int, ...]  # how many rounds these are

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return asdict(self)


def measure(stats: Stats) -> Metrics:
    """The figures of `Output.stats`, or of the last `Chunk`."""
    rounds, emitted = np.asarray(stats.rounds), np.asarray(stats.emitted)
    drafted, accepted = (np.asarray(x).astype(np.int64) for x in (stats.drafted, stats.accepted))
    whole = np.arange(drafted.shape[1]) < rounds[:, None] - 1
    offered, reached = [], []
    for i in range(int(drafted.max(initial=0))):
        at = whole & (drafted > i) & (accepted >= i)
        offered.append(int(at.sum()))
        reached.append(int((at & (accepted > i)).sum()))
    return Metrics(
        rounds=int(rounds.sum()),
        emitted=int(emitted.sum()),
        tokens_per_round=_mean(emitted, rounds),
        acceptance=_mean(np.sum(accepted * whole, axis=1), np.sum(drafted * whole, axis=1)),
        acceptance_by_position=tuple(r / n if n else None for r, n in zip(reached, offered, strict=True)),
        offered_by_position=tuple(offered),
    )


def _mean(part: np.ndarray, whole: np.ndarray) -> Mean:
    counted = whole > 0
    if not counted.any():
        return Mean(None, None)
    return Mean(float(np.mean(part[counted] / whole[counted])), float(part.sum() / whole.sum()))
