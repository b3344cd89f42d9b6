"""`jaxspec profile`: what decoding steps cost on this device, for the planner of KnapSpec."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.cli.device import default_dtype, keep_programs
from jaxspec.cli.report import check_outputs
from jaxspec.figures import save_figure

if TYPE_CHECKING:
    from jaxspec.planning.measure import Measurement

CONTEXTS = (1024, 4096, 16384, 32768)


def add_command(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "profile",
        help="measure latencies for KnapSpec",
        description="Measures attention over context lengths, MLP, output head, verification and whole steps on this "
        "device, fits t_attention(n) = c2 n + c3, and prints a table.",
        epilog="example: jaxspec profile --model checkpoints/qwen --out profile.json, and then jaxspec generate "
        "--model checkpoints/qwen --method knapspec --profile profile.json",
    )
    parser.set_defaults(run=_profile)
    add = parser.add_argument
    add("--model", required=True, help="converted checkpoint, Hugging Face directory, hub id or GGUF file")
    add("--batch", type=int, default=1, help="sequences decoded together (default: 1)")
    add(
        "--contexts",
        type=int,
        nargs="+",
        metavar="N",
        help="two or more context lengths; default: 1024 to 32768, as they fit",
    )
    add("--max-draft", type=int, default=10, help="drafts of the measured verification (default: 10)")
    add("--selection", help="also measure drafts over selected rows: vegas, streaming or quest, or NAME:rho=0.05")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as stored; float32 on a CPU")
    add("--repeats", type=int, default=5, help="timings per median (default: 5)")
    add("--out", type=Path, metavar="FILE", help="write the profile as JSON")
    add("--plot", type=Path, metavar="FILE", help="draw measured times and the fit over context lengths")
    add("--json", action="store_true", help="print one JSON object instead of a table")


def _profile(args: argparse.Namespace) -> int:
    import jaxspec
    from jaxspec.method_specs import files_of
    from jaxspec.methods import Models
    from jaxspec.methods.knapspec import read_selection
    from jaxspec.planning.latency import poor_fit, profile_record, save_profile
    from jaxspec.planning.measure import describe, measure

    check_outputs({"--out": args.out, "--plot": args.plot}, (args.model, *files_of(vars(args))))
    for flag, value, low, high in (
        ("--batch", args.batch, 1, 1024),
        ("--max-draft", args.max_draft, 1, 32),
        ("--repeats", args.repeats, 1, 1000),
    ):
        if not low <= value <= high:
            raise ValueError(f"{flag} must lie in {low}..{high}, got {value}")
    if args.contexts is not None and len(set(args.contexts)) < 2:
        given = " ".join(map(str, args.contexts))
        raise ValueError(f"--contexts must be at least two different lengths, for a slope, got {given}")
    selection = args.selection and replace(read_selection(args.selection), num_draft=args.max_draft)
    keep_programs()
    dtype = default_dtype(args.dtype)
    loaded = jaxspec.load(args.model, dtype=dtype)
    models, most = Models(loaded.model, loaded.params), loaded.model.config.capacity_limit - args.max_draft - 1
    contexts = args.contexts or [n for n in CONTEXTS if n <= most]
    if len(contexts) < 2:
        contexts = [max(most // 2, 1), most]
    measured = measure(
        models,
        args.batch,
        contexts,
        max_draft=args.max_draft,
        selection=selection,
        whole_verify=True,
        repeats=args.repeats,
        progress=lambda text: print(f"jaxspec: {text}", file=sys.stderr, flush=True),
    )
    details = {"model_path": args.model, "batch": args.batch, **describe(models, measured)}
    details |= {"selection": args.selection}
    if args.json:
        print(json.dumps(profile_record(measured.profile, details)))
    else:
        print(table(measured))
    if poor := poor_fit(measured.fit_error, measured.plain_error):
        print(f"jaxspec: warning: {poor}", file=sys.stderr)
    if args.out is not None:
        save_profile(args.out, measured.profile, details)
    if args.plot is not None:
        write_plot(args.plot, f"{args.model}, batch {args.batch}, {details['device']}", measured)
    return 0


def table(measured: "Measurement") -> str:
    """The measured times beside the fitted ones, in microseconds; the last lines are the fit."""
    profile = measured.profile
    costs, rows = profile.costs(), profile.rows
    lines = [f"{'context':>8}  {'attention':>18}  {f'with {rows} rows':>18}  {'plain step':>18}  {'verification':>18}"]

    def pair(seconds: float | None, fitted: float) -> str:
        return f"{'-' if seconds is None else f'{1e6 * seconds:.1f}':>8} ({1e6 * fitted:.1f})".rjust(18)

    for i, n in enumerate(measured.contexts):
        cells = [
            pair(measured.attention[i], profile.attention.at(n)),
            pair(measured.verify_attention[i], profile.verify_attention.at(n)),
            pair(measured.plain[i], costs.plain_step(n)),
            pair(measured.verify and measured.verify[i], costs.verify(rows - 1, n)),
        ]
        lines.append(f"{n:>8}  " + "  ".join(cells))
    lines += [
        "microseconds, measured (by the model); attention is one layer's",
        "",
        f"t_attention(n) = {1e9 * profile.attention.slope:.3f} ns * n + {1e6 * profile.attention.intercept:.1f} us, "
        f"largest error {measured.fit_error:.1%}",
        f"t_mlp          = {1e6 * profile.mlp:.1f} us",
        f"t_head         = {1e6 * profile.head:.1f} us (embedding, norm, output head, choice)",
        f"per round      = {1e6 * profile.overhead:.1f} us besides",
    ]
    if profile.selected is not None and profile.scoring is not None:
        last = measured.contexts[-1]
        lines.append(
            f"over selected rows at {last}: attention {1e6 * profile.selected.at(last):.1f} us, scoring and selecting "
            f"{1e6 * profile.scoring.at(last):.1f} us a layer and round"
        )
    lines.append(f"plain steps are predicted within {measured.plain_error:.1%}")
    return "\n".join(lines)


def write_plot(path: Path, title: str, measured: "Measurement") -> None:
    """Draws the sublayers' times and whole steps over context lengths, measured as dots and fitted as lines."""
    import numpy as np
    from matplotlib.figure import Figure

    profile, n = measured.profile, np.linspace(0, max(measured.contexts), 50)
    costs = profile.costs()
    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    curves = [
        (left, "attention", measured.attention, profile.attention.at),
        (left, f"attention, {profile.rows} rows", measured.verify_attention, profile.verify_attention.at),
        (left, "attention over selected rows", measured.selected, profile.selected and profile.selected.at),
        (right, "plain step", measured.plain, costs.plain_step),
        (right, f"verification, {profile.rows} rows", measured.verify, lambda n: costs.verify(profile.rows - 1, n)),
    ]
    for axes, label, seconds, fitted in curves:
        if seconds is not None:
            (line,) = axes.plot(n, 1e3 * fitted(n), label=label)
            axes.plot(measured.contexts, 1e3 * np.array(seconds), "o", color=line.get_color())
    left.axhline(1e3 * profile.mlp, color="tab:gray", label="MLP")
    for axes, name in ((left, "one layer"), (right, "whole model")):
        axes.set(xlabel="context length", ylabel=f"milliseconds, {name}", ylim=(0, None))
        axes.legend()
    save_figure(figure, path)
