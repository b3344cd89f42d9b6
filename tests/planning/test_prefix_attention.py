"""Attention to a shared prefix against a float64 softmax, in chunks and as the kernel, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.planning import prefix_attention as module
from jaxspec.planning.prefix_attention import prefix_attention
from tests.kernels.compile_for_h200 import compile_for_h200
from tests.kernels.machine_code import usage

SCALE = 0.3


def operands(queries, head_dim, capacity, batch=2, kv_heads=2, more=1):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(batch, kv_heads, queries, head_dim)).astype(np.float32)
    kv = rng.normal(size=(2, batch + more, capacity, kv_heads, head_dim)).astype(np.float32)
    return q, *kv


def expected(q, k, v, seen):
    """Output and log-sum-exp in float64 of the rows seen [B, S]."""
    q, k, v = (x.astype(np.float64) for x in (q, k[: len(q)], v[: len(q)]))
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b in range(len(q)):
        logits = SCALE * np.einsum("kqh,skh->kqs", q[b], k[b, seen[b]])
        if logits.shape[-1]:
            lse[b] = np.logaddexp.reduce(logits, axis=-1)
            out[b] = np.einsum("kqs,skh->kqh", np.exp(logits - lse[b, ..., None]), v[b, seen[b]])
    return out, lse


def check(found, wanted, live):
    for mine, other in zip(found, wanted, strict=True):
        assert np.all(np.isfinite(mine[:, :, :live]) == np.isfinite(other[:, :, :live]))
        np.testing.assert_allclose(mine[:, :, :live], other[:, :, :live], atol=2e-5)


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize(
    ("queries", "head_dim", "capacity", "start"),
    [(5, 16, 40, (40, 7)), (70, 24, 100, (64, 0)), (40, 64, 700, (700, 129)), (3, 8, 20, (1, 20))],
)
def test_a_prefix(monkeypatch, backend, queries, head_dim, capacity, start):
    """Ragged lengths, among them 0; NaN behind each; a sequence too many; chunks that do not divide the capacity."""
    monkeypatch.setattr(module, "CHUNK", 48)
    q, k, v = operands(queries, head_dim, capacity)
    start = np.array(start, np.int32)
    seen = np.arange(capacity) < start[:, None]
    wanted = expected(q, k, v, seen)
    for x in (k, v):
        x[:2][~seen], x[2] = np.nan, np.nan
    found = prefix_attention(q, k, v, start, jnp.int32(queries), scale=SCALE, backend=backend)
    check(found, wanted, queries)


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_copies_of_listed_rows(backend):
    """Padding and rows at or past `start` are not seen, whatever their copies hold."""
    q, k, v = operands(9, 16, 70, more=0)
    rows = np.random.default_rng(1).integers(-5, 50, (2, 70)).astype(np.int32)
    start = np.array([40, 3], np.int32)
    seen = (rows >= 0) & (rows < start[:, None])
    wanted = expected(q, k, v, seen)
    k[~seen] = v[~seen] = np.nan
    found = prefix_attention(q, k, v, start, jnp.int32(9), scale=SCALE, rows=rows, backend=backend)
    check(found, wanted, 9)


@pytest.mark.parametrize("live", [1, 33, 200])
def test_queries_that_are_not_wanted(live):
    """The first ones are as before, all are finite, and whole tiles of others are not computed."""
    q, k, v = operands(200, 16, 90)
    start = np.array([90, 50], np.int32)
    found = prefix_attention(q, k, v, start, jnp.int32(live), scale=SCALE, backend="interpret")
    check(found, expected(q, k, v, np.arange(90) < start[:, None]), live)
    assert np.all(np.isfinite(found[0]))
    assert np.any(np.asarray(found[1]) == -np.inf) == (live < 200)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": np.zeros((2, 20, 2, 4), np.float32)}, "k and v must be"),
        ({"k": np.zeros((1, 20, 2, 8), np.float32), "v": np.zeros((1, 20, 2, 8), np.float32)}, "k and v must be"),
        ({"q": np.zeros((2, 2, 3, 8), np.float16)}, "one dtype"),
        ({"start": np.zeros(3, np.int32)}, "start must be"),
        ({"rows": np.zeros((2, 7), np.int32)}, "rows"),
    ],
)
def test_wrong_operands(change, message):
    q, k, v = operands(3, 8, 20)
    arguments = {"q": q, "k": k, "v": v, "start": np.zeros(2, np.int32), "rows": None, **change}
    with pytest.raises(ValueError, match=message):
        prefix_attention(**arguments, live=jnp.int32(3), scale=SCALE, backend="xla")


@pytest.mark.gpu
@pytest.mark.parametrize("listed", [False, True])
def test_on_a_gpu(listed):
    """bfloat16: each softmax weight is rounded by 2^-9 of itself before it meets the values."""
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in operands(1000, 128, 3000, more=0))
    start, rows = np.array([2500, 70], np.int32), None
    seen = np.arange(3000) < start[:, None]
    if listed:
        rows = np.random.default_rng(1).integers(-500, 3000, (2, 3000)).astype(np.int32)
        seen = (rows >= 0) & (rows < start[:, None])
    out, lse = prefix_attention(q, k, v, start, jnp.int32(1000), scale=SCALE, rows=rows, backend="pallas")
    wanted = expected(*(np.asarray(x, np.float32) for x in (q, k, v)), seen)
    np.testing.assert_allclose(out, wanted[0], atol=2**-9 * float(jnp.max(jnp.abs(v))) + 1e-4)
    np.testing.assert_allclose(lse, wanted[1], atol=1e-3)


@pytest.mark.gpu_compile
@pytest.mark.parametrize(
    ("batch", "queries", "head_dim", "capacity", "dtype", "listed"),
    [
        (1, 6144, 128, 32256, jnp.bfloat16, False),  # 32 branches of 32 tokens, 6 query heads a kv head
        (16, 768, 128, 32256, jnp.bfloat16, False),
        (1, 6144, 128, 2304, jnp.bfloat16, True),
        (1, 192, 128, 32256, jnp.bfloat16, False),
        (1, 3072, 64, 4096, jnp.bfloat16, False),
        (1, 6144, 128, 4096, jnp.float32, False),
    ],
)
def test_machine_code(batch, queries, head_dim, capacity, dtype, listed):
    """The kernel fits an H200, and nothing spills."""

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    def call(q, k, v, start, live, rows=None):
        return prefix_attention(q, k, v, start, live, scale=SCALE, rows=rows, backend="pallas")

    q, kv = array(batch, 2, queries, head_dim, dtype=dtype), array(batch, capacity, 2, head_dim, dtype=dtype)
    rows = [array(batch, capacity)] if listed else []
    used = usage(compile_for_h200(call, q, kv, kv, array(batch), array(), *rows))
    assert used.keys() >= {"prefix_attention", "prefix_attention_merge"}
    assert all(use.stack == 0 for use in used.values()), used
