"""Options of sparse verification from the file that `jaxspec calibrate dustin` writes."""

import os
from pathlib import Path
from typing import Any

from jaxspec.dustin.scoring import Heads


def options_from_config(config: str | os.PathLike[str] | dict[str, Any], budget: int | None = None) -> dict[str, Any]:
    """Keyword arguments for `Dustin`: heads, budget, split, sinks, window and drafts per round.

    Args:
        config: the file, or what it holds.
        budget: rows to read instead of the calibrated ones. A split that was not calibrated is scaled.

    Raises:
        ValueError: not such a file, or a malformed one.
    """
    from jaxspec.calibration.records import DUSTIN, read_record

    record = config if isinstance(config, dict) else read_record(Path(config), DUSTIN)
    try:
        settings = record["settings"]
        sinks, window, num_draft = (int(settings[name]) for name in ("sinks", "window", "num_draft"))
        splits = {int(rows): int(split) for rows, split in record["splits"].items()}
        calibrated = int(record["budget"])
        budget = calibrated if budget is None else budget
        split = splits.get(budget)
        if split is None:
            split = round(splits[calibrated] * (budget - sinks - window) / (calibrated - sinks - window))
        heads = {name: _heads(record[name]) for name in ("target_heads", "draft_heads")}
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"malformed configuration of dustin ({type(error).__name__}: {error})") from None
    return {
        "budget": budget,
        "split": max(split, 0),
        "sinks": sinks,
        "window": window,
        "num_draft": num_draft,
        **heads,
    }


def _heads(entries: Any) -> Heads:
    return tuple((int(layer), tuple(int(head) for head in heads)) for layer, heads in entries)
