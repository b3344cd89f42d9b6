"""What `jaxspec bench` and `jaxspec tune` share: models, prompts, records, tables and plots."""

import argparse
import importlib.util
import sys
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from convert.atomic import replace_file
from jaxspec.cli.device import default_dtype
from jaxspec.figures import save_figure

# dark enough for white figures
PLOT_COLORS = ("#1f77b4", "#c85200", "#2a8a2a", "#c22a2b", "#8459b3", "#8c564b", "#b8458f")
DTYPES = ("float32", "bfloat16", "float16")


class Sources(NamedTuple):
    """The loaded models; None with random weights, or where there is no draft model."""

    target: Any = None
    draft: Any = None


def add_measuring_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that both commands have."""
    add = parser.add_argument
    add(
        "--draft",
        metavar="MODEL",
        help="the draft model of methods that have one: a model, or in bench with --shape a known name",
    )
    add("--config", type=Path, metavar="FILE", help="what jaxspec calibrate dustin wrote")
    add("--text", type=Path, nargs="+", default=[], metavar="FILE", help="texts that prompts are cut from; default: "
        "the sources of Python's standard library")  # fmt: skip
    add("--new-tokens", type=int, default=128, help="tokens generated per row; default: 128")
    add("--dtype", choices=DTYPES, help="default: as stored; float32 on a CPU")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")


def check_tables() -> None:
    """Raises ValueError where no table could be printed in the end."""
    if importlib.util.find_spec("rich") is None:
        raise ValueError("this command needs rich: pip install rich")


def check_values(
    args: argparse.Namespace, specs: list[dict[str, Any]], batches: list[int], contexts: list[int]
) -> None:
    """Raises ValueError, before any model is loaded, for sizes and for options of methods that are out of range."""
    from jaxspec.method_specs import ANY_DRAFT_MODEL, build_method

    for flag, values, least in (
        ("--batch", batches, 1),
        ("--context", contexts, 2),
        ("--new-tokens", [args.new_tokens], 2),
    ):
        if min(values) < least:
            raise ValueError(f"{flag} must be at least {least}, got {min(values)}")
    for spec in specs:
        build_method(spec, ANY_DRAFT_MODEL, args.config)


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """What a record says about where it was made."""
    import jax
    import jaxlib

    import jaxspec
    from jaxspec.benchmarking.ceiling import copy_ceiling

    on_gpu = jax.default_backend() == "gpu"
    return {
        "command": " ".join(["jaxspec", *sys.argv[1:]]),
        "device": jax.devices()[0].device_kind,
        "versions": {"jaxspec": jaxspec.__version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__},
        "model": getattr(args, "model", None),
        "shape": getattr(args, "shape", None),
        "synthetic": getattr(args, "shape", None) is not None,
        # a CPU's caches hold small copies; its rate is no ceiling for anything then
        "ceiling_bytes_per_second": copy_ceiling() if on_gpu else None,
    }


def load_drafts(args: argparse.Namespace, specs: list[dict[str, Any]]) -> Sources:
    """Loads --model and --draft; with --shape nothing is loaded.

    Raises:
        ValueError: a method lacks its draft model, or the vocabularies differ.
    """
    from jaxspec.checkpoint import load
    from jaxspec.cli.methods import check_vocabularies
    from jaxspec.methods import find_methods

    methods = find_methods()
    drafted = [spec["method"] for spec in specs if methods[spec["method"]].needs_draft_params]
    if drafted and args.draft is None:
        raise ValueError(f"{drafted[0]} needs --draft MODEL")
    if getattr(args, "shape", None):
        from jaxspec.benchmarking.shapes import OFFERED, SHAPES

        if args.draft is not None and args.draft not in SHAPES:
            raise ValueError(f"--draft must be one of {', '.join(OFFERED)} with --shape, got {args.draft!r}")
        return Sources()
    dtype = default_dtype(args.dtype)
    target = load(args.model, dtype=dtype)
    if target.tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer, which the prompts need")
    draft = None
    if args.draft is not None:
        draft = load(args.draft, dtype=dtype)
        check_vocabularies(target, draft)
    return Sources(target, draft)


def open_runs(
    args: argparse.Namespace,
    specs: list[dict[str, Any]],
    sources: Sources,
    batch: int,
    context: int,
    layers: int | None = None,
) -> tuple[Any, list[Any]]:
    """The prefilled prompts of one batch and context, and the candidates.

    Args:
        args: the command's.
        specs: the methods, see `method_specs`.
        sources: what `load_drafts` returned.
        batch: rows.
        context: tokens of each prompt.
        layers: depth of a model with random weights.
    """
    import jax.numpy as jnp
    import numpy as np

    from jaxspec.benchmarking.runs import Candidate, Runs
    from jaxspec.benchmarking.shapes import SHAPES, check_memory, random_cache, random_params
    from jaxspec.benchmarking.texts import stretches, token_ids
    from jaxspec.method_specs import build_method, describe
    from jaxspec.methods import Models
    from jaxspec.models import Decoder

    if sources.target is None:
        dtype = jnp.dtype(args.dtype or "bfloat16")
        config = replace(SHAPES[args.shape], num_layers=layers or SHAPES[args.shape].num_layers)
        draft_config = SHAPES[args.draft] if args.draft else None
        check_memory(args.shape, config, batch, context + args.new_tokens + 64, dtype.itemsize)
        models = Models(Decoder(config), random_params(config, dtype))
        draft_model = Decoder(draft_config) if draft_config else None
        draft_params = random_params(draft_config, dtype) if draft_config else None
        rows = np.random.default_rng(0).integers(0, config.vocab_size, (batch, context)).tolist()
        cache = partial(random_cache, config, batch, dtype=dtype)
    else:
        models, cache = Models(sources.target.model, sources.target.params), None
        itemsize = models.params["embedding"].dtype.itemsize
        check_memory(args.model, models.target.config, batch, context + args.new_tokens + 64, itemsize)
        draft_model = sources.draft.model if sources.draft else None
        draft_params = sources.draft.params if sources.draft else None
        rows = stretches(token_ids(args.text, sources.target.tokenizer, context), context, batch)
    methods = [build_method(spec, draft_model, args.config) for spec in specs]
    for method in methods:
        method.check_model(models.target)
        method.check_batch(batch)
    if sources.target is None:
        # random weights say nothing about which sublayers can be spared
        methods = [m.fixed(config.num_layers) if m.segment_rounds else m for m in methods]
    runs = Runs(models, rows, args.new_tokens, max(method.max_draft for method in methods), cache)
    tell(f"{batch} x {context} tokens of context ready in {runs.prefill_seconds:.0f} s, compilation included")
    candidates = [
        Candidate(describe(spec), method, draft_params if method.needs_draft_params else None)
        for spec, method in zip(specs, methods, strict=True)
    ]
    return runs, candidates


def result_of(
    args: argparse.Namespace, runs: Any, candidate: Any, spec: dict[str, Any], context: int
) -> dict[str, Any]:
    """One line of the table, and more, as plain types."""
    from jaxspec.benchmarking.runs import expected_tokens
    from jaxspec.benchmarking.shapes import SHAPES, step_bytes

    timed, method = candidate.median(), candidate.method
    part, stats = timed.all_running, timed.stats
    # a round is shorter once rows have ended
    per_round = part.seconds / part.rounds if part else timed.seconds / timed.rounds
    result: dict[str, Any] = {
        "method": candidate.name,
        "spec": spec,
        "lossless": method.lossless,
        "batch": runs.batch,
        "context": context,
        "milliseconds_per_round": 1e3 * per_round,
        "spread": candidate.spread(),
        "runs": len(candidate.runs),
        "program_bytes": runs.program_bytes(candidate),
        "synthetic": getattr(args, "shape", None) is not None,
    }
    if result["synthetic"]:
        acceptance = args.acceptance or 0.0
        result["assumed_acceptance"] = acceptance if method.max_draft else None
        result["tokens_per_round"] = expected_tokens(acceptance, method.max_draft)
        result["tokens_per_second"] = runs.batch * result["tokens_per_round"] / per_round
        result["tokens_per_second_all_running"] = result["tokens_per_second"]
    else:
        # the prefill samples the first token
        result["tokens_per_second"] = runs.batch * (runs.new_tokens - 1) / timed.seconds
        result["tokens_per_second_all_running"] = part.tokens / part.seconds if part else None
        result["tokens_per_round"] = timed.metrics.tokens_per_round.token_weighted
        result["tokens_per_round_by_row"] = (stats.emitted / stats.rounds).tolist()
        result["metrics"] = timed.metrics.as_dict()
    if spec["method"] == "plain":
        config = runs.models.target.config
        itemsize = runs.models.params["embedding"].dtype.itemsize
        needed = step_bytes(config, runs.batch, context + runs.new_tokens // 2, itemsize)
        ceiling = getattr(args, "ceiling", None)
        result["step_bytes"] = needed
        if getattr(args, "shape", None):
            whole = SHAPES[args.shape]
            result["whole_step_bytes"] = step_bytes(whole, runs.batch, context + runs.new_tokens // 2, itemsize)
        result["share_of_bandwidth"] = needed / per_round / ceiling if ceiling else None
        result["ceiling_bytes_per_second"] = ceiling
    return result


def add_speedups(results: list[dict[str, Any]]) -> None:
    """Sets every result's speed-up over the first, plain decoding: until the last row has ended, and while all run."""
    for rate, speedup in (
        ("tokens_per_second", "speedup"),
        ("tokens_per_second_all_running", "speedup_all_running"),
    ):
        for result in results:
            result[speedup] = None if result[rate] is None else result[rate] / results[0][rate]


def print_table(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Prints one batch and context."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    first = results[0]
    title = f"{args.model or args.shape}, batch {first['batch']}, {first['context']} tokens of context"
    if first["synthetic"]:
        title += " - SYNTHETIC: random weights, acceptance assumed"
    if "extrapolated_from_layers" in first:
        shallow, deep = first["extrapolated_from_layers"]
        title += f", time extrapolated from {shallow} and {deep} layers"
    # a pipe has no width: a table cut to 80 columns would lose its figures
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(title, soft_wrap=True)
    table = Table(box=SIMPLE)
    figures = ("tokens/s", "x plain", "while all run", "spread", "tokens/round", "ms/round", "GiB")
    for column in ("method", *figures, "acceptance by position"):
        left = column not in figures
        table.add_column(column, justify="left" if left else "right", no_wrap=not left)
    for result in results:
        if result["synthetic"]:
            assumed = result["assumed_acceptance"]
            acceptance = "" if assumed is None else f"{assumed:.2f} (assumed)"
        else:
            positions = result["metrics"]["acceptance_by_position"]
            acceptance = " ".join("-" if a is None else f"{a:.2f}" for a in positions)
        table.add_row(
            result["method"] + ("" if result["lossless"] else " (lossy)"),
            f"{result['tokens_per_second']:.1f}",
            f"{result['speedup']:.2f}",
            "-" if result["speedup_all_running"] is None else f"{result['speedup_all_running']:.2f}",
            f"{result['spread']:.1%}",
            f"{result['tokens_per_round']:.2f}",
            f"{result['milliseconds_per_round']:.2f}",
            "-" if result["program_bytes"] is None else f"{result['program_bytes'] / 2**30:.2f}",
            acceptance,
        )
    console.print(table)
    for result in results:
        if "phases_milliseconds" in result:
            phases = "  ".join(f"{name} {value:.2f}" for name, value in result["phases_milliseconds"].items())
            console.print(f"  milliseconds of {result['method']}: {phases}")
    if first.get("share_of_bandwidth") is not None:
        console.print(f"  plain decoding reaches {first['share_of_bandwidth']:.0%} of a device copy's bandwidth")


def tell(line: str) -> None:
    """Says on standard error what was done; runs take minutes."""
    print(f"  {line}", file=sys.stderr, flush=True)


def write_record(path: Path | None, record: dict[str, Any]) -> None:
    """Writes the record, if it is wanted; an interrupted writer leaves what was there before."""
    if path is not None:
        import json

        replace_file(path, json.dumps(record, ensure_ascii=False, indent=1) + "\n")


def write_speed_plot(path: Path, record: dict[str, Any]) -> None:
    """Draws what `jaxspec bench` recorded: speed-ups over plain decoding, a block of bars per batch and context."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    cases: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for result in record["results"]:
        cases.setdefault((result["batch"], result["context"]), []).append(result)
    names = {r["method"]: _plot_name(r) for r in record["results"]}
    colors = {
        method: "tab:gray" if method == "plain" else PLOT_COLORS[i % len(PLOT_COLORS)]
        for i, method in enumerate(names, -1)
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
