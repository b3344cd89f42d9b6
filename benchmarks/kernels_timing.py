"""What every part of `kernels.py` uses: the run's settings and records, and timing on one GPU."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from report import reason_of

from jaxspec.benchmarking.ceiling import copy_ceiling

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

    @property
    def backend(self) -> str:
        return "interpret" if self.tiny else "pallas"

    def attempt(self, label: str, function: Callable[[], object]) -> object:
        """Runs `function`; a failure is printed and recorded, and never stops the rest."""
        if time.time() > self.deadline:
            self.failures.append(f"{label}: skipped, out of time")
            return None
        try:
            return function()
        except Exception as error:
            text = reason_of(error)
            print(f"  {label:46s} failed: {text}", flush=True)
            self.failures.append(f"{label}: {text}")
            return None

    def attempt_all(self, tasks: Iterable[tuple[str, Callable[[], object]]]) -> list[object]:
        """`attempt` for each, in parallel: compiling is most of the time."""
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
            return [future.result() for future in [pool.submit(self.attempt, *task) for task in tasks]]

    def measure(
        self,
        op: str,
        case: str,
        entries: list[tuple[str, Callable[[], Callable[[], float]]]],
        nbytes: float,
        flops: float = 0.0,
    ) -> None:
        """Each entry is a label and what compiles a program and returns its measurement; measured one by one."""
        for (label, _), timed in zip(entries, self.attempt_all(entries), strict=True):
            if timed is not None:
                self.report(op, case, label, self.attempt(label, timed), nbytes, flops)

    def check(self, label: str, ok: bool, detail: str) -> None:
        print(f"  {'ok  ' if ok else 'FAIL'} {label:58s} {detail}", flush=True)
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


def loop(
    step: Callable, carry: jax.Array, sets: list[tuple], nbytes: float, extra: bool = False
) -> Callable[[], float]:
    """Compiles a loop over the sets in turn; the result measures seconds per call of `step(carry, *operands) -> carry`.

    With `extra` a step returns (carry, by-product); each set's by-product is kept, so that none of them is dead code.
    """
    kept = []
    if extra:
        first = jax.eval_shape(step, carry, *sets[0])[1]
        kept = [jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first) for _ in sets]
    guess = nbytes / 1.5e12 + 5e-6
    repeats = 2 if jax.default_backend() != "gpu" else int(np.clip(0.03 / (guess * len(sets)), 2, 300))

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
    compiled = jax.jit(run).lower((carry, kept), sets).compile()

    def measure() -> float:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            jax.block_until_ready(compiled((carry, kept), sets))
            times.append(time.perf_counter() - begin)
        # The first run may still load code.
        return float(np.median(times[1:]) / (repeats * len(sets)))

    return measure


def copy_rates(run: Run) -> dict[str, float]:
    """Bytes read and written per second by device copies: JAX's, and PyTorch's where wanted."""
    size = 1 << (24 if run.tiny else 31)
    found = {"jax": copy_ceiling(size)}
    if run.torch:

        def torch_rate() -> float:
            import torch

            a = torch.zeros(size, dtype=torch.uint8, device="cuda")
            b = torch.empty_like(a)
            return 2 * size / torch_time(lambda: b.copy_(a), [()], repeats=8)

        found["torch"] = run.attempt("torch copy", torch_rate) or 0.0
    return found


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


def random(key: int, shape: tuple[int, ...], dtype=jnp.bfloat16) -> jax.Array:
    return jax.jit(lambda k: jax.random.normal(k, shape, jnp.float32).astype(dtype))(jax.random.key(key))


def num_sets(nbytes: float, most: int = 32) -> int:
    """How many operand sets it takes that a pass over all of them does not fit the L2 cache."""
    return int(min(most, np.ceil(L2_BYTES / nbytes))) if nbytes > 1e5 else 1


def cache_sets(batch: int, capacity: int, kv_heads: int, head_dim: int, dtype=jnp.bfloat16) -> list[tuple]:
    """Pairs (k, v). Values have a common part, so that an attention output, which becomes the next query, keeps the
    scale of one."""
    shape = (batch, capacity, kv_heads, head_dim)
    common = random(7, (1, 1, kv_heads, head_dim), dtype)
    values = jax.jit(lambda key: (random(key, shape, dtype) * 0.5 + common).astype(dtype), static_argnums=0)
    return [
        (random(2 * i, shape, dtype), values(2 * i + 1))
        for i in range(num_sets(2 * np.prod(shape) * jnp.dtype(dtype).itemsize))
    ]


def relative_error(got: jax.Array, want: jax.Array) -> float:
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


def score_error(got: jax.Array, want: jax.Array) -> float:
    """Relative error of the finite scores; infinite where another entry is missing or -inf."""
    got, want = np.asarray(got), np.asarray(want)
    finite = np.isfinite(want)
    if not np.array_equal(np.isneginf(got), np.isneginf(want)) or not np.isfinite(got[finite]).all():
        return float("inf")
    return relative_error(got[finite], want[finite])


def same(a: object, b: object) -> bool:
    return all(
        np.array_equal(np.asarray(x), np.asarray(y))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def brief(blocks: object) -> str:
    fields = dataclasses.asdict(blocks)
    return " ".join(f"{name}={int(value)}" for name, value in fields.items() if value is not False)
