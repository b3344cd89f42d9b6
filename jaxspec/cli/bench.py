"""`jaxspec bench`."""

import argparse
import itertools
from pathlib import Path
from typing import Any

from jaxspec.cli.device import keep_programs
from jaxspec.cli.measuring import (
    WORDS,
    add_measuring_flags,
    check_tables,
    check_values,
    environment,
    files_read,
    load_drafts,
    open_runs,
    tell,
)
from jaxspec.cli.report import check_outputs
from jaxspec.cli.results import add_speedups, print_table, result_of, write_record


def add_command(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    bench = commands.add_parser(
        "bench",
        help="measure methods on your own model, texts and device",
        description=(
            "Decodes the same prompts with every method in turn, several times, and prints tokens per second beside "
            "plain decoding and the share of memory bandwidth that plain decoding reaches."
        ),
        epilog="example: jaxspec bench --model checkpoints/smollm2 --methods plain vegas vegas:rho=0.1 --context 4096",
    )
    bench.set_defaults(run=_bench, words=WORDS)
    add = bench.add_argument
    source = bench.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="anything that jaxspec generate --model takes")
    source.add_argument("--shape", metavar="NAME", help="known sizes with random weights, such as qwen2.5-7b")
    default = ["plain", "streaming", "vegas"]
    text = f"what is measured, or files of jaxspec tune; plain decoding in any case; default: {' '.join(default)}"
    add("--methods", nargs="+", default=default, metavar="NAME[:OPTION=VALUE,...]", help=text)
    add("--batch", type=int, nargs="+", default=[1], help="default: 1")
    add("--context", type=int, nargs="+", default=[2048], help="tokens of each prompt; default: 2048")
    add("--repeats", type=int, default=3, help="measured runs of each method; default: 3")
    add("--phases", action="store_true", help="also the milliseconds of a round's phases")
    add("--acceptance", type=float, help="with --shape: the chance that a draft token is accepted")
    add("--layers", type=int, help="with --shape: measure this depth and twice it, and extrapolate to the whole model")
    add("--plot", type=Path, metavar="FILE", help="draw the speed-ups by method, batch and context")
    add_measuring_flags(bench)


def _bench(args: argparse.Namespace) -> int:
    check_tables()
    if args.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {args.repeats}")
    if args.model is not None and (args.acceptance is not None or args.layers is not None):
        raise ValueError("--acceptance and --layers belong to --shape: a real model has its own")
    from jaxspec.benchmarking.shapes import OFFERED, SHAPES
    from jaxspec.method_specs import files_of, parse_spec, read_tuned

    tuned = {text: read_tuned(text) for text in args.methods if text.endswith(".json") and "=" not in text}
    for name in ("draft", "config"):
        given = [getattr(args, name), *(record.get(name) for record in tuned.values())]
        wanted = sorted({str(path) for path in given if path is not None})
        if len(wanted) > 1:
            raise ValueError(f"--{name} must be one for all methods, got {', '.join(wanted)}")
        if wanted:
            setattr(args, name, Path(wanted[0]) if name == "config" else wanted[0])
    specs = [tuned[text]["chosen"] if text in tuned else parse_spec(text) for text in args.methods]
    named = [name for spec in specs for name in files_of(spec["options"])]
    check_outputs({"--json": args.json, "--plot": args.plot}, (*files_read(args), *named, *tuned))
    if args.shape is not None and args.shape not in SHAPES:
        raise ValueError(f"--shape must be one of {', '.join(OFFERED)}, got {args.shape!r}")
    if args.acceptance is not None and not 0 <= args.acceptance <= 1:
        raise ValueError(f"--acceptance must lie in 0..1, got {args.acceptance}")
    if args.shape is not None and args.acceptance is None and any(spec["method"] != "plain" for spec in specs):
        raise ValueError("--shape has random weights, which accept nothing: give --acceptance for what is drafted")
    whole = SHAPES[args.shape].num_layers if args.shape else 0
    if args.layers is not None and not 1 <= 2 * args.layers <= whole:
        raise ValueError(f"--layers must lie in 1..{whole // 2} for {args.shape}, got {args.layers}")
    if specs[0]["method"] != "plain":
        specs.insert(0, {"method": "plain", "options": {}})
    check_values(args, specs, args.batch, args.context)

    keep_programs()
    record = {"schema_version": 1, "kind": "bench", **environment(args), "results": []}
    args.ceiling = record["ceiling_bytes_per_second"]
    drafts = load_drafts(args, specs)
    for batch, context in itertools.product(args.batch, args.context):
        if args.layers is None:
            results = _measure(args, specs, drafts, batch, context, whole or None)
        else:
            shallow, deep = (_measure(args, specs, drafts, batch, context, n) for n in (args.layers, 2 * args.layers))
            results = [_extrapolated(a, b, args.layers, whole) for a, b in zip(shallow, deep, strict=True)]
        add_speedups(results)
        record["results"] += results
        print_table(results, args)
        write_record(args.json, record)
    if args.plot is not None:
        from jaxspec.cli.speed_plot import write_speed_plot

        write_speed_plot(args.plot, record)
    return 0


def _measure(
    args: argparse.Namespace, specs: list[dict], drafts: Any, batch: int, context: int, layers: int | None
) -> list[dict[str, Any]]:
    from jaxspec.benchmarking.runs import measure_interleaved

    runs, candidates = open_runs(args, specs, drafts, batch, context, layers)
    measure_interleaved(runs, candidates, args.repeats, tell)
    results = []
    for spec, candidate in zip(specs, candidates, strict=True):
        result = result_of(args, runs, candidate, spec, context)
        if args.phases:
            rounds = max((args.new_tokens - 1) // (2 * candidate.method.max_draft + 2), 2)
            result["phases_milliseconds"] = runs.phases(candidate, rounds)
        results.append(result)
    return results


def _extrapolated(shallow: dict[str, Any], deep: dict[str, Any], layers: int, whole: int) -> dict[str, Any]:
    """The whole depth's result, from straight lines through a round's time and memory at two depths."""

    def line(name: str) -> Any:
        return shallow[name] + (deep[name] - shallow[name]) / layers * (whole - layers)

    if deep["milliseconds_per_round"] <= shallow["milliseconds_per_round"]:
        raise ValueError(
            f"--layers {layers}: {2 * layers} layers of {deep['method']} were no slower than {layers}, so that nothing "
            "can be extrapolated; give more --layers, --repeats or --new-tokens"
        )
    milliseconds = line("milliseconds_per_round")
    faster = deep["milliseconds_per_round"] / milliseconds
    result = {**deep, "milliseconds_per_round": milliseconds, "extrapolated_from_layers": [layers, 2 * layers]}
    for rate in ("tokens_per_second", "tokens_per_second_all_running"):
        result[rate] = deep[rate] * faster
    if deep["program_bytes"] is not None:
        result["program_bytes"] = round(line("program_bytes"))
    if result.get("share_of_bandwidth") is not None:
        result["share_of_bandwidth"] = (
            deep["whole_step_bytes"] / (milliseconds / 1e3) / deep["ceiling_bytes_per_second"]
        )
    return result
