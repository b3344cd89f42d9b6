"""cached_attention beside what JAX and PyTorch offer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import kernels_rivals as rivals
from kernels_timing import Run, brief, cache_sets, loop, random

from pallas_kernels import cached_attention
from pallas_kernels.cached_attention import blocks as dense_blocks
from pallas_kernels.cached_attention import triton as dense_triton


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of cached_attention: the rows stand at start, or at the end of the cache. `rivals` are groups of
    `kernels_rivals`; `candidates` are other block sizes, as changes of the chosen ones."""

    name: str
    batch: int
    rows: int
    kv_heads: int
    group: int
    head_dim: int
    capacity: int
    start: int | None = None
    scores: bool = False
    rivals: tuple[str, ...] = ()
    candidates: tuple[dict, ...] = ()


def changed(**changes: int) -> dict:
    return changes


DENSE_CASES = (
    Case(
        "verify 32K batch 16",
        *(16, 5, 8, 8, 128, 32768),
        scores=True,
        rivals=("jax", "torch"),
        candidates=(
            changed(num_splits=4),
            changed(num_splits=6),
            changed(split_tail=True),
            changed(stream=True),
            changed(num_splits=1, num_stages=4),
            changed(num_splits=2, num_stages=4),
            changed(num_splits=4, num_stages=4),
            changed(num_splits=1, num_stages=3, block_s=128),
            changed(num_splits=2, num_stages=3, block_s=128),
        ),
    ),
    Case(
        "decode 4K batch 1 (7B)",
        *(1, 1, 4, 7, 128, 4096),
        rivals=("jax", "torch"),
        candidates=(
            changed(num_splits=8),
            changed(num_splits=16),
            changed(num_splits=32),
            changed(num_splits=16, block_s=32, num_stages=4),
            changed(num_splits=32, block_s=32, num_stages=4),
            changed(num_splits=16, block_s=128, num_stages=2),
            changed(num_splits=32, block_s=128, num_stages=1),
            changed(num_splits=32, num_stages=2),
            changed(num_splits=16, num_stages=4),
            changed(num_splits=16, num_warps=8),
        ),
    ),
    Case(
        "verify 4K batch 1 (7B)",
        *(1, 7, 4, 7, 128, 4096),
        scores=True,
        candidates=(changed(num_splits=16), changed(num_splits=32), changed(num_splits=16, num_stages=4)),
    ),
    Case(
        "verify 128K batch 1",
        *(1, 5, 8, 8, 128, 131072),
        scores=True,
        candidates=(changed(num_splits=16, num_stages=4), changed(stream=True), changed(num_splits=66)),
    ),
    Case(
        "verify 128K batch 4",
        *(4, 5, 8, 8, 128, 131072),
        scores=True,
        candidates=(changed(num_splits=4, num_stages=4), changed(num_splits=16), changed(stream=True)),
    ),
    Case(
        "decode 32K batch 16",
        *(16, 1, 8, 8, 128, 32768),
        rivals=("jax",),
        candidates=(changed(num_splits=4), changed(num_splits=1, num_stages=4), changed(stream=True)),
    ),
    Case("verify 32K batch 16 (7B)", *(16, 7, 4, 7, 128, 32768), scores=True),
    Case("verify 32K batch 32 (1.5B)", *(32, 7, 2, 6, 128, 32768), scores=True),
    Case("decode 32K batch 1 (7B)", *(1, 1, 4, 7, 128, 32768), candidates=(changed(num_splits=33),)),
    Case("prefill 8K (7B)", *(1, 8192, 4, 7, 128, 8192), start=0, rivals=("jax", "torch")),
    Case("prefill 8K (1.5B)", *(1, 8192, 2, 6, 128, 8192), start=0, rivals=("jax",)),
    Case("prefill 4K after 28K (1.5B)", *(1, 4096, 2, 6, 128, 32768), rivals=("jax",)),
)
TINY_DENSE_CASES = (
    Case("verify", 1, 5, 2, 8, 64, 128, scores=True, candidates=(changed(num_splits=2),)),
    Case("prefill", 1, 64, 2, 3, 64, 64, start=0, rivals=("jax",)),
    Case("prefill after others", 1, 32, 2, 3, 64, 128, rivals=("jax",)),
)


def time_dense(run: Run, case: Case) -> None:
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

    entries: list[tuple[str, Callable]] = []

    def report(label: str, prepare: Callable) -> None:
        entries.append((label, prepare))

    def op():
        # a position that the compiler knows would decide which of the op's ways is compiled
        def step(q, k, v, start):
            return cached_attention(q, k, v, start, scale=head_dim**-0.5, backend=run.backend)[0]

        return loop(step, q, [(*operands, position) for operands in sets], guess)

    def triton(blocks, mode=None):
        options = {"scale": head_dim**-0.5, "blocks": blocks, "interpret": run.tiny}
        if mode:
            options |= {"score_mode": mode, "scored_rows": jnp.tile(jnp.array([[0, rows - 1]], jnp.int32), (batch, 1))}
        attend = lambda q, k, v: dense_triton.cached_attention(q, k, v, position, **options)  # noqa: E731
        step = attend if mode else (lambda q, k, v: attend(q, k, v)[0])
        return loop(step, q, sets, guess, extra=mode is not None)

    chosen = dense_blocks.choose_block_sizes(batch, rows, kv_heads, case.group, capacity, head_dim, q.dtype)
    # the op is the Triton kernel but for prefill chunks
    kernel = "Triton" if prefill else "ours"
    if prefill:
        report("ours", op)
    report(f"{kernel} {brief(chosen)}", lambda: triton(chosen))
    for mode in ("weight", "logit") if case.scores else ():
        report(f"ours, {mode} scores", lambda m=mode: triton(chosen, m))
    for changes in case.candidates if run.candidates else ():
        blocks = dataclasses.replace(chosen, **changes)
        report("  " + " ".join(f"{name}={value}" for name, value in changes.items()), lambda b=blocks: triton(b))
    report("ours, repeated", op if prefill else lambda: triton(chosen))
    if "jax" in case.rivals:
        rivals.jax_attention(run, q, case.group, sets, guess, prefill, report)
    run.measure("cached_attention", case.name, entries, nbytes, flops)
    count = len(sets)
    sets.clear()
    entries.clear()
    if run.torch and "torch" in case.rivals:
        run.attempt(
            "torch",
            lambda: rivals.torch_attention(
                shape, capacity, kv_heads, count, prefill, report, flex="flex" in case.rivals
            ),
        )
        run.measure("cached_attention", case.name, entries, nbytes, flops)


def bench(run: Run) -> None:
    for case in TINY_DENSE_CASES if run.tiny else DENSE_CASES:
        run.attempt(case.name, lambda case=case: time_dense(run, case))
