"""Milliseconds of speculative rounds at real model sizes with random weights, by phase and by kernel.

    python benchmarks/rounds.py --shape qwen2.5-7b --cases 16x32768 --profile profile --json rounds.json   # on a GPU
    python benchmarks/rounds.py --shape tiny --cases 2x200 --rounds 4                                      # on a CPU

Random weights accept next to nothing, so a round's time is measured and its yield is not: `--tokens-per-round` takes
one that was measured or published, and the speed-up that follows is labelled synthetic.
"""

import argparse
import functools
import statistics
import time
from pathlib import Path

import jax
import numpy as np
from decode import _profile
from report import environment, save

from jaxspec.benchmarking.ceiling import copy_ceiling
from jaxspec.benchmarking.shapes import SHAPES, random_cache, random_params
from jaxspec.decode import begin, decode_step
from jaxspec.methods import Method, Models, Plain, Quest, Streaming, Vegas
from jaxspec.models import Decoder, cache_capacity
from jaxspec.profiling import RoundTimer
from jaxspec.requests import check_request
from jaxspec.sampling import Sampling


def main() -> None:
    """Measures every method at every case, prints a line for each and writes one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--cases", nargs="*", default=["16x32768"], metavar="BxCONTEXT")
    parser.add_argument("--methods", nargs="*", default=["plain", "vegas", "vegas-logit", "streaming"])
    parser.add_argument("--rho", type=float, default=0.07)
    parser.add_argument("--num-draft", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--tokens-per-round", type=float, help="for the synthetic speed-up")
    parser.add_argument("--no-phases", action="store_true", help="the fused round only")
    parser.add_argument("--profile", type=Path, help="write device time by kernel into this folder")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shared = {"rho": args.rho, "num_draft": args.num_draft}
    known: dict[str, Method] = {
        "plain": Plain(),
        "vegas": Vegas(**shared),
        "vegas-logit": Vegas(score_mode="logit", **shared),
        "streaming": Streaming(**shared),
        "quest": Quest(**shared),
    }
    config = SHAPES[args.shape]
    results = {
        "schema_version": 1,
        **environment(),
        "shape": args.shape,
        "weights": "random; acceptance is not measured",
        "ceiling_bytes_per_second": copy_ceiling(1 << (31 if args.shape != "tiny" else 22)),
        "rounds": [],
    }
    models = Models(Decoder(config), random_params(config))
    for case in args.cases:
        batch, context = map(int, case.split("x"))
        plain = None
        for name in args.methods:
            row = {"method": name, "batch": batch, "context": context, **measure(models, known[name], case, name, args)}
            plain = row["milliseconds"] if name == "plain" else plain
            line = f"{name:12} B={batch:<3} context {context:<6} {row['milliseconds']:8.3f} ms a round"
            if plain is not None and name != "plain":
                row["round_in_plain_steps"] = row["milliseconds"] / plain
                line += f" = {row['round_in_plain_steps']:.2f} plain steps"
                if args.tokens_per_round:
                    row["synthetic_speedup"] = args.tokens_per_round / row["round_in_plain_steps"]
                    line += f", {row['synthetic_speedup']:.2f} x at {args.tokens_per_round} tokens a round (synthetic)"
            print(line, {k: round(v, 3) for k, v in row["phases"].items() if v}, flush=True)
            results["rounds"].append(row)
            save(results, args.json)


def measure(models: Models, method: Method, case: str, name: str, args: argparse.Namespace) -> dict:
    """Milliseconds of a round, of its phases, and of compiling it."""
    batch, context = map(int, case.split("x"))
    new_tokens = 4 * args.rounds + 8
    prompt = np.random.default_rng(0).integers(0, models.target.config.vocab_size, (batch, context)).astype(np.int32)
    lengths, key = np.full(batch, context, np.int32), jax.random.key(0)
    request = check_request(models.target, prompt, lengths, key, method, Sampling(), new_tokens, (), 0, None)
    capacity = cache_capacity(request.prompt.shape[1] + new_tokens + method.max_draft + 1)
    start = jax.jit(functools.partial(begin, method=method, max_new_tokens=new_tokens), donate_argnames="cache")

    def run(models, state, request):
        step = lambda _, state: decode_step(models, state, request, method, new_tokens)[0]  # noqa: E731
        return jax.lax.fori_loop(0, args.rounds, step, state)

    state = start(models, random_cache(models.target.config, batch, capacity), request)
    began = time.perf_counter()
    compiled = jax.jit(run, donate_argnums=1).lower(models, state, request).compile()
    compile_seconds = time.perf_counter() - began
    times = []
    for _ in range(3):
        state = jax.block_until_ready(start(models, state.cache, request))
        began = time.perf_counter()
        state = jax.block_until_ready(compiled(models, state, request))
        times.append((time.perf_counter() - began) / args.rounds)
    if args.profile is not None:
        state = jax.block_until_ready(start(models, state.cache, request))
        kept = []
        _profile(
            lambda: kept.append(jax.block_until_ready(compiled(models, state, request))), args.profile, f"{name}_{case}"
        )
        state = kept.pop()
    phases = {}
    if not args.no_phases:
        state, timer = start(models, state.cache, request), RoundTimer()
        for _ in range(2 * args.rounds):
            state, _ = timer.step(models, state, request, np.zeros(batch, bool), method, new_tokens)
        profile = timer.profile()._asdict()
        profile.pop("num_rounds")
        phases = {phase: None if seconds is None else 1e3 * seconds for phase, seconds in profile.items()}
    return {
        "milliseconds": 1e3 * statistics.median(times),
        "spread_milliseconds": 1e3 * (max(times) - min(times)),
        "phases": phases,
        "compile_seconds": compile_seconds,
    }


if __name__ == "__main__":
    main()
