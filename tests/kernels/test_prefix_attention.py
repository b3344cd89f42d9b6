"""`prefix_attention`: every backend against float64 NumPy, and what must not change its result."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import (
    BACKENDS,
    BF16,
    CAPACITIES,
    DTYPES,
    F16,
    F32,
    KERNELS,
    TOLERANCE,
    compiled,
    covering,
    error,
    head_logits,
    normal,
    poisoned,
    softmax,
    weighted,
)

from pallas_kernels import prefix_attention
from pallas_kernels.prefix_attention import reference, xla


def inputs(batch, queries, head_dim, capacity, dtype, listed=False, kv_heads=2):
    """Operands with a sequence more than there are queries for, the cache row of each row, and which are seen [B',S].

    The first prefix fills the cache, one is empty, one lies in between.
    """
    q = normal(0, (batch, kv_heads, queries, head_dim), dtype)
    k, v = (normal(seed, (batch + 1, capacity, kv_heads, head_dim), dtype) for seed in (1, 2))
    start = np.array([capacity, 0, capacity // 2 + 1][:batch], np.int32)
    rows = None
    if listed:
        # padding, and rows at or past the start
        rows = np.random.default_rng(3).integers(-5, capacity + 5, (batch, capacity)).astype(np.int32)
    cache_rows = np.arange(capacity) if rows is None else rows
    seen = np.zeros((batch + 1, capacity), bool)
    seen[:batch] = (cache_rows >= 0) & (cache_rows < start[:, None])
    return (q, k, v, start, rows), seen


def truth(q, k, v, seen, scale):
    q, visible = q.swapaxes(1, 2), seen[:, None, None]  # each kv head has one query head
    logits = head_logits(q, k, scale)
    lse = np.logaddexp.reduce(np.where(visible, logits, -np.inf), axis=-1)
    return weighted(softmax(logits, visible), v).swapaxes(1, 2), lse.swapaxes(1, 2)


def check(operands, seen, backend, live=None, run=None):
    """Compares the live queries with the truth; unseen rows may hold anything. The log-sum-exp is never rounded."""
    q, k, v, start, rows = operands
    batch, _, queries, head_dim = q.shape
    live = queries if live is None else live
    expected = truth(q, k[:batch], v[:batch], seen[:batch], head_dim**-0.5)
    run = run or functools.partial(prefix_attention, live=np.int32(live), backend=backend)
    run = compiled(functools.partial(run, scale=head_dim**-0.5), backend)
    got = poisoned(lambda k, v: run(q, k, v, start, rows=rows), ~seen, k, v)
    assert got[0].dtype == got[1].dtype == jnp.float32
    assert error(got[0][:, :, :live], expected[0][:, :, :live]) <= TOLERANCE["out"][q.dtype.type]
    assert error(got[1][:, :, :live], expected[1][:, :, :live]) <= TOLERANCE["out"][F32]
    return got


@pytest.mark.parametrize("backend", BACKENDS)
@covering(
    full=("batch", "queries", "head_dim", "capacity"),
    batch=(1, 3),
    queries=(1, 5, 70, 200),
    head_dim=(24, 64, 128, 256),
    capacity=CAPACITIES,
    dtype=DTYPES,
    listed=(False, True),
)
def test_equals_float64(case, backend):
    check(*inputs(**case), backend)


@pytest.mark.parametrize("listed", [False, True])
def test_the_reference_equals_float64(listed):
    check(*inputs(3, 9, 64, 100, F32, listed), "xla", run=reference.prefix_attention)


@pytest.mark.parametrize("listed", [False, True])
def test_chunks_that_do_not_divide_the_capacity(monkeypatch, listed):
    monkeypatch.setattr(xla, "CHUNK", 48)
    check(*inputs(3, 9, 64, 100, F32, listed), "xla")


@pytest.mark.gpu
@pytest.mark.parametrize("listed", [False, True])
def test_many_tiles_and_splits(listed):
    check(*inputs(3, 1000, 128, 3000, BF16, listed), "pallas")


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("live", [1, 33, 200])
def test_queries_that_are_not_wanted(live, backend):
    """The first ones are as before, the output of all is finite, and whole tiles of others are not computed."""
    operands, seen = inputs(1, 200, 16, 90, F32)
    out, lse = check(operands, seen, backend, live)
    assert np.all(np.isfinite(out))
    assert np.any(np.asarray(lse) == -np.inf) == (live < 200)


def arguments(**changes):
    (q, k, v, start, rows), _ = inputs(2, 3, 16, 20, F32, listed=True)
    named = {"q": q, "k": k, "v": v, "start": start, "live": np.int32(3), "rows": rows, "scale": 1.0}
    return named | {"backend": "interpret"} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((2, 3, 16))}, r"q has shape \(2, 3, 16\); it must be \[B,K,Q,H\]"),
        ({"q": jnp.zeros((2, 2, 3, 16), jnp.int32)}, "q has dtype int32"),
        ({"q": jnp.zeros((2, 2, 3, 16), F16)}, "k has dtype float32; allowed: float16"),
        ({"k": jnp.zeros((3, 20, 3, 16))}, r"k has shape \(3, 20, 3, 16\); it must be \[B',S,K,H\]"),
        ({"k": jnp.zeros((1, 20, 2, 16))}, "k has 1 sequences; it must have at least q's 2"),
        ({"v": jnp.zeros((3, 20, 2, 8))}, r"v has shape \(3, 20, 2, 8\); it must be \[B',S,K,H\] like k"),
        ({"v": jnp.zeros((3, 20, 2, 16), BF16)}, "v has dtype bfloat16; allowed: float32"),
        ({"start": jnp.zeros(3, jnp.int32)}, r"start has shape \(3,\); it must be \[B\]"),
        ({"live": jnp.zeros(2, jnp.int32)}, r"live has shape \(2,\); it must be a scalar"),
        ({"rows": jnp.zeros((2, 7), jnp.int32)}, r"rows has shape \(2, 7\); it must be \[B,S\] with k's S"),
        ({"rows": jnp.zeros((2, 20))}, "rows has dtype float32; allowed: int32"),
        ({"backend": "cuda"}, "backend is 'cuda'"),
        (
            {"q": jnp.zeros((2, 2, 3, 512)), "k": jnp.zeros((2, 20, 2, 512)), "v": jnp.zeros((2, 20, 2, 512))},
            "q has head dim 512; the kernel allows at most 256",
        ),
    ],
)
def test_rejects(changes, message):
    with pytest.raises(ValueError, match=message):
        prefix_attention(**arguments(**changes))
