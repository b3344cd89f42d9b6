"""Correctness at full size, then speed, of the kernels on one GPU.

    python benchmarks/kernels.py --json kernels.json                  # everything
    python benchmarks/kernels.py --ops cached_attention --no-torch
    JAX_PLATFORMS=cpu python benchmarks/kernels.py --tiny             # checks this script itself, without a GPU

Every time is that of one call inside one jitted loop in which each call depends on the one before, over as many copies
of the cache as it takes to leave the L2 cache. "copy" is the rate of a device copy in the same run, counting bytes read
and written; the floor is the bytes an op must move at that rate, or its operations at `--peak-tflops`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cached_attention import reference as attention_reference
from pallas_kernels.cached_attention.blocks import BlockSizes, choose_block_sizes

L2_BYTES = 200e6


@dataclasses.dataclass
class Run:
    """What the command line chose, and what was measured so far."""

    tiny: bool
    torch: bool
    candidates: bool
    peak_tflops: float
    deadline: float
    copy_rate: float = 0.0
    records: list[dict] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)

    def attempt(self, label: str, function: Callable[[], object]) -> object:
        """Runs `function`; a failure is printed and recorded, and never stops the rest."""
        if time.time() > self.deadline:
            self.failures.append(f"{label}: skipped, out of time")
            return None
        try:
            return function()
        except Exception as error:
            text = "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")[:300]
            print(f"  {label:46s} failed: {text}", flush=True)
            self.failures.append(f"{label}: {text}")
            return None

    def check(self, label: str, ok: bool, detail: str) -> None:
        print(f"  {'ok  ' if ok else 'FAIL'} {label:52s} {detail}", flush=True)
        self.records.append({"kind": "check", "case": label, "ok": bool(ok), "detail": detail})
        if not ok:
            self.failures.append(f"check {label}: {detail}")

    def report(self, op: str, case: str, name: str, seconds: float | None, nbytes: float, flops: float = 0.0) -> None:
        if seconds is None:
            return
        floor = max(nbytes / self.copy_rate, flops / (self.peak_tflops * 1e12))
        print(
            f"  {name:46s} {seconds * 1e6:10.1f} us  {nbytes / seconds / 1e9:7.0f} GB/s  {floor / seconds:6.1%} of peak"
            + (f"  {flops / seconds / 1e12:6.0f} TFLOP/s" if flops else ""),
            flush=True,
        )
        record = {"kind": "time", "op": op, "case": case, "name": name, "us": seconds * 1e6, "floor_us": floor * 1e6}
        self.records.append(record | {"gb_per_s": nbytes / seconds / 1e9, "tflops": flops / seconds / 1e12})


def loop_time(step: Callable, carry: jax.Array, sets: list[tuple], nbytes: float, extra: bool = False) -> float:
    """Seconds per call of `step(carry, *operands) -> carry`, over the sets in turn inside one jitted loop.

    With `extra` a step returns (carry, by-product); each set's by-product is kept, so that none of them is dead code.
    """
    first = step(carry, *sets[0])[1] if extra else None
    kept = [first] * len(sets)
    guess = nbytes / 1.5e12 + 5e-6
    repeats = 2 if nbytes < 1e6 else int(np.clip(0.04 / (guess * len(sets)), 2, 500))

    def body(_, state, sets):
        carry, kept = state
        kept = list(kept)
        for i, operands in enumerate(sets):
            if extra:
                carry, kept[i] = step(carry, *operands)
            else:
                carry = step(carry, *operands)
        return carry, kept

    # The trip count is static: a traced one would cost a round trip to the host per iteration.
    run = lambda state, sets: jax.lax.fori_loop(0, repeats, functools.partial(body, sets=sets), state)  # noqa: E731
    loop = jax.jit(run).lower((carry, kept), sets).compile()
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        jax.block_until_ready(loop((carry, kept), sets))
        times.append(time.perf_counter() - begin)
    return float(np.median(times[1:]) / (repeats * len(sets)))


def copy_rate(run: Run) -> float:
    x = jnp.ones((1 << (20 if run.tiny else 30),), jnp.bfloat16)
    seconds = loop_time(lambda carry, one: carry + one, x, [(jnp.bfloat16(1),)], 2 * x.nbytes)
    return 2 * x.nbytes / seconds


def random(key: int, shape: tuple[int, ...], dtype=jnp.bfloat16) -> jax.Array:
    return jax.jit(lambda k: jax.random.normal(k, shape, jnp.float32).astype(dtype))(jax.random.key(key))


def cache_sets(batch: int, capacity: int, kv_heads: int, head_dim: int, dtype=jnp.bfloat16) -> list[tuple]:
    """Enough (k, v) pairs that a pass over all of them does not fit the L2 cache. Values have a common part, so that
    an attention output, which becomes the next query, keeps the scale of one."""
    shape = (batch, capacity, kv_heads, head_dim)
    nbytes = 2 * np.prod(shape) * jnp.dtype(dtype).itemsize
    common = random(7, (1, 1, kv_heads, head_dim), dtype)
    return [
        (random(2 * i, shape, dtype), (random(2 * i + 1, shape, dtype) * 0.5 + common).astype(dtype))
        for i in range(int(min(32, np.ceil(L2_BYTES / nbytes))) if nbytes > 1e6 else 1)
    ]


# --------------------------------------------------------------------------------------------------------------------
# cached_attention


def check_cached_attention(run: Run) -> None:
    """Against the float32 reference, with scratch rows poisoned, and bit-equal when repeated."""
    from pallas_kernels import cached_attention

    backend = "interpret" if run.tiny else "pallas"
    bf16, f32 = jnp.bfloat16, jnp.float32
    # B, T, K, G, H, S, dtype, score mode, per row
    cases = [
        (3, 1, 2, 6, 64, 100, bf16, None, False),
        (3, 5, 2, 5, 96, 63, f32, "weight", False),
        (3, 7, 1, 24, 128, 1000, bf16, "weight", True),
        (3, 2, 2, 7, 128, 1000, f32, "logit", False),
        (3, 40, 2, 3, 64, 100, bf16, "logit", True),
    ]
    if not run.tiny:
        cases += [
            (3, 5, 2, 1, 256, 1000, bf16, "weight", False),
            (3, 7, 2, 24, 256, 63, f32, "logit", True),
            (3, 5, 2, 8, 96, 1000, jnp.float16, "weight", True),
            (1, 700, 4, 7, 128, 1000, bf16, None, False),
            (2, 300, 2, 6, 64, 1000, f32, "weight", False),
            (1, 1, 4, 7, 128, 4096, bf16, "weight", False),
            (4, 5, 8, 8, 128, 32768, bf16, "weight", False),
            (4, 5, 8, 8, 128, 32768, bf16, "logit", False),
        ]
    for case in cases:
        run.attempt(f"check {case}", lambda case=case: check_one_attention(run, cached_attention, case, backend))
    if not run.tiny:
        run.attempt("check above 2^31 elements", lambda: check_large_attention(run, cached_attention))


def attention_error(out, scores, want, want_scores):
    out, want = np.asarray(out, np.float32), np.asarray(want, np.float32)
    error = np.linalg.norm(out - want) / max(np.linalg.norm(want), 1e-30)
    score_error, same = 0.0, True
    if scores is not None:
        scores, want_scores = np.asarray(scores), np.asarray(want_scores)
        finite = np.isfinite(want_scores)
        same = np.array_equal(np.isneginf(scores), np.isneginf(want_scores)) and np.isfinite(scores[finite]).all()
        difference = np.linalg.norm(scores[finite] - want_scores[finite])
        score_error = difference / max(np.linalg.norm(want_scores[finite]), 1e-30)
    return error, score_error, same


def check_one_attention(run, op, case, backend) -> None:
    batch, rows, kv_heads, group, head_dim, capacity, dtype, mode, per_row = case
    q = random(1, (batch, rows, kv_heads * group, head_dim), dtype)
    k, v = (random(i, (batch, capacity, kv_heads, head_dim), dtype) for i in (2, 3))
    # The longest row fills the cache, one row sees nothing at first, one lies in between.
    start = jnp.array([capacity - rows, -min(rows, 2), (capacity - rows) // 2][:batch] + [1] * (batch - 3), jnp.int32)
    scratch = (jnp.arange(capacity) >= start[:, None] + rows)[:, :, None, None]
    options = {"scale": head_dim**-0.5}
    if mode:
        options |= {"score_mode": mode, "per_row": per_row}
        options["scored_rows"] = jnp.array([[0, rows - 1], [rows - 1, rows - 1], [0, 0]][:batch], jnp.int32)
        if batch > 3:
            options["scored_rows"] = jnp.tile(jnp.array([[0, rows - 1]], jnp.int32), (batch, 1))
    call = jax.jit(functools.partial(op, backend=backend, **options))
    out, scores = call(q, jnp.where(scratch, jnp.nan, k), jnp.where(scratch, jnp.nan, v), start)
    again = call(q, jnp.where(scratch, 1e4, k).astype(dtype), jnp.where(scratch, 1e4, v).astype(dtype), start)
    up = (x.astype(jnp.float32) for x in (q, k, v))
    want, want_scores = jax.jit(functools.partial(attention_reference.cached_attention, **options))(*up, start)
    error, score_error, same = attention_error(out, scores, want, want_scores)
    pairs = list(zip((out, scores), again, strict=True))[: 2 if mode else 1]
    equal = all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)
    bound = 1e-5 if dtype == jnp.float32 else 1e-2
    name = " ".join(str(x) for x in (*case[:6], jnp.dtype(dtype).name, mode, per_row))
    ok = error < bound and score_error < bound and same and equal
    run.check(name, ok, f"out {error:.1e} scores {score_error:.1e} visible {same} repeat {equal}")


def check_large_attention(run, op) -> None:
    """The last batch row of a cache of 2.7e9 elements, which 32-bit offsets do not reach."""
    batch, rows, kv_heads, group, head_dim, capacity = 20, 5, 8, 8, 128, 131072
    q = random(1, (batch, rows, kv_heads * group, head_dim))
    k, v = (random(i, (batch, capacity, kv_heads, head_dim)) for i in (2, 3))
    start = jnp.full((batch,), capacity - rows, jnp.int32)
    scored = jnp.tile(jnp.array([[0, rows - 1]], jnp.int32), (batch, 1))
    for mode in ("weight", "logit"):
        options = {"scale": head_dim**-0.5, "score_mode": mode}
        out, scores = jax.jit(functools.partial(op, backend="pallas", **options))(q, k, v, start, scored_rows=scored)
        last = [x[-1:].astype(jnp.float32) for x in (q, k, v)]
        want, want_scores = jax.jit(functools.partial(attention_reference.cached_attention, **options))(
            *last, start[-1:], scored_rows=scored[-1:]
        )
        error, score_error, same = attention_error(out[-1:], scores[-1:], want, want_scores)
        ok = error < 1e-2 and score_error < 1e-2 and same
        run.check(f"2.7e9 elements {mode}", ok, f"out {error:.1e} scores {score_error:.1e} visible {same}")


def attention_rivals(run: Run, case: dict, sets: list[tuple], nbytes: float, report: Callable) -> None:
    """What JAX offers for the same shapes. None of these but XLA's honours causality among the T rows."""
    batch, rows, heads, head_dim = case["q"]
    kv_heads = sets[0][0].shape[2]
    group = heads // kv_heads
    q = random(11, case["q"])
    scale = head_dim**-0.5
    attention = functools.partial(jax.nn.dot_product_attention, scale=scale)
    xla = lambda q, k, v: attention(q, k, v, implementation="xla")  # noqa: E731
    report("XLA (jax.nn, no causality)", lambda: loop_time(xla, q, sets, nbytes))
    if run.tiny:
        return
    cudnn = lambda q, k, v: attention(q, k, v, implementation="cudnn")  # noqa: E731
    report("cuDNN (jax.nn, no causality)", lambda: loop_time(cudnn, q, sets, nbytes))
    # [B,T,K*G,H] and [B,T*G,K,H] differ in a transpose, which a caller that picks its layout would not pay.
    folded = random(11, (batch, rows * group, kv_heads, head_dim))
    report("cuDNN (jax.nn, group folded into rows)", lambda: loop_time(cudnn, folded, sets, nbytes))
    if rows == 1:

        def gqa():
            from jax.experimental.pallas.ops.gpu import decode_attention

            step = lambda q, k, v: decode_attention.gqa(q, k, v, sm_scale=scale)  # noqa: E731
            return loop_time(step, q[:, 0], sets, nbytes)

        report("jax.experimental.pallas decode_attention.gqa", gqa)


def torch_time(function: Callable, sets: list[tuple], repeats: int = 20) -> float:
    """Seconds per call from CUDA graph replays over the sets."""
    import torch

    for operands in sets:
        function(*operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for operands in sets:
            function(*operands)
    graph.replay()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(np.median(times) / (repeats * len(sets)))


def torch_attention_rivals(run: Run, case: dict, capacity: int, kv_heads: int, num_sets: int, report) -> None:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    batch, rows, heads, head_dim = case["q"]
    new = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    sets = [tuple(new(batch, capacity, kv_heads, head_dim).transpose(1, 2) for _ in range(2)) for _ in range(num_sets)]
    q = new(batch, rows, heads, head_dim).transpose(1, 2)
    folded = new(batch, rows * (heads // kv_heads), kv_heads, head_dim).transpose(1, 2)

    def timed(backend, query, **options):
        with sdpa_kernel(backend):
            return torch_time(lambda k, v: scaled_dot_product_attention(query, k, v, **options), sets)

    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        if not case["prefill"]:
            report(f"torch SDPA {name}, folded", lambda b=backend: timed(b, folded))
        else:
            causal = {"enable_gqa": True, "is_causal": True}
            report(f"torch SDPA {name}, causal", lambda b=backend, c=causal: timed(b, q, **c))

    def flex():
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        compiled = torch.compile(flex_attention)
        mask = None
        if case["prefill"]:
            rule = lambda b, h, i, j: i >= j  # noqa: E731
            mask = create_block_mask(rule, None, None, rows, capacity, device="cuda")
        return torch_time(lambda k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True), sets)

    if case["flex"]:
        report("torch FlexAttention", flex)
    sets.clear()
    torch.cuda.empty_cache()


def block_candidates(chosen: BlockSizes, steps: int, prefill: bool) -> list[BlockSizes]:
    change = functools.partial(dataclasses.replace, chosen)
    if prefill:
        return [
            change(split_tail=False),
            change(num_stages=2),
            change(num_stages=4),
            change(block_s=128, num_stages=2),
            change(block_s=128, num_stages=3),
            change(block_s=32, num_stages=4),
            change(rows=64, num_warps=4),
        ]
    splits = sorted({max(1, min(steps, round(chosen.num_splits * f))) for f in (0.5, 1.5, 2, 4)} - {chosen.num_splits})
    return [
        *(change(num_splits=n) for n in splits),
        change(split_tail=not chosen.split_tail),
        change(num_stages=2),
        change(num_stages=4),
        change(block_s=128, num_stages=2),
        change(block_s=128, num_stages=3),
        change(block_s=32, num_stages=4),
        change(block_s=32, num_stages=5),
        change(num_warps=8),
    ]


def brief(blocks: BlockSizes) -> str:
    tail = " tail" if blocks.split_tail else ""
    sums = "" if blocks.sum_logits else " parts"
    sizes = f"r{blocks.rows} s{blocks.block_s} c{blocks.num_splits} w{blocks.num_warps} st{blocks.num_stages}"
    return sizes + tail + sums


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of cached_attention: the rows stand at start, or at the end of the cache. `tune` also times other block
    sizes, `torch` the PyTorch rivals, `flex` FlexAttention, which takes long to compile."""

    name: str
    batch: int
    rows: int
    kv_heads: int
    group: int
    head_dim: int
    capacity: int
    start: int | None = None
    scores: bool = False
    tune: bool = False
    torch: bool = False
    flex: bool = False


def time_attention(run: Run, case: Case) -> None:
    from pallas_kernels.cached_attention.triton import cached_attention

    batch, rows, kv_heads, head_dim, capacity = case.batch, case.rows, case.kv_heads, case.head_dim, case.capacity
    prefill = rows > 16
    sets = cache_sets(batch, capacity, kv_heads, head_dim)
    shape = (batch, rows, kv_heads * case.group, head_dim)
    q = random(5, shape)
    first = capacity - rows if case.start is None else case.start
    position = jnp.full((batch,), first, jnp.int32)
    nbytes = 2 * batch * (first + rows) * kv_heads * head_dim * 2 + 2 * q.nbytes
    pairs = rows * first + rows * (rows + 1) / 2
    flops = 4 * batch * shape[2] * head_dim * pairs if prefill else 0.0
    # Causal prefill is bound by its products, not by its bytes: the guess at its time must follow them.
    guess = nbytes + flops / 100
    print(f"\ncached_attention {case.name}: q {list(shape)} k {list(sets[0][0].shape)} start {first}", flush=True)

    def report(label, measure):
        run.report("cached_attention", case.name, label, run.attempt(label, measure), nbytes, flops)

    def ours(blocks, mode=None):
        options = {"scale": head_dim**-0.5, "blocks": blocks, "interpret": run.tiny}
        if mode:
            options |= {"score_mode": mode, "scored_rows": jnp.tile(jnp.array([[0, rows - 1]], jnp.int32), (batch, 1))}
        attend = lambda q, k, v: cached_attention(q, k, v, position, **options)  # noqa: E731
        step = attend if mode else (lambda q, k, v: attend(q, k, v)[0])
        return loop_time(step, q, sets, guess, extra=mode is not None)

    chosen = choose_block_sizes(batch, rows, kv_heads, case.group, capacity, head_dim, q.dtype)
    report(f"ours {brief(chosen)}", lambda: ours(chosen))
    for mode in ("weight", "logit") if case.scores else ():
        report(f"ours, {mode} scores {brief(chosen)}", lambda m=mode: ours(chosen, m))
    if case.tune and run.candidates:
        if case.scores:
            parts = dataclasses.replace(chosen, sum_logits=False)
            report(f"  candidate, logit scores {brief(parts)}", lambda: ours(parts, "logit"))
        for blocks in block_candidates(chosen, -(-capacity // chosen.block_s), prefill):
            report(f"  candidate {brief(blocks)}", lambda b=blocks: ours(b))
    rival = {"q": shape, "prefill": prefill, "flex": case.flex}
    if not prefill:
        attention_rivals(run, rival, sets, nbytes, report)
    elif first == 0 and not run.tiny:
        causal = functools.partial(jax.nn.dot_product_attention, scale=head_dim**-0.5, is_causal=True)
        for name in ("cudnn", "xla"):
            step = lambda q, k, v, r=name: causal(q, k, v, implementation=r)  # noqa: E731
            report(f"{name} (jax.nn, causal)", lambda s=step: loop_time(s, q, sets, guess))
        report("jax.experimental.pallas attention_mgpu", lambda: mosaic_attention(q, sets, guess))
    num_sets = len(sets)
    sets.clear()
    if run.torch and case.torch:
        run.attempt("torch", lambda: torch_attention_rivals(run, rival, capacity, kv_heads, num_sets, report))


def mosaic_attention(q, sets, guess) -> float:
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(block_q=128, block_kv=128, max_concurrent_steps=2, causal=True)
    return loop_time(lambda q, k, v: attention_mgpu.attention(q, k, v, config), q, sets, guess)


ATTENTION_CASES = (
    Case("verify 32K batch 16", 16, 5, 8, 8, 128, 32768, scores=True, tune=True, torch=True, flex=True),
    Case("decode 32K batch 16", 16, 1, 8, 8, 128, 32768),
    Case("verify 128K batch 4", 4, 5, 8, 8, 128, 131072, scores=True),
    Case("verify 128K batch 1", 1, 5, 8, 8, 128, 131072, scores=True, tune=True),
    Case("decode 4K batch 1 (7B)", 1, 1, 4, 7, 128, 4096, tune=True, torch=True),
    Case("verify 4K batch 1 (7B)", 1, 7, 4, 7, 128, 4096, scores=True),
    Case("decode 32K batch 1 (7B)", 1, 1, 4, 7, 128, 32768),
    Case("prefill 8K (7B)", 1, 8192, 4, 7, 128, 8192, start=0, tune=True, torch=True, flex=True),
    Case("prefill 2K of 8K (7B)", 1, 2048, 4, 7, 128, 8192, start=6144),
    Case("prefill 8K (1.5B)", 1, 8192, 2, 6, 128, 8192, start=0),
)
TINY_ATTENTION_CASES = (
    Case("verify", 1, 5, 2, 8, 64, 128, scores=True, tune=True),
    Case("prefill", 1, 64, 2, 3, 64, 64, start=0, tune=True),
)


def bench_cached_attention(run: Run) -> None:
    check_cached_attention(run)
    for case in TINY_ATTENTION_CASES if run.tiny else ATTENTION_CASES:
        run.attempt(case.name, lambda case=case: time_attention(run, case))


OPS = {"cached_attention": bench_cached_attention}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default=",".join(OPS), help="comma-separated, of " + ", ".join(OPS))
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--tiny", action="store_true", help="small shapes in interpret mode, to check the script")
    parser.add_argument("--no-torch", action="store_true", help="leave out the PyTorch rivals")
    parser.add_argument("--candidates", action="store_true", help="also time other block sizes")
    parser.add_argument("--peak-tflops", type=float, default=800.0, help="matrix rate that floors are computed with")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds after which measurements are skipped")
    args = parser.parse_args()
    torch = not args.no_torch and not args.tiny
    run = Run(args.tiny, torch, args.candidates, args.peak_tflops, time.time() + args.limit)
    run.copy_rate = copy_rate(run)
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}; copy {run.copy_rate / 1e9:.0f} GB/s", flush=True)
    for op in args.ops.split(","):
        run.attempt(op, lambda op=op: OPS[op](run))
        if args.json:
            device = jax.devices()[0].device_kind
            summary = {"jax": jax.__version__, "device": device, "copy_gb_per_s": run.copy_rate / 1e9}
            args.json.write_text(json.dumps(summary | {"results": run.records, "failures": run.failures}, indent=1))
    print(f"\n{len(run.failures)} failures", *run.failures, sep="\n  ")


if __name__ == "__main__":
    main()
