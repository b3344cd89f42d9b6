"""`jaxspec tune`."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

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

BUDGETS = (256, 512, 1024)
# of the prompts, and rounds in each, from which rows by layer are calibrated
ROWS, ROUNDS = 4, 16
# prompts of fewer tokens have too few for that
SHORTEST = 64
# sublayers that fixed plans skip, and tokens that they are judged on
SKIPPED = (1, 2, 3, 4, 6, 8, 12)
REFERENCE_TOKENS = 256


def add_command(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    tune = commands.add_parser(
        "tune",
        help="choose the fastest method and its options for a model, a context length and a batch",
        description=(
            "Measures methods on the device, best options first found by short runs, and writes the fastest, which is "
            "plain decoding where nothing beats it. Only lossless methods are tried, unless --allow-lossy is given."
        ),
        epilog="example: jaxspec tune --model checkpoints/smollm2 --context 4096 --out tuned.json",
    )
    tune.set_defaults(run=_tune, words=WORDS)
    add = tune.add_argument
    add("--model", required=True, help="anything that jaxspec generate --model takes")
    add("--context", type=int, default=2048, help="tokens of each prompt; default: 2048")
    add("--batch", type=int, default=1, help="default: 1")
    add("--out", type=Path, required=True, metavar="FILE", help="what jaxspec generate --tuned takes")
    add("--only", nargs="+", choices=("vegas", "knapspec", "draft-model", "dustin"), help="default: all that apply")
    add("--allow-lossy", action="store_true", help="also try dustin, whose output is not the model's own")
    add("--repeats", type=int, default=3, help="measured runs of the finalists, 2 or more; default: 3")
    add_measuring_flags(tune)


def _tune(args: argparse.Namespace) -> int:
    check_tables()
    check_outputs({"--json": args.json, "--out": args.out}, files_read(args))
    # the winner's lead is held against the spread of its runs, and one run has none
    if args.repeats < 2:
        raise ValueError(f"--repeats must be at least 2, got {args.repeats}")
    wanted = set(args.only or ("vegas", "knapspec", "draft-model", "dustin"))
    if args.only and "dustin" in wanted and not args.allow_lossy:
        raise ValueError("--only dustin needs --allow-lossy: its output is not the model's own")
    for name in ("draft-model", "dustin"):
        if name in wanted and (args.draft is None or (name == "dustin" and not args.allow_lossy)):
            if args.only and args.draft is None:
                raise ValueError(f"--only {name} needs --draft MODEL")
            wanted.discard(name)
    specs = [{"method": name, "options": {}} for name in wanted]
    check_values(args, specs, [args.batch], [args.context])

    from jaxspec.benchmarking.runs import measure_interleaved
    from jaxspec.benchmarking.search import DRAFTS, PLAIN, Measured, Search
    from jaxspec.calibration.layer_shares import overlaps, shares_of
    from jaxspec.method_specs import TUNED, build_method, describe

    keep_programs()
    record = {"schema_version": 1, "kind": TUNED, **environment(args), "context": args.context, "batch": args.batch}
    args.ceiling = record["ceiling_bytes_per_second"]
    sources = load_drafts(args, specs)
    runs, _ = open_runs(args, [PLAIN, _longest()], sources, args.batch, args.context)

    def measure(spec: dict[str, Any]) -> Measured:
        candidate = _candidate(args, sources, spec)
        runs.run(candidate)  # the first run compiles, and may still load code
        timed = runs.run(candidate)
        rate = runs.batch * (runs.new_tokens - 1) / timed.seconds
        print(f"  {describe(spec):60} {rate:9.1f} tokens/s", flush=True)
        return Measured(spec, rate, timed.metrics.tokens_per_round.token_weighted)

    config = runs.models.target.config

    def layer_shares(spec: dict[str, Any]) -> tuple[float, ...]:
        method = build_method(spec)
        rounds = min(ROUNDS, args.context // (2 * (method.num_draft + 1)) - 1)
        prompts = np.asarray(runs.request.prompt)[:ROWS, : args.context]
        return shares_of(np.mean(list(overlaps(runs.models, prompts, method, rounds)), axis=0))

    def plans(spec: dict[str, Any]) -> list[dict[str, Any]]:
        # more tokens than plans are judged on while decoding, where they cost time
        found = runs.plan(build_method(spec), REFERENCE_TOKENS)
        # of masks that skip as many sublayers, the likeliest to be accepted
        cells = sorted(found.frontier, key=lambda cell: cell.alpha)
        by_skipped = {2 * config.num_layers - sum((*cell.plan.attn, *cell.plan.mlp)): cell.plan for cell in cells}
        masks = [by_skipped[n] for n in SKIPPED if n in by_skipped]
        return [{"attn": list(mask.attn), "mlp": list(mask.mlp)} for mask in masks]

    # prompts that are calibrated on need room for a round's drafts
    fits = SHORTEST <= args.context <= config.capacity_limit - max(DRAFTS) - 1
    search = Search(
        measure,
        partial(print, flush=True),
        args.context + args.new_tokens,
        config.group_size,
        layer_shares if fits else None,
        plans,
    )
    finalists = [search.best_of([PLAIN])]
    if "vegas" in wanted:
        finalists.append(search.vegas())
    if "knapspec" in wanted:
        rows = finalists[-1].spec if "vegas" in wanted else {"method": "vegas", "options": {}}
        finalists.append(search.knapspec(rows))
    if "draft-model" in wanted:
        finalists.append(search.draft_model())
    if "dustin" in wanted:
        fitting = [budget for budget in BUDGETS if budget < args.context] or [BUDGETS[0]]
        finalists.append(search.dustin(fitting))

    plain = finalists[0].spec
    fastest = sorted(finalists[1:], key=lambda measured: -measured.tokens_per_second)[:2]
    specs = [plain, *(measured.spec for measured in fastest)]
    candidates = [_candidate(args, sources, spec) for spec in specs]
    print(f"measuring the finalists in turns, {args.repeats} times")
    measure_interleaved(runs, candidates, args.repeats, tell)
    results = [
        result_of(args, runs, candidate, spec, args.context) for candidate, spec in zip(candidates, specs, strict=True)
    ]
    add_speedups(results)
    print_table(results, args)
    best = max(results, key=lambda result: result["tokens_per_second"])
    # a lead within the noise is none, and plain decoding is the simpler program
    if best["speedup"] <= 1 + max(best["spread"], results[0]["spread"]):
        best = results[0]
    if best is results[0]:
        why = "nothing was faster than plain decoding by more than the measurements' spread"
    else:
        why = f"{best['speedup']:.2f} times plain decoding, the most of {len(search.seen)} settings"
    print(f"chosen: {best['method']} - {why}")
    record |= {
        "chosen": best["spec"],
        "why": why,
        "lossless": best["lossless"],
        "draft": args.draft if candidates[results.index(best)].method.needs_draft_params else None,
        "config": str(args.config) if args.config is not None and best["spec"]["method"] == "dustin" else None,
        "results": results,
        "tried": [vars(measured) for measured in search.seen],
    }
    write_record(args.out, record)
    write_record(args.json, record)
    return 0


def _longest() -> dict[str, Any]:
    """A method with as many drafts as any that is tried: the cache is sized for it."""
    from jaxspec.benchmarking.search import DRAFTS

    return {"method": "vegas", "options": {"num_draft": max(DRAFTS)}}


def _candidate(args: argparse.Namespace, sources: Any, spec: dict[str, Any]) -> Any:
    from jaxspec.benchmarking.runs import Candidate
    from jaxspec.method_specs import build_method, describe

    draft_model, draft_params = (sources.draft.model, sources.draft.params) if sources.draft else (None, None)
    method = build_method(spec, draft_model, args.config)
    return Candidate(describe(spec), method, draft_params if method.needs_draft_params else None)
