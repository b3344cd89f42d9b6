"""Correctness at full size, then speed, of the kernels on one GPU.

    python benchmarks/kernels.py --json kernels.json                  # everything
    python benchmarks/kernels.py --ops cached_attention --candidates --no-torch
    JAX_PLATFORMS=cpu python benchmarks/kernels.py --tiny --candidates # checks this script itself, without a GPU

Every time is that of one call inside one jitted loop in which each call depends on the one before, over as many operand
sets as it takes to leave the L2 cache. The ceiling is the rate of a device copy in the same run, counting bytes read
and written; the floor is the bytes an op must move at that rate, or its operations at `--peak-tflops`.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import kernels_checks
import kernels_dense
import kernels_matmul
import kernels_selection
import kernels_sparse
import report
from kernels_timing import Run, copy_rates

CHECKS = {"attention": kernels_checks.check, "selection": kernels_selection.check}
OPS = {
    "skinny_matmul": kernels_matmul.bench,
    "row_selection": kernels_selection.bench,
    "sparse_attention": kernels_sparse.bench_sparse,
    "attention_scores": kernels_sparse.bench_scores,
    "cached_attention": kernels_dense.bench,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default=",".join(OPS), help="comma-separated, of " + ", ".join(OPS))
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--tiny", action="store_true", help="small shapes in interpret mode, to check the script")
    parser.add_argument("--no-checks", action="store_true", help="leave out the checks of correctness")
    parser.add_argument("--no-torch", action="store_true", help="leave out the PyTorch rivals")
    parser.add_argument("--candidates", action="store_true", help="also time other block sizes")
    parser.add_argument("--peak-tflops", type=float, default=800.0, help="matrix rate that floors are computed with")
    parser.add_argument("--limit", type=float, default=1500.0, help="seconds after which measurements are skipped")
    args = parser.parse_args()
    torch = not args.no_torch and not args.tiny
    run = Run(args.tiny, torch, args.candidates, args.peak_tflops, time.time() + args.limit)
    began = time.time()
    rates = copy_rates(run)
    run.copy_rate = max(rates.values())
    device = jax.devices()[0].device_kind
    shown = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in rates.items())
    print(f"jax {jax.__version__} on {device}; copy GB/s: {shown}", flush=True)

    def save() -> None:
        summary = {"jax": jax.__version__, "device": device, "copy_bytes_per_s": rates}
        report.save(summary | {"results": run.records, "failures": run.failures}, args.json)

    for name, check in () if args.no_checks else CHECKS.items():
        run.attempt(f"check {name}", lambda check=check: check(run))
        print(f"  {time.time() - began:.0f} s", flush=True)
        save()
    for op in args.ops.split(","):
        run.attempt(op, lambda op=op: OPS[op](run))
        print(f"  {time.time() - began:.0f} s", flush=True)
        save()
    print(f"\n{len(run.failures)} failures", *run.failures, sep="\n  ")


if __name__ == "__main__":
    main()
