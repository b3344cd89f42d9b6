"""Plain decoding and prefill at real model sizes with random weights, beside the copy ceiling.

    python benchmarks/decode.py --json decode.json              # on a GPU
    python benchmarks/decode.py --shape tiny --json decode.json # a quick run on a CPU

The bytes of a step are every weight but the embedding table (one row of it is read) plus the valid K/V rows; the
ceiling is the rate of a large device copy in the same run, reads and writes counted.
"""

import argparse
import functools
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from report import environment, save

from jaxspec.benchmarking.ceiling import copy_ceiling
from jaxspec.benchmarking.shapes import SHAPES, random_cache, random_params, step_bytes
from jaxspec.decode import decode_all, prefill
from jaxspec.methods import Models, Plain
from jaxspec.models import Decoder, cache_capacity
from jaxspec.requests import check_request
from jaxspec.sampling import Sampling
from jaxspec.types import DecodeState, Stats


def main() -> None:
    """Runs the cases and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--decode", nargs="*", default=["1x4096", "16x32768"], metavar="BxCONTEXT")
    parser.add_argument("--prefill", nargs="*", default=["1x8192"], metavar="BxTOKENS")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--backend", choices=("pallas", "xla"), default=None)
    parser.add_argument("--profile", type=Path, help="write device time by kernel of each decode case into this folder")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = SHAPES[args.shape]
    results = {
        **environment(),
        "shape": args.shape,
        "ceiling_bytes_per_second": copy_ceiling(1 << (31 if args.shape != "tiny" else 22)),
        "decode": [],
        "prefill": [],
    }
    print(f"copy ceiling {results['ceiling_bytes_per_second'] / 1e12:.2f} TB/s", flush=True)
    params = random_params(config)
    models = Models(Decoder(config, args.backend), params)
    for case in args.decode:
        batch, context = map(int, case.split("x"))
        row = time_decode(models, batch, context, args.steps, args.profile)
        row["share_of_ceiling"] = row["bytes"] / row["seconds"] / results["ceiling_bytes_per_second"]
        results["decode"].append(row)
        print(
            f"decode  B={batch:<3} context {context:<6} {row['seconds'] * 1e3:8.3f} ms a step  "
            f"{batch / row['seconds']:8.1f} tokens/s  {row['share_of_ceiling']:.1%} of the ceiling  "
            f"(compile {row['compile_seconds']:.0f} s)",
            flush=True,
        )
    for case in args.prefill:
        batch, tokens = map(int, case.split("x"))
        row = time_prefill(models, batch, tokens)
        results["prefill"].append(row)
        print(f"prefill B={batch:<3} {tokens} tokens  {row['seconds'] * 1e3:8.1f} ms", flush=True)
    save(results, args.json)


def time_decode(models: Models, batch: int, context: int, steps: int, profile: Path | None) -> dict:
    """Seconds per step of the loop of `generate`, from a cache of `context` random rows per sequence."""
    config = models.target.config
    method = Plain()
    request = _request(models, batch, 1, steps)
    loop = jax.jit(functools.partial(decode_all, method=method, max_new_tokens=steps), donate_argnames="state")

    def state() -> DecodeState:
        capacity = cache_capacity(context + steps + 1)
        return small_state().replace(cache=random_cache(config, batch, capacity))

    @jax.jit  # so that no two fields share a buffer, which could not be donated twice
    def small_state() -> DecodeState:
        zeros = jnp.zeros(batch, jnp.int32)
        trace = jnp.zeros((batch, steps), jnp.int16)
        return DecodeState(
            tokens=jnp.zeros((batch, steps + 1), jnp.int32),
            num_tokens=zeros,
            length=zeros + context,
            last_token=zeros + 1,
            finish=jnp.zeros(batch, jnp.int8),
            cache=(),
            method_state=(),
            keys=request.keys,
            round=jnp.int32(1),
            stats=Stats(zeros, zeros, trace, trace),
            logprobs=None,
        )

    started = time.perf_counter()
    compiled = loop.lower(models=models, state=state(), request=request).compile()
    compile_seconds = time.perf_counter() - started
    times = []
    for _ in range(3):
        ready = jax.block_until_ready(state())
        started = time.perf_counter()
        jax.block_until_ready(compiled(models=models, state=ready, request=request).tokens)
        times.append(time.perf_counter() - started)
    if profile is not None:
        ready = jax.block_until_ready(state())
        run = lambda: jax.block_until_ready(compiled(models=models, state=ready, request=request).tokens)  # noqa: E731
        _profile(run, profile, f"decode_b{batch}_{context}")
    return {
        "batch": batch,
        "context": context,
        "seconds": statistics.median(times) / steps,
        "spread": (max(times) - min(times)) / steps,
        "bytes": step_bytes(config, batch, context + steps // 2 + 1, 2),
        "compile_seconds": compile_seconds,
    }


def time_prefill(models: Models, batch: int, tokens: int, repeats: int = 5) -> dict:
    """Seconds to process prompts of `tokens` tokens and choose the first new one."""
    request = _request(models, batch, tokens, 8)
    run = jax.jit(lambda models, request: prefill(models, request, Plain(), 8))
    seconds = _median_seconds(lambda: run(models, request), repeats)
    return {"batch": batch, "tokens": tokens, "seconds": seconds}


def _request(models: Models, batch: int, tokens: int, steps: int):
    prompt = np.random.default_rng(0).integers(0, models.target.config.vocab_size, (batch, tokens))
    lengths = np.full(batch, tokens)
    key = jax.random.key(0)
    return check_request(models.target, prompt, lengths, key, Plain(), Sampling(), steps, (), 0, None)


def _median_seconds(function, repeats: int) -> float:
    jax.block_until_ready(function())
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _profile(run, folder: Path, name: str) -> None:
    """Writes device time by kernel, most expensive first."""
    with tempfile.TemporaryDirectory() as trace:
        with jax.profiler.trace(trace):
            run()
        (file,) = Path(trace).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
    totals: dict[str, list[float]] = {}
    for plane in planes:
        for line in plane.lines if plane.name.startswith("/device:GPU") else ():
            for event in line.events if line.name.startswith("Stream") else ():
                entry = totals.setdefault(event.name, [0.0, 0])
                entry[0] += event.duration_ns / 1e3
                entry[1] += 1
    rows = [f"{us:10.0f} us {int(calls):6} x {us / calls:8.2f} us  {kernel}" for kernel, (us, calls) in totals.items()]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_text("\n".join(sorted(rows, reverse=True)) + "\n")


if __name__ == "__main__":
    main()
