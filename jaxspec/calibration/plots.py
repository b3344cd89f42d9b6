"""Plots of calibration; they need matplotlib, the extra `plot`."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.figures import save_figure


def plot_heads(path: Path, record: dict[str, Any]) -> None:
    """A heat map of the heads' scores; the suffix chooses the format."""
    from matplotlib.figure import Figure

    scores = np.array(record["scores"])
    figure = Figure(figsize=(2 + 0.25 * scores.shape[1], 2 + 0.2 * scores.shape[0]), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(scores, aspect="auto", cmap="viridis", vmin=0)
    axes.set(xlabel="head", ylabel="layer", title=f"retrieval heads of {Path(record['model']['name']).name}")
    figure.colorbar(image, label="mean attention on the needle per answered token")
    save_figure(figure, path)


def plot_arr(path: Path, record: dict[str, Any]) -> None:
    """ARR by layer at the first budget, and by budget, for every signal; the suffix chooses the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    target, draft = (Path(record[role]["name"]).name for role in ("target", "draft"))
    figure.suptitle(f"attention recall, {target} with {draft}")
    left, right = figure.subplots(1, 2, sharey=True)
    table = {int(rows): by_signal for rows, by_signal in record["arr"].items()}
    for signal, by_layer in table[record["budget"]].items():
        left.plot(range(len(by_layer)), by_layer, marker=".", label=signal)
    left.set(xlabel="layer", ylabel="ARR", ylim=(0, 1), title=f"{record['budget']} rows")
    left.legend()
    rows = sorted(table)
    for signal in table[record["budget"]]:
        right.plot(rows, [np.mean(table[n][signal]) for n in rows], marker="o", label=signal)
    right.set(xlabel="rows", xscale="log", title="mean over layers")
    right.set_xticks(rows, [str(n) for n in rows])
    right.minorticks_off()
    save_figure(figure, path)


def plot_rows(path: Path, record: dict[str, Any]) -> None:
    """What is lost when one layer reads few rows, and the share that each is given; the suffix chooses the format."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    model, least, equal = Path(record["model"]["name"]).name, record["least_share"], record["overlap_of_equal_rows"]
    figure.suptitle(f"{model}: one layer at {least:g} of the budget; overlap {equal:.3f} with equal rows")
    layers = range(len(record["shares"]))
    upper.bar(layers, equal - np.array(record["overlap"]))
    upper.set(ylabel="overlap lost")
    lower.bar(layers, record["shares"])
    lower.axhline(1, color="black", linewidth=0.8)
    lower.set(xlabel="layer", ylabel="multiples of the budget")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    save_figure(figure, path)
