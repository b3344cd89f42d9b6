"""What `jaxspec bench` and `jaxspec tune` make of measured runs: results, tables and record files."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from convert.atomic import replace_file


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
    from rich.markup import escape
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
            # names hold brackets, which are no markup
            escape(result["method"] + ("" if result["lossless"] else " (lossy)")),
            f"{result['tokens_per_second']:.1f}",
            f"{result['speedup']:.2f}",
            "-" if result["speedup_all_running"] is None else f"{result['speedup_all_running']:.2f}",
            f"{result['spread']:.1%}" if result["runs"] > 1 else "-",
            f"{result['tokens_per_round']:.2f}",
            f"{result['milliseconds_per_round']:.2f}",
            "-" if result["program_bytes"] is None else f"{result['program_bytes'] / 2**30:.2f}",
            acceptance,
        )
    console.print(table)
    for result in results:
        if "phases_milliseconds" in result:
            phases = "  ".join(f"{name} {value:.2f}" for name, value in result["phases_milliseconds"].items())
            console.print(f"  milliseconds of {result['method']}: {phases}", markup=False)
    if first.get("share_of_bandwidth") is not None:
        console.print(f"  plain decoding reaches {first['share_of_bandwidth']:.0%} of a device copy's bandwidth")


def write_record(path: Path | None, record: dict[str, Any]) -> None:
    """Writes the record, if it is wanted; an interrupted writer leaves what was there before."""
    if path is not None:
        replace_file(path, json.dumps(record, ensure_ascii=False, indent=1) + "\n")
