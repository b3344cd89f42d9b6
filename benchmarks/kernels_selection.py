"""row_selection: exact equality with a stable sort at full size, then speed beside lax.top_k and torch.topk."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from kernels_timing import Run, loop, num_sets, random, same, torch_time

from pallas_kernels.row_selection import keys, reference, triton
from pallas_kernels.row_selection.blocks import BlockSizes, choose_block_sizes

# R, S, width
CHECKS = [(5, 1000, 300), (3, 63, 63)]
CHECKS_FULL = [(36, 131072, 9176), (448, 32768, 1639), (16, 32768, 512), (28, 4096, 287), (3, 131071, 131071)]
CHECKS_FULL += [(5, 32761, 32761), (2, 1 << 20, 50000)]
BF16, F32 = jnp.bfloat16, jnp.float32
# R, S, k, dtype
CASES = (
    (448, 32768, 1639, BF16),
    (16, 32768, 512, BF16),
    (36, 131072, 6554, BF16),
    (1, 131072, 4096, BF16),
    (1, 32768, 1639, BF16),
    (28, 4096, 287, BF16),
    (28, 4096, 287, F32),
    (448, 32768, 1639, F32),
)
TINY_CASES = ((3, 512, 20, BF16),)


def designs(size: int, dtype) -> list[BlockSizes]:
    """Every design, in a few cuts each, that takes rows of this size and dtype."""
    tile = max(256, 1 << (size - 1).bit_length())
    found = []
    if tile <= keys.MAX_TILE:
        found += [BlockSizes("resident", tile, max(1, min(warps, tile // 1024))) for warps in (16, 8, 32)]
        found += [BlockSizes("gather", tile, min(warps, tile // 256)) for warps in (16, 8, 32)]
    found += [BlockSizes("spread", 4096, 4), BlockSizes("spread", 8192, 8), BlockSizes("spread", 2048, 2)]
    found += [BlockSizes("radix", 8192, 8), BlockSizes("radix", 4096, 8), BlockSizes("radix", 16384, 8)]
    unavailable = triton.unavailable() if dtype == BF16 else {"gather", "radix"}
    return [blocks for blocks in dict.fromkeys(found) if blocks.design not in unavailable]


def scores_of(kind: str, num_rows: int, size: int, dtype) -> jax.Array:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(num_rows, size)).astype(np.float32)
    if kind == "weights":
        x = np.exp(3 * x) / size
    if kind == "special":
        x = np.round(x * 20)
        for value, share in ((np.nan, 0.2), (-np.inf, 0.2), (np.inf, 0.02), (-0.0, 0.1), (-np.nan, 0.02)):
            x[generator.uniform(size=x.shape) < share] = value
    if kind == "constant":
        x[:] = 1.5
    return jnp.asarray(x).astype(dtype)


def check(run: Run) -> None:
    """Against the stable sort, every design, with ties and special values; poisoned past the length."""
    cases = [
        (*case, dtype)
        for case in (CHECKS if run.tiny else CHECKS + CHECKS_FULL)
        for dtype in (jnp.bfloat16, jnp.float32)
    ]
    run.attempt_all((f"selection {case}", functools.partial(check_one, run, *case)) for case in cases)


def check_one(run: Run, num_rows: int, size: int, width: int, dtype) -> None:
    generator = np.random.default_rng(1)
    k = jnp.asarray(generator.integers(0, width + width // 4 + 2, num_rows), jnp.int32).at[0].set(width)
    length = jnp.asarray(generator.integers(-1, size + 2, num_rows), jnp.int32).at[0].set(size)
    past = jnp.arange(size) >= length[:, None]
    truth = jax.jit(functools.partial(reference.row_selection, width=width))
    # One cut of each, and what is chosen.
    checked = {blocks.design: blocks for blocks in reversed(designs(size, dtype))}
    checked = [*checked.values(), choose_block_sizes(num_rows, size, dtype, triton.unavailable())]
    calls = [
        jax.jit(functools.partial(triton.row_selection, width=width, blocks=blocks, interpret=run.tiny))
        for blocks in checked
    ]
    for kind in ("weights", "special", "constant"):
        scores = scores_of(kind, num_rows, size, dtype)
        want = truth(scores, length, k)
        wrong = [
            f"{blocks} {poison}"
            for blocks, call in zip(checked, calls, strict=True)
            for poison in (jnp.nan, jnp.inf)
            if not same(call(jnp.where(past, poison, scores).astype(dtype), length, k), want)
        ]
        label = f"selection {num_rows} {size} {width} {jnp.dtype(dtype).name} {kind}"
        run.check(label, not wrong, "; ".join(wrong) or "equal")


def bench(run: Run) -> None:
    for case in TINY_CASES if run.tiny else CASES:
        run.attempt(str(case), functools.partial(time_selection, run, *case))


def time_selection(run: Run, num_rows: int, size: int, count: int, dtype) -> None:
    nbytes = num_rows * size * jnp.dtype(dtype).itemsize + 4 * num_rows * count
    sets = [
        (jnp.exp(3 * random(i, (num_rows, size), jnp.float32)).astype(dtype) / size,) for i in range(num_sets(nbytes))
    ]
    length = jnp.full((num_rows,), size, jnp.int32)
    k = jnp.full((num_rows,), count, jnp.int32)
    case = f"{[num_rows, size]} {jnp.dtype(dtype).name} k={count}"
    print(f"\nrow_selection {case}", flush=True)

    entries: list[tuple[str, Callable]] = []

    def report(label: str, prepare: Callable) -> None:
        entries.append((label, prepare))

    def ours(blocks):
        # The next k depends on the rows selected, by nothing.
        def step(k, scores):
            rows, got = triton.row_selection(scores, length, k, width=count, blocks=blocks, interpret=run.tiny)
            return got + jnp.minimum(rows[:, 0], 0)

        return loop(step, k, sets, nbytes)

    chosen = choose_block_sizes(num_rows, size, dtype, triton.unavailable())
    report(f"ours {chosen}", lambda: ours(chosen))
    for blocks in designs(size, dtype) if run.candidates else ():
        if blocks != chosen:
            report(f"  {blocks}".replace("BlockSizes", ""), lambda b=blocks: ours(b))

    def top_k():
        step = lambda k, scores: k + jnp.minimum(jax.lax.top_k(scores, count)[1][:, 0], 0)  # noqa: E731
        return loop(step, k, sets, nbytes)

    report("lax.top_k (unsorted by position)", top_k)
    run.measure("row_selection", case, entries, nbytes)
    total = len(sets)
    sets.clear()

    def torch_topk():
        import torch

        kind = torch.bfloat16 if dtype == jnp.bfloat16 else torch.float32
        data = [(torch.rand(num_rows, size, device="cuda").to(kind),) for _ in range(total)]
        return torch_time(lambda x: torch.topk(x, count, dim=1, sorted=False), data)

    if run.torch:
        run.measure("row_selection", case, [("torch.topk (unsorted by position)", lambda: torch_topk)], nbytes)
