"""What `jaxspec generate` says about a run: a line, a trace file and a plot."""

import importlib.util
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convert.atomic import replace_file
from jaxspec.cli.plans import draw_plans
from jaxspec.figures import save_figure
from jaxspec.metrics import Metrics
from jaxspec.types import Stats

SCHEMA_VERSION = 1


def check_outputs(outputs: dict[str, Path | None], inputs: Sequence[str | Path | None] = ()) -> None:
    """Raises ValueError before a run whose files could not be written after it, or would replace others.

    Args:
        outputs: by flag; that of `--plot` is a picture.
        inputs: files and directories that the run reads.
    """
    read = {Path(path).resolve() for path in inputs if path is not None}
    written: dict[Path, str] = {}
    for flag, path in outputs.items():
        if path is None:
            continue
        if flag == "--plot":
            _check_plot(path)
        _check_output(flag, path)
        resolved = path.resolve()
        inside = next((parent for parent in resolved.parents if parent in read), None)
        if resolved in read:
            raise ValueError(f"{flag} {path} would replace a file that this command reads")
        if inside is not None and path.exists():
            raise ValueError(f"{flag} {path} would replace a file in {inside}, which this command reads")
        if resolved in written:
            raise ValueError(f"{written[resolved]} and {flag} name the same file, {path}")
        written[resolved] = flag


def _check_output(flag: str, path: Path) -> None:
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"{flag} {path}: not a file in an existing directory")
    try:
        # permissions do not tell: nobody may write to /proc
        tempfile.TemporaryFile(dir=path.absolute().parent).close()
    except OSError as error:
        raise ValueError(f"{flag} {path}: its directory cannot be written to: {error.strerror}") from None


def _check_plot(path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise ValueError(f"--plot {path}: the suffix must be one of {', '.join(formats)}, got {path.suffix[1:]!r}")


def figures_line(
    figures: dict[str, Any],
    metrics: Metrics,
    finish: str,
    device: Any,
    run: dict[str, Any],
    plans: list[dict[str, Any]] | None = None,
) -> str:
    """One line of figures; speculation is left out where nothing was drafted. What is lossy is called so."""
    rate = figures["decode_tokens_per_second"]
    decode = "" if rate is None else f" at {rate:.1f} tokens/s"
    parts = [
        f"prompt {figures['prompt_tokens']} tokens at {figures['prompt_tokens_per_second']:.1f} tokens/s",
        f"{figures['new_tokens']} new tokens{decode} (ended by {finish})",
    ]
    if metrics.offered_by_position:
        parts.append(f"{metrics.tokens_per_round.token_weighted:.2f} tokens per round")
    if metrics.acceptance.token_weighted is not None:
        positions = " ".join("-" if a is None else f"{a:.2f}" for a in metrics.acceptance_by_position)
        parts.append(f"acceptance {metrics.acceptance.token_weighted:.2f}, by position {positions}")
    if plans and not metrics.offered_by_position:
        parts.append("the plan: do not speculate")
    if figures["planning_seconds"] is not None:
        parts.append(f"planning and measuring {figures['planning_seconds']:.1f} s")
    parts.append(f"compile {figures['compile_seconds']:.1f} s")
    parts.append(f"peak memory {figures['peak_memory_bytes'] / 2**30:.2f} GiB")
    for name, value in run.get("report", {}).items():
        parts.append(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}")
    if not run["lossless"]:
        parts.append("lossy")
    return f"[{' | '.join(parts)} | {device.device_kind}]"


def write_trace(path: Path, record: dict[str, Any], stats: Stats, metrics: Metrics) -> None:
    """Writes the trace: `record`, the metrics, and per row and round how many tokens were drafted and accepted."""
    rows = []
    for b, rounds in enumerate(np.asarray(stats.rounds).tolist()):
        rows.append(
            {
                "rounds": rounds,
                "emitted": int(stats.emitted[b]),
                "drafted": np.asarray(stats.drafted[b])[:rounds].tolist(),
                "accepted": np.asarray(stats.accepted[b])[:rounds].tolist(),
            }
        )
    record = {"schema_version": SCHEMA_VERSION, **record, "metrics": metrics.as_dict(), "rows": rows}
    replace_file(path, json.dumps(record, ensure_ascii=False, indent=1) + "\n")


def write_plot(
    path: Path, title: str, stats: Stats, metrics: Metrics, plans: list[dict[str, Any]] | None = None
) -> None:
    """Draws tokens per round over the run, acceptance by draft position where anything was drafted, and plans where
    there were some; the suffix chooses the format."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drafted = bool(metrics.offered_by_position)
    layout = [["acceptance", "rounds"] if drafted else ["rounds", "rounds"] if plans else ["rounds"]]
    layout += [["sublayers", "rates"]] if plans else []
    figure = Figure(figsize=(5 * len(layout[0]), 4 * len(layout)), layout="constrained")
    if plans and not drafted and not any(plan["num_draft"] for plan in plans):
        rate = plans[-1]["predicted_plain_tokens_per_second"]
        title += f"\nThe planner chose not to speculate: plain decoding at {rate:.1f} tokens/s, predicted"
    figure.suptitle(title)
    axes = figure.subplot_mosaic(layout)
    if plans:
        draw_plans(axes["sublayers"], axes["rates"], plans)
    if drafted:
        _draw_acceptance(axes["acceptance"], metrics)
    by_round = axes["rounds"]
    accepted, rounds = np.asarray(stats.accepted), np.asarray(stats.rounds)
    for b in range(len(rounds)):
        if not rounds[b]:
            continue
        tokens = accepted[b, : rounds[b]] + 1
        # the last round may have ended early
        tokens[-1] = int(stats.emitted[b]) - tokens[:-1].sum()
        number = np.arange(1, len(tokens) + 1)
        by_round.step(number, tokens, where="mid", linewidth=0.8, color="tab:gray")
        by_round.plot(number, np.cumsum(tokens) / number, color="tab:blue")
    by_round.set(xlabel="round", ylabel="tokens", ylim=(0, None))
    by_round.xaxis.set_major_locator(MaxNLocator(integer=True))
    by_round.legend(["tokens of a round", "running mean"])
    save_figure(figure, path)


def _draw_acceptance(axes: Any, metrics: Metrics) -> None:
    positions = [i for i, a in enumerate(metrics.acceptance_by_position) if a is not None]
    axes.bar([i + 1 for i in positions], [metrics.acceptance_by_position[i] for i in positions], color="tab:blue")
    axes.set(
        xlabel="draft position",
        ylabel="acceptance, given all before",
        ylim=(0, 1),
        xticks=range(1, len(metrics.acceptance_by_position) + 1),
    )
