"""Tokens per round, acceptance by draft position and decoding speed of the methods, on real text.

    python benchmarks/acceptance.py MODEL --text novel.txt --text manual.txt:question --text code.py \
        --contexts 4096 16384 31000 --batches 1 8 32 --json acceptance.json               # on a GPU
    python benchmarks/acceptance.py --tiny --json acceptance.json                         # a quick run on a CPU

Acceptance: every text at every context length is a row of one ragged batch, so a method compiles once, and all methods
decode greedily from the same prefilled cache. Speed: full batches at the longest context, every row another stretch of
text. Rows whose tokens differ from plain decoding's are counted; in float32 there should be none but ties.
"""

import argparse
import dataclasses
from pathlib import Path

import jax
import numpy as np
from acceptance_prompts import repeated_share, rows_of_text, texts_from, tiny_checkpoint
from report import environment, save

import jaxspec
from jaxspec.benchmarking.runs import Candidate, Runs, measure_interleaved
from jaxspec.methods import Models, Plain, Quest, Streaming, Vegas
from jaxspec.metrics import measure


def main() -> None:
    """Measures what is asked for, prints tables and writes one JSON file, which grows with every result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="what jaxspec.load takes")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model, words at random, short contexts")
    parser.add_argument("--text", action="append", default=[], metavar="FILE[:KIND]", help="KIND: continue (default), "
                        "summary, question")  # fmt: skip
    parser.add_argument("--contexts", type=int, nargs="*", default=[4096, 16384, 31000])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32], help="for speed; none: acceptance only")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rho", type=float, default=0.07)
    parser.add_argument("--min-keep", type=int, default=256)
    parser.add_argument("--num-draft", type=int, default=6)
    parser.add_argument("--sweep", action="store_true", help="also rho 2, 5 and 10%%, and 4 and 8 drafts")
    parser.add_argument("--only", nargs="*", help="names of the methods to run, beside plain")
    parser.add_argument("--no-acceptance", action="store_true")
    parser.add_argument("--phases", action="store_true", help="also the milliseconds of a round's phases")
    parser.add_argument("--dtype", default=None, help="default: as stored; acceptance is exact in float32 only")
    parser.add_argument("--yarn", type=float, help="stretch the positions by this factor, beyond what is documented")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.tiny:
        loaded, texts = tiny_checkpoint()
        args.contexts, args.new_tokens = [c for c in args.contexts if c <= 512] or [100, 200], min(args.new_tokens, 32)
        args.batches, args.min_keep, args.num_draft = args.batches[:2], 16, min(args.num_draft, 3)
    else:
        if args.model is None or not args.text:
            parser.error("MODEL and at least one --text are needed, or --tiny")
        loaded = jaxspec.load(args.model, dtype=args.dtype)
        texts = texts_from(args.text, loaded.tokenizer)
    model = stretched(loaded.model, args.yarn) if args.yarn else loaded.model
    models = Models(model, loaded.params)
    results = {
        "schema_version": 1,
        **environment(),
        "dtype": str(models.params["embedding"].dtype),
        "beyond_documented_range": bool(args.yarn),
        "acceptance": [],
        "speed": [],
    }

    methods = chosen_methods(args)
    if not args.no_acceptance:
        for row in measure_acceptance(models, methods, texts, args):
            results["acceptance"].append(row)
            save(results, args.json)
    speed_methods = {n: m for n, m in methods.items() if n in ("plain", "streaming", "quest", "vegas")}
    for batch in args.batches:
        for row in measure_speed(models, speed_methods, texts, batch, args):
            results["speed"].append(row)
            save(results, args.json)


def chosen_methods(args: argparse.Namespace) -> dict:
    """The methods by name; plain comes first, since the others are compared with it."""
    shared = {"rho": args.rho, "min_keep": args.min_keep, "num_draft": args.num_draft}
    methods = {"streaming": Streaming(**shared), "quest": Quest(**shared), "vegas": Vegas(**shared)}
    for mode in ("weight", "logit"):
        for collect in ("two", "all", "last"):
            if (mode, collect) != ("weight", "two"):
                methods[f"vegas {mode}/{collect}"] = Vegas(score_mode=mode, collect=collect, **shared)
    if args.sweep:
        for rho in (0.02, 0.05, 0.10):
            methods[f"vegas rho {rho}"] = Vegas(**{**shared, "rho": rho})
        for g in (4, 8):
            methods[f"vegas {g} drafts"] = Vegas(**{**shared, "num_draft": g})
    if args.only is not None:
        unknown = set(args.only) - set(methods) - {"plain"}
        if unknown:
            raise SystemExit(f"--only: no such method {sorted(unknown)}; there are {list(methods)}")
        methods = {name: method for name, method in methods.items() if name in args.only}
    return {"plain": Plain(), **methods}


def measure_acceptance(models: Models, methods: dict, texts: dict, args: argparse.Namespace):
    """Yields a result per method and context."""
    labels = [(context, name) for context in args.contexts for name in texts]
    rows = [rows_of_text(texts[name], context, 1)[0] for context, name in labels]
    runs = Runs(models, rows, args.new_tokens, max(method.max_draft for method in methods.values()))
    expected = runs.run(Candidate("plain", methods["plain"])).tokens
    repeated = [repeated_share(tokens) for tokens in expected]
    for (context, name), share in zip(labels, repeated, strict=True):
        print(f"text {name:28} context {context:6}: {share:.0%} of the output's 4-grams are repetitions", flush=True)
    for method in [name for name in methods if name != "plain"]:
        timed = runs.run(Candidate(method, methods[method]))
        tokens, stats = timed.tokens, timed.stats
        for context in args.contexts:
            at = np.array([label[0] == context for label in labels])
            figures = measure(jax.tree.map(lambda x, at=at: x[at], stats))
            each = {
                name: measure(jax.tree.map(lambda x, i=i: x[i : i + 1], stats)).tokens_per_round.per_row
                for i, (c, name) in enumerate(labels)
                if c == context
            }
            different = [
                int(np.argmax(a != b)) for a, b in zip(tokens[at], expected[at], strict=True) if np.any(a != b)
            ]
            print(
                f"{method:20} context {context:6} {figures.tokens_per_round.per_row:5.2f} tokens per round, acceptance "
                + " ".join("  - " if a is None else f"{a:.3f}" for a in figures.acceptance_by_position)
                + (f"  {len(different)} rows part from plain, at {different}" if different else "  identical to plain"),
                flush=True,
            )
            yield {
                "method": method,
                "options": dataclasses.asdict(methods[method]),
                "context": context,
                "texts": int(at.sum()),
                **figures.as_dict(),
                "tokens_per_round_by_text": each,
                "repeated_4grams_by_text": {n: r for (c, n), r in zip(labels, repeated, strict=True) if c == context},
                "parts_from_plain_at": different,
            }


def measure_speed(models: Models, methods: dict, texts: dict, batch: int, args: argparse.Namespace):
    """Yields a result per method at one batch size and the longest context."""
    context = max(args.contexts)
    per_text = [rows_of_text(text, context, -(-batch // len(texts))) for text in texts.values()]
    rows = [row for group in zip(*per_text, strict=True) for row in group][:batch]
    runs = Runs(models, rows, args.new_tokens, max(method.max_draft for method in methods.values()))
    candidates = {name: Candidate(name, method) for name, method in methods.items()}
    measure_interleaved(runs, list(candidates.values()), 3, lambda line: print(f"  {line}", flush=True))
    plain = plain_all = None
    for name, candidate in candidates.items():
        seconds = candidate.median().seconds
        figures = candidate.median().metrics
        rate = batch * (args.new_tokens - 1) / seconds
        plain = rate if name == "plain" else plain
        # none of these methods runs in segments
        part = candidate.median().all_running
        rate_all = part.tokens / part.seconds
        plain_all = rate_all if name == "plain" else plain_all
        per_round = 1e3 * part.seconds / part.rounds
        result = {
            "method": name,
            "options": dataclasses.asdict(methods[name]),
            "batch": batch,
            "context": context,
            "tokens_per_second": rate,
            "speedup": rate / plain,
            "tokens_per_second_all_running": rate_all,
            "speedup_all_running": rate_all / plain_all,
            "milliseconds_per_round": per_round,
            "prefill_seconds_with_compile": runs.prefill_seconds,
            **figures.as_dict(),
        }
        print(
            f"{name:10} B={batch:<3} context {context:6} {rate:9.1f} tokens/s  {rate / plain:5.2f} x plain, "
            f"{rate_all / plain_all:5.2f} x while all run  "
            f"{figures.tokens_per_round.token_weighted:.2f} tokens per round of {per_round:.2f} ms",
            flush=True,
        )
        if args.phases:
            # a round emits at most num_draft + 1 tokens, so rows stay active through all of these
            result["phases"] = runs.phases(candidate, max((args.new_tokens - 1) // (2 * args.num_draft + 2), 2))
            print("   " + "  ".join(f"{k} {v:.2f}" for k, v in result["phases"].items()), flush=True)
        yield result


def stretched(model, factor: float):
    """The model with YaRN positions."""
    c = model.config
    rope = dataclasses.replace(c.rope, rope_type="yarn", factor=factor, original_max_positions=c.max_positions)
    config = dataclasses.replace(c, rope=rope, max_positions=int(c.max_positions * factor))
    return dataclasses.replace(model, config=config)


if __name__ == "__main__":
    main()
