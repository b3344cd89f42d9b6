"""The three attention ops against their float32 references, at full size."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from kernels_timing import Run, random, relative_error, same, score_error

from pallas_kernels import attention_scores, cached_attention, sparse_attention
from pallas_kernels.attention_scores import reference as scores_reference
from pallas_kernels.cached_attention import reference as dense_reference
from pallas_kernels.sparse_attention import reference as sparse_reference

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
