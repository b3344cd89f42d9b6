"""The picture of what `jaxspec bench` recorded."""

import textwrap
from pathlib import Path
from typing import Any

from jaxspec.figures import save_figure

# dark enough for white figures
COLORS = ("#1f77b4", "#c85200", "#2a8a2a", "#c22a2b", "#8459b3", "#8c564b", "#b8458f")


def write_speed_plot(path: Path, record: dict[str, Any]) -> None:
    """Draws what `jaxspec bench` recorded: speed-ups over plain decoding, a block of bars per batch and context."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    cases: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for result in record["results"]:
        cases.setdefault((result["batch"], result["context"]), []).append(result)
    names = {r["method"]: _plot_name(r) for r in record["results"]}
    colors = {
        method: "tab:gray" if method == "plain" else COLORS[i % len(COLORS)] for i, method in enumerate(names, -1)
    }
    lines = max(name.count("\n") + 1 for name in names.values())
    rows = [len(results) for results in cases.values()]
    height = 1.3 + sum(0.45 + count * (0.16 + 0.14 * lines) for count in rows)
    figure = Figure(figsize=(7.5, height), dpi=150, layout="constrained")
    blocks = figure.subplots(len(cases), sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    limit = 1.12 * max(max(_speedups(result), default=0) for result in record["results"])
    for axes, ((batch, context), results) in zip(blocks, cases.items(), strict=True):
        for y, result in enumerate(results):
            _draw_speedups(axes, y, result, colors[result["method"]], limit)
        axes.axvline(1, color="black", linewidth=0.8, zorder=0)
        axes.set_title(f"batch {batch}, {context:,} tokens of context", fontsize=9, loc="left")
        axes.set_yticks(range(len(results)), [names[result["method"]] for result in results], fontsize=8)
        axes.set(xlim=(0, limit), ylim=(len(results) - 0.4, -0.6))
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
    blocks[-1].set_xlabel("tokens per second / plain decoding's", fontsize=9)
    title = f"{record['model'] or record['shape'] + ' (synthetic)'}, {record['device']}"
    figure.suptitle(textwrap.fill(title, 80), fontsize=10)
    filled = Patch(color="tab:gray", label="until the last row has ended")
    outlined = Patch(facecolor="none", edgecolor="tab:gray", linewidth=1.2, label="while all rows run")
    figure.legend(handles=[filled, outlined], loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    save_figure(figure, path)


def _speedups(result: dict[str, Any]) -> list[float]:
    """Of the whole run and, in records that have it, while all rows run; what is unknown is left out."""
    return [x for x in (result["speedup"], result.get("speedup_all_running")) if x is not None]


def _plot_name(result: dict[str, Any]) -> str:
    name = result["method"] + ("" if result.get("lossless", True) else " (lossy)")
    # options break after a comma only
    return textwrap.fill(name.replace(",", ", "), 38, break_long_words=False).replace(", ", ",")


def _draw_speedups(axes: Any, y: int, result: dict[str, Any], color: str, limit: float) -> None:
    whole, running = result["speedup"], result.get("speedup_all_running")
    if running is not None:
        axes.barh(y, running, 0.66, facecolor="none", edgecolor=color, linewidth=1.2)
    if whole is not None:
        axes.barh(y, whole, 0.66, color=color, edgecolor=color, linewidth=1.2)
    shown = [f"{x:.2f}" for x in _speedups(result)]
    text = {"va": "center", "fontsize": 8, "textcoords": "offset points"}
    # the first figure stands in its bar where that has room and does not hide the other's end
    if len(set(shown)) == 2 and 0.1 * limit < whole < running:
        axes.annotate(shown.pop(0), (whole, y), (-4, 0), ha="right", color="white", **text)
    end, over_the_line = max(_speedups(result), default=0), {"facecolor": "white", "linewidth": 0, "pad": 1}
    axes.annotate(" / ".join(dict.fromkeys(shown)), (end, y), (5, 0), ha="left", bbox=over_the_line, **text)
