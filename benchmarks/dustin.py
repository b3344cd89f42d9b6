"""Dustin on a GPU: calibration, attention recall, quality and speed on a real pair, and speed at 7B sizes.

    python benchmarks/dustin.py --target TARGET --draft DRAFT --calibrate-text a.txt b.txt \
        --text novel.txt --text manual.txt:question --text code.py --folder results      # everything
    python benchmarks/dustin.py --parts synthetic --folder results                       # no checkpoints needed
    python benchmarks/dustin.py --tiny --folder results                                  # a quick run on a CPU

Parts, in this order: `calibrate` (retrieval heads of both models, configuration), `arr` (attention recall by layer
and budget), `quality` (tokens per round, agreement with the full model, needles), `speed` (tokens per second by batch,
phases), `synthetic` (Qwen2.5-7B + 0.5B sizes, random weights). A part that fails is recorded and the others go on; the
JSON file is written after every result. Everything but plain decoding and `draft-model` is lossy.
"""

import argparse
import time
import traceback
from pathlib import Path

import jax
from report import OutOfTime, Report, reason_of

from jaxspec.benchmarking.ceiling import copy_ceiling

PARTS = ("calibrate", "arr", "quality", "speed", "synthetic")


class DustinReport(Report):
    """What does not start in time is a failure too, and the others are still named."""

    def attempt(self, label: str, function, *arguments):
        try:
            return super().attempt(label, function, *arguments)
        except OutOfTime:
            print(f"  {label}: skipped, out of time", flush=True)
            return self.failed(f"{label}: skipped, out of time")

    def failure(self, label: str, arguments: tuple, error: BaseException) -> str:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{label}: {reason_of(error, 600)} ({where.name}, line {where.lineno})"

    def save(self) -> None:
        self.results["seconds"] = time.time() - self.results["started"]
        super().save()


def main() -> None:
    """Runs the parts."""
    args = arguments()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", args.compilation_cache)
    started = time.time()
    path = args.folder / f"dustin_{args.name or '_'.join(args.parts)}.json"
    report = DustinReport(path, args.limit, started=started, lossy="all methods but plain and draft-model")
    ceiling = copy_ceiling(1 << (31 if jax.default_backend() == "gpu" else 22))
    report.results["ceiling_bytes_per_second"] = ceiling
    print(f"copy ceiling {ceiling / 1e12:.2f} TB/s", flush=True)
    real = [part for part in args.parts if part != "synthetic"]
    if real:
        from dustin_quality import Study

        study = report.attempt("loading", lambda: Study(args, report))
        for part in real if study else ():
            print(f"{part} ({time.time() - started:.0f} s)", flush=True)
            report.attempt(part, getattr(study, part))
        del study
    if "synthetic" in args.parts:
        from dustin_synthetic import synthetic

        print(f"synthetic ({time.time() - started:.0f} s)", flush=True)
        report.attempt("synthetic", lambda: synthetic(args, report))
    report.save()
    print(f"{time.time() - started:.0f} s, {len(report.results['failures'])} failures", flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--tiny", action="store_true", help="tiny random models and short contexts")
    add("--target", help="what jaxspec.load takes")
    add("--draft", help="what jaxspec.load takes")
    add("--dtype", default="bfloat16")
    add(
        "--text", action="append", default=[], metavar="FILE[:KIND]", help="measured; KIND: continue, summary, question"
    )
    add("--calibrate-text", nargs="+", default=[], metavar="FILE", help="calibrated on; others than --text")
    add("--config", type=Path, help="a configuration of before, in place of the part calibrate")
    add("--contexts", type=int, nargs="+", default=[4096, 16384, 31000])
    add("--budgets", type=int, nargs="+", default=[512, 128, 256, 1024], help="of ARR; layers are chosen for the first")
    add("--budget", type=int, default=512, help="of quality and speed")
    add("--num-draft", type=int, default=4)
    add("--new-tokens", type=int, default=128)
    add("--rounds", type=int, default=4, help="rounds per prompt of the traces")
    add("--needle-length", type=int, default=8192, help="of the scan for retrieval heads")
    add("--needle-contexts", type=int, nargs="+", default=[16384, 31000], help="of needle accuracy, ten depths each")
    add("--batches", type=int, nargs="+", default=[16, 8, 32], help="of speed")
    add("--phase-batches", type=int, nargs="*", default=[16], help="batches whose phases are timed as well")
    add("--synthetic-batches", type=int, nargs="+", default=[16, 8])
    add("--synthetic-contexts", type=int, nargs="+", default=[32768, 16384, 8192])
    add("--only", nargs="*", help="names of the methods of quality and speed, beside plain")
    add("--limit", type=float, default=1500, help="seconds after which nothing new is started")
    add("--compilation-cache", help="folder of JAX's persistent compilation cache")
    add("--name", help="of the JSON file; default: the parts")
    add("--folder", type=Path, required=True, help="where results and the configuration go")
    args = parser.parse_args()
    if args.tiny:
        args.contexts, args.budgets, args.budget, args.num_draft = [100, 200], [32, 48], 32, 2
        args.new_tokens, args.rounds, args.needle_length, args.needle_contexts = 24, 2, 260, [260]
        args.batches, args.phase_batches = args.batches[:1] and [2], [2]
        args.synthetic_batches, args.synthetic_contexts = [2], [256, 128]
    elif set(args.parts) - {"synthetic"} and not (args.target and args.draft and args.text):
        parser.error("--target, --draft and --text are needed, or --tiny, or --parts synthetic")
    return args


if __name__ == "__main__":
    main()
