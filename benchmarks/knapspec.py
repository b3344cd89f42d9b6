"""KnapSpec: speed on real text, alone and with Vegas, beside its rivals; latency model and planner at real shapes.

    python benchmarks/knapspec.py MODEL --text novel.txt --text manual.txt:question --json knapspec.json   # on a GPU
    python benchmarks/knapspec.py --tiny --json knapspec.json                                               # on a CPU

Parts (--parts): `table` plain, KnapSpec, Vegas and both end to end; `rivals` random masks, middle blocks, CLaSp and a
random search with the planner's time, at the planner's cost; `correlation` predicted against measured tokens/s over
many plans; `share` of skipped attention by context length; `shapes` latency fit, phases and planner cost at the sizes
of a 7B model with random weights. A part that fails is recorded and the rest goes on; the JSON file grows with every
result. All speeds are of decoding, compile and prefill left out, planning counted where it is part of the run.
"""

import argparse
from pathlib import Path

import jax
from acceptance_prompts import texts_from, tiny_checkpoint
from knapspec_plans import correlation, rivals, share
from knapspec_setting import forget_settings
from knapspec_shapes import shapes
from knapspec_table import table
from report import OutOfTime, Report

import jaxspec
from jaxspec.methods import Models
from jaxspec.models import Decoder, ModelConfig, RopeConfig, init_params

PARTS = {"table": table, "rivals": rivals, "correlation": correlation, "share": share, "shapes": shapes}


class KnapSpecReport(Report):
    """Prints results as they come."""

    def add(self, part: str, result: dict) -> None:
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items() if not _is_long(v)}
        print(f"{part:12}", "  ".join(f"{k} {v}" for k, v in shown.items()), flush=True)
        super().add(part, result)


def _is_long(value) -> bool:
    return isinstance(value, list | tuple | dict) and (len(value) > 3 or any(isinstance(x, dict) for x in value))


def main() -> None:
    """Runs the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="what jaxspec.load takes")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model, words at random, short contexts")
    parser.add_argument("--text", action="append", default=[], metavar="FILE[:KIND]", help="see acceptance.py")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--contexts", type=int, nargs="*", default=[4096, 16384, 31000])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--rho", type=float, default=0.07)
    parser.add_argument("--min-keep", type=int, default=256)
    parser.add_argument("--num-draft", type=int, default=6, help="of Vegas alone")
    parser.add_argument("--max-draft", type=int, default=10)
    parser.add_argument("--plans", type=int, default=24, help="of the correlation")
    parser.add_argument("--shape", default="qwen2.5-7b", help="of `shapes`; see decode.py")
    parser.add_argument("--shape-contexts", type=int, nargs="*", default=[1024, 8192, 32768, 131072])
    parser.add_argument("--dtype", default=None, help="default: as stored")
    parser.add_argument("--limit", type=float, default=1500, metavar="SECONDS", help="no new step begins after these")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    real = set(args.parts) - {"shapes"}
    models, texts = None, {}
    if args.tiny:
        texts = tiny_checkpoint()[1]
        config = ModelConfig("llama", 97, 32, 64, 6, 4, 2, 8, 4096, RopeConfig())
        models = Models(Decoder(config), init_params(config, jax.random.key(0)))
        args.contexts, args.new_tokens, args.batches = [100, 200], min(args.new_tokens, 24), [*args.batches[:1], 2]
        args.shape, args.shape_contexts, args.plans = "tiny", [128, 256], min(args.plans, 4)
        args.min_keep, args.num_draft, args.max_draft = 16, 2, 3
    elif real:
        if args.model is None or not args.text:
            parser.error("MODEL and at least one --text are needed for all parts but `shapes`, or --tiny")
        loaded = jaxspec.load(args.model, dtype=args.dtype)
        models, texts = Models(loaded.model, loaded.params), texts_from(args.text, loaded.tokenizer)
    report = KnapSpecReport(args.json, args.limit)
    if models is not None:
        report.results["dtype"] = str(models.params["embedding"].dtype)
    try:
        # `shapes` comes last, as it gives up the other model
        for part in [part for part in PARTS if part in args.parts]:
            if part == "shapes":
                # whose memory the larger model may need
                models = None
                forget_settings()
                jax.clear_caches()
            PARTS[part](report, models, texts, args)
    except OutOfTime:
        print(f"the limit of {args.limit:.0f} s is over", flush=True)
        report.results["out_of_time"] = True
    report.save()


if __name__ == "__main__":
    main()
