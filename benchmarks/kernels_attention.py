"""The three attention ops: correctness at full size, then speed beside what JAX and PyTorch offer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import kernels_rivals as rivals
import numpy as np
from kernels_timing import Run, cache_sets, loop, random, relative_error, same, score_error

from pallas_kernels import attention_scores, cached_attention, sparse_attention
from pallas_kernels.attention_scores import blocks as scores_blocks
from pallas_kernels.attention_scores import reference as scores_reference
from pallas_kernels.attention_scores import triton as scores_triton
from pallas_kernels.cached_attention import blocks as dense_blocks
from pallas_kernels.cached_attention import reference as dense_reference
from pallas_kernels.cached_attention import triton as dense_triton
from pallas_kernels.sparse_attention import blocks as sparse_blocks
from pallas_kernels.sparse_attention import reference as sparse_reference
from pallas_kernels.sparse_attention import triton as sparse_triton

BF16, F32, F16 = jnp.bfloat16, jnp.float32, jnp.float16
BOUND = {BF16: 1e-2, F16: 2e-3, F32: 1e-5}

# B, T, K, G, H, S, dtype, score mode, per row
DENSE_CHECKS = [
    (3, 1, 2, 6, 64, 100, BF16, None, False),
    (3, 5, 2, 5, 96, 63, F32, "weight", False),
    (3, 7, 1, 24, 128, 1000, BF16, "weight", True),
    (3, 2, 2, 7, 128, 1000, F32, "logit", False),
    (3, 7, 2, 24, 256, 63, F32, "logit", True),
    (3, 40, 2, 3, 64, 100, BF16, "logit", True),
]
DENSE_CHECKS_FULL = [
    (3, 5, 2, 1, 256, 1000, BF16, "weight", False),
    (3, 7, 2, 24, 96, 1000, BF16, "logit", True),
    (3, 5, 2, 8, 96, 1000, F16, "weight", True),
    (1, 700, 4, 7, 128, 1000, BF16, None, False),
    (2, 300, 2, 6, 64, 1000, F32, "weight", False),
    (1, 1, 4, 7, 128, 4096, BF16, "weight", False),
    (1, 7, 4, 7, 128, 4096, BF16, "logit", False),
    (4, 5, 8, 8, 128, 32768, BF16, "weight", False),
    (4, 5, 8, 8, 128, 32768, BF16, "logit", False),
]
# B, T, K, G, H, S, M, window, dtype
SPARSE_CHECKS = [(3, 5, 2, 5, 96, 1000, 70, 7, BF16), (3, 2, 2, 6, 64, 100, 40, 0, F32)]
SPARSE_CHECKS_FULL = [
    (3, 7, 1, 24, 128, 4096, 512, 12, BF16),
    (1, 1, 4, 7, 128, 4096, 287, 12, BF16),
    (3, 5, 2, 8, 256, 4096, 2048, 12, F16),
    (16, 6, 8, 8, 128, 32768, 512, 12, BF16),
    (2, 6, 8, 8, 128, 32768, 2048, 12, BF16),
]
# B, R, K, G, H, S, heads, dtype
SCORES_CHECKS = [(3, 2, 2, 5, 64, 200, (0, 7, 8), BF16), (2, 5, 2, 8, 96, 200, (1, 3, 9), F32)]
SCORES_CHECKS_FULL = [
    (2, 6, 2, 6, 128, 32768, (1, 4, 7), BF16),
    (1, 16, 4, 7, 128, 8192, tuple(range(28)), BF16),
    (2, 1, 2, 8, 256, 1000, (15,), F16),
]


def starts(batch: int, rows: int, capacity: int) -> jax.Array:
    """The longest row fills the cache, one row sees nothing at first, one lies in between."""
    ragged = [capacity - rows, -min(rows, 2), (capacity - rows) // 2]
    return jnp.array((ragged + [1, capacity // 3] * batch)[:batch], jnp.int32)


def upcast(*arrays: jax.Array) -> list[jax.Array]:
    return [x.astype(F32) for x in arrays]


def poisoned(x: jax.Array, unseen: jax.Array, value: float) -> jax.Array:
    return jnp.where(unseen[:, :, None, None], value, x).astype(x.dtype)


def verdict(run: Run, label: str, dtype, errors: dict[str, float], repeat: bool) -> None:
    detail = " ".join(f"{name} {error:.1e}" for name, error in errors.items()) + f" repeat {repeat}"
    run.check(label, max(errors.values()) < BOUND[dtype] and repeat, detail)


def check_dense(run: Run, case: tuple) -> None:
    batch, rows, kv_heads, group, head_dim, capacity, dtype, mode, per_row = case
    q = random(1, (batch, rows, kv_heads * group, head_dim), dtype)
    k, v = (random(i, (batch, capacity, kv_heads, head_dim), dtype) for i in (2, 3))
    start = starts(batch, rows, capacity)
    scratch = jnp.arange(capacity) >= start[:, None] + rows
    options = {"scale": head_dim**-0.5}
    if mode:
        pairs = [[0, rows - 1], [rows - 1, rows - 1], [0, 0]] * batch
        options |= {"score_mode": mode, "per_row": per_row, "scored_rows": jnp.array(pairs[:batch], jnp.int32)}
    call = jax.jit(functools.partial(cached_attention, backend=run.backend, **options))
    got = call(q, poisoned(k, scratch, jnp.nan), poisoned(v, scratch, jnp.nan), start)
    again = call(q, poisoned(k, scratch, 1e4), poisoned(v, scratch, 1e4), start)
    want = jax.jit(functools.partial(dense_reference.cached_attention, **options))(*upcast(q, k, v), start)
    errors = {"out": relative_error(got[0], want[0])}
    if mode:
        errors["scores"] = score_error(got[1], want[1])
    label = "dense " + " ".join(str(x) for x in (*case[:6], jnp.dtype(dtype).name, mode, per_row))
    verdict(run, label, dtype, errors, same(got, again))


def check_large(run: Run) -> None:
    """The last batch row of a cache of 2.7e9 elements, which 32-bit offsets do not reach."""
    batch, rows, kv_heads, group, head_dim, capacity = 20, 5, 8, 8, 128, 131072
    q = random(1, (batch, rows, kv_heads * group, head_dim))
    k, v = (random(i, (batch, capacity, kv_heads, head_dim)) for i in (2, 3))
    start = jnp.full((batch,), capacity - rows, jnp.int32)
    scored = jnp.tile(jnp.array([[0, rows - 1]], jnp.int32), (batch, 1))
    last = upcast(*(x[-1:] for x in (q, k, v)))
    scale = {"scale": head_dim**-0.5}
    for mode in ("weight", "logit"):
        options = scale | {"score_mode": mode}
        got = jax.jit(functools.partial(cached_attention, backend="pallas", **options))(
            q, k, v, start, scored_rows=scored
        )
        want = jax.jit(functools.partial(dense_reference.cached_attention, **options))(
            *last, start[-1:], scored_rows=scored[-1:]
        )
        errors = {"out": relative_error(got[0][-1:], want[0]), "scores": score_error(got[1][-1:], want[1])}
        verdict(run, f"dense 2.7e9 elements {mode}", BF16, errors, True)
    listed = jnp.tile(jnp.arange(131, capacity, 257, dtype=jnp.int32), (batch, 1))
    got = jax.jit(functools.partial(sparse_attention, backend="pallas", **scale))(q, k, v, listed, start)
    want = jax.jit(functools.partial(sparse_reference.sparse_attention, **scale))(*last, listed[-1:], start[-1:])
    verdict(run, "sparse 2.7e9 elements", BF16, {"out": relative_error(got[-1:], want)}, True)
    positions = start[:, None] + jnp.arange(2)
    call = functools.partial(attention_scores, heads=(3, 60), backend="pallas", **scale)
    got = jax.jit(call)(q[:, :2], k, positions, start)
    want = jax.jit(functools.partial(scores_reference.attention_scores, heads=(3, 60), **scale))(
        last[0][:, :2], last[1], positions[-1:], start[-1:]
    )
    verdict(run, "scores 2.7e9 elements", BF16, {"scores": score_error(got[-1:], want)}, True)


def check_sparse(run: Run, case: tuple) -> None:
    batch, rows, kv_heads, group, head_dim, capacity, listed, window, dtype = case
    q = random(1, (batch, rows, kv_heads * group, head_dim), dtype)
    k, v = (random(i, (batch, capacity, kv_heads, head_dim), dtype) for i in (2, 3))
    start = starts(batch, rows, capacity)
    valid = jnp.maximum(start + rows - window, 0) if window else None
    generator = np.random.default_rng(0)
    table, seen = np.full((batch, listed), -1, np.int32), np.zeros((batch, capacity), bool)
    for b in range(batch):
        end = max(int(start[b]) + rows, 0)
        limit = int(valid[b]) if window else end
        count = min(limit, int(listed * generator.uniform(0.3, 1.2)), listed)
        table[b, :count] = np.sort(generator.permutation(limit)[:count])
        seen[b, table[b, :count]] = True
        seen[b, limit:end] = bool(window)
    unseen, table = jnp.asarray(~seen), jnp.asarray(table)
    options = {"valid": valid, "window": window, "scale": head_dim**-0.5}
    call = jax.jit(functools.partial(sparse_attention, backend=run.backend, **options))
    got = call(q, poisoned(k, unseen, jnp.nan), poisoned(v, unseen, jnp.nan), table, start)
    again = call(q, poisoned(k, unseen, 1e4), poisoned(v, unseen, 1e4), table, start)
    want = jax.jit(functools.partial(sparse_reference.sparse_attention, **options))(*upcast(q, k, v), table, start)
    label = "sparse " + " ".join(str(x) for x in (*case[:8], jnp.dtype(dtype).name))
    verdict(run, label, dtype, {"out": relative_error(got, want)}, same(got, again))


def check_scores(run: Run, case: tuple) -> None:
    batch, rows, kv_heads, group, head_dim, capacity, heads, dtype = case
    q = random(1, (batch, rows, kv_heads * group, head_dim), dtype)
    k = random(2, (batch, capacity, kv_heads, head_dim), dtype)
    positions = starts(batch, rows, capacity)[:, None] + jnp.arange(rows)
    length = jnp.array([capacity - rows, 1, capacity // 4][:batch], jnp.int32)
    scratch = jnp.arange(capacity) > jnp.max(positions, axis=1)[:, None]
    options = {"heads": heads, "scale": head_dim**-0.5}
    call = jax.jit(functools.partial(attention_scores, backend=run.backend, **options))
    got = call(q, poisoned(k, scratch, jnp.nan), positions, length)
    again = call(q, poisoned(k, scratch, 1e4), positions, length)
    want = jax.jit(functools.partial(scores_reference.attention_scores, **options))(*upcast(q, k), positions, length)
    label = "scores " + " ".join(str(x) for x in (*case[:6], len(heads), jnp.dtype(dtype).name))
    verdict(run, label, dtype, {"scores": score_error(got, want)}, same(got, again))


def check(run: Run) -> None:
    """Every op against its float32 reference, with scratch rows poisoned, and bit-equal when repeated."""
    for function, cases, full in (
        (check_dense, DENSE_CHECKS, DENSE_CHECKS_FULL),
        (check_sparse, SPARSE_CHECKS, SPARSE_CHECKS_FULL),
        (check_scores, SCORES_CHECKS, SCORES_CHECKS_FULL),
    ):
        chosen = cases if run.tiny else cases + full
        run.attempt_all((f"{function.__name__} {case}", functools.partial(function, run, case)) for case in chosen)
    if not run.tiny:
        run.attempt("check above 2^31 elements", lambda: check_large(run))


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
    Case("decode 32K batch 1 (7B)", *(1, 1, 4, 7, 128, 32768), candidates=(changed(num_splits=33),)),
    Case("prefill 8K (7B)", *(1, 8192, 4, 7, 128, 8192), start=0, rivals=("jax", "torch")),
    Case("prefill 8K (1.5B)", *(1, 8192, 2, 6, 128, 8192), start=0),
)
TINY_DENSE_CASES = (
    Case("verify", 1, 5, 2, 8, 64, 128, scores=True, candidates=(changed(num_splits=2),)),
    Case("prefill", 1, 64, 2, 3, 64, 64, start=0),
)
# name, B, T, K, G, H, S, M, window
SPARSE_CASES = (
    ("512 rows of 32K, batch 16", 16, 6, 8, 8, 128, 32768, 512, 12),
    ("2048 rows of 32K, batch 16", 16, 6, 8, 8, 128, 32768, 2048, 12),
    ("287 rows of 4K, batch 1 (7B)", 1, 1, 4, 7, 128, 4096, 287, 12),
    ("2294 rows of 32K, batch 1 (7B)", 1, 1, 4, 7, 128, 32768, 2294, 12),
)
TINY_SPARSE_CASES = (("tiny", 1, 2, 2, 4, 64, 128, 40, 4),)
# name, B, R, K, G, H, S, heads
SCORES_CASES = (
    ("3 heads of 2 groups, 32K, batch 16", 16, 6, 2, 6, 128, 32768, (1, 4, 7)),
    ("1 head, 32K, batch 1 (7B)", 1, 6, 4, 7, 128, 32768, (5,)),
)
TINY_SCORES_CASES = (("tiny", 1, 2, 2, 4, 64, 128, (1, 5)),)


def brief(blocks: object) -> str:
    fields = dataclasses.asdict(blocks)
    return " ".join(f"{name}={int(value)}" for name, value in fields.items() if value is not False)


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

    def ours(blocks, mode=None):
        options = {"scale": head_dim**-0.5, "blocks": blocks, "interpret": run.tiny}
        if mode:
            options |= {"score_mode": mode, "scored_rows": jnp.tile(jnp.array([[0, rows - 1]], jnp.int32), (batch, 1))}
        attend = lambda q, k, v: dense_triton.cached_attention(q, k, v, position, **options)  # noqa: E731
        step = attend if mode else (lambda q, k, v: attend(q, k, v)[0])
        return loop(step, q, sets, guess, extra=mode is not None)

    chosen = dense_blocks.choose_block_sizes(batch, rows, kv_heads, case.group, capacity, head_dim, q.dtype)
    report(f"ours {brief(chosen)}", lambda: ours(chosen))
    for mode in ("weight", "logit") if case.scores else ():
        report(f"ours, {mode} scores", lambda m=mode: ours(chosen, m))
    for changes in case.candidates if run.candidates else ():
        blocks = dataclasses.replace(chosen, **changes)
        report("  " + " ".join(f"{name}={value}" for name, value in changes.items()), lambda b=blocks: ours(b))
    report("ours, repeated", lambda: ours(chosen))
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


def time_sparse(run: Run, case: tuple) -> None:
    name, batch, rows, kv_heads, group, head_dim, capacity, listed, window = case
    sets = cache_sets(batch, capacity, kv_heads, head_dim)
    shape = (batch, rows, kv_heads * group, head_dim)
    q = random(5, shape)
    start = jnp.full((batch,), capacity - rows, jnp.int32)
    valid = start + rows - window
    generator = np.random.default_rng(0)
    # The data lists differ from set to set, so that small lists do not stay in the L2 cache either.
    lists = [
        np.sort(np.stack([generator.permutation(capacity - window)[:listed] for _ in range(batch)]), axis=1)
        for _ in sets
    ]
    sets = [(k, v, jnp.asarray(rows_, jnp.int32)) for (k, v), rows_ in zip(sets, lists, strict=True)]
    nbytes = 2 * batch * (listed + window) * kv_heads * head_dim * 2 + 2 * q.nbytes
    print(f"\nsparse_attention {name}: q {list(shape)} k {list(sets[0][0].shape)}", flush=True)

    entries: list[tuple[str, Callable]] = []

    def report(label: str, prepare: Callable) -> None:
        entries.append((label, prepare))

    options = {"valid": valid, "window": window, "scale": head_dim**-0.5}

    def ours(blocks):
        call = functools.partial(sparse_triton.sparse_attention, **options, blocks=blocks, interpret=run.tiny)
        return loop(lambda q, k, v, table: call(q, k, v, table, start), q, sets, nbytes)

    chosen = sparse_blocks.choose_block_sizes(batch, rows, kv_heads, group, listed, window, head_dim, q.dtype)
    report(f"ours {brief(chosen)}", lambda: ours(chosen))
    change = functools.partial(dataclasses.replace, chosen)
    steps = -(-(listed + window) // chosen.block_m)
    options_for = [
        change(num_splits=1),
        change(num_splits=2),
        change(num_splits=max(1, steps // 2)),
        change(num_splits=steps),
        change(num_stages=4),
        change(num_stages=2),
        change(block_m=32, num_stages=4),
        change(block_m=128, num_stages=2),
        change(find_end=not chosen.find_end),
    ]
    for blocks in dict.fromkeys(options_for) if run.candidates else ():
        if blocks != chosen:
            report(f"  {brief(blocks)}", lambda b=blocks: ours(b))
    reference = functools.partial(sparse_reference.sparse_attention, **options)
    report("XLA gather", lambda: loop(lambda q, k, v, t: reference(q, k, v, t, start), q, sets, nbytes))
    run.measure("sparse_attention", name, entries, nbytes)


def time_scores(run: Run, case: tuple) -> None:
    name, batch, rows, kv_heads, group, head_dim, capacity, heads = case
    sets = [(k,) for k, _ in cache_sets(batch, capacity, kv_heads, head_dim)]
    q = random(5, (batch, rows, kv_heads * group, head_dim))
    length = jnp.full((batch,), capacity - rows, jnp.int32)
    positions = length[:, None] + jnp.arange(rows)
    chosen_heads = len({head // group for head in heads})
    nbytes = batch * capacity * chosen_heads * head_dim * 2 + 4 * batch * capacity
    print(f"\nattention_scores {name}: q {list(q.shape)} k {list(sets[0][0].shape)} heads {heads}", flush=True)

    entries: list[tuple[str, Callable]] = []

    def report(label: str, prepare: Callable) -> None:
        entries.append((label, prepare))

    def timed(call):
        # The next query depends on the scores, by nothing.
        def step(q, k):
            scores = call(q, k, positions, length, heads, scale=head_dim**-0.5)
            return q + jnp.minimum(scores[:, :1, None, None], 0).astype(q.dtype), scores

        return loop(step, q, sets, nbytes, extra=True)

    chosen = scores_blocks.choose_block_sizes(batch, chosen_heads, capacity, head_dim, q.dtype)
    ours = functools.partial(scores_triton.attention_scores, interpret=run.tiny)
    report(f"ours {brief(chosen)}", lambda: timed(functools.partial(ours, blocks=chosen)))
    change = functools.partial(dataclasses.replace, chosen)
    for blocks in (
        (
            change(num_splits=max(1, chosen.num_splits // 2)),
            change(num_splits=2 * chosen.num_splits),
            change(block_s=128, num_stages=3),
            change(num_stages=3),
        )
        if run.candidates
        else ()
    ):
        report(f"  {brief(blocks)}", lambda b=blocks: timed(functools.partial(ours, blocks=b)))
    report("XLA", lambda: timed(scores_reference.attention_scores))
    run.measure("attention_scores", name, entries, nbytes)


def bench_dense(run: Run) -> None:
    for case in TINY_DENSE_CASES if run.tiny else DENSE_CASES:
        run.attempt(case.name, lambda case=case: time_dense(run, case))


def bench_sparse(run: Run) -> None:
    for case in TINY_SPARSE_CASES if run.tiny else SPARSE_CASES:
        run.attempt(case[0], lambda case=case: time_sparse(run, case))


def bench_scores(run: Run) -> None:
    for case in TINY_SCORES_CASES if run.tiny else SCORES_CASES:
        run.attempt(case[0], lambda case=case: time_scores(run, case))
