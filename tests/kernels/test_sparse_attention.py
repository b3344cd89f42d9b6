"""`sparse_attention`: every backend against float64 NumPy, and what must not change its result."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import (
    BACKENDS,
    BF16,
    F16,
    F32,
    KERNELS,
    TOLERANCE,
    attention_cases,
    compiled,
    error,
    head_logits,
    operands,
    poisoned,
    softmax,
    starts,
    weighted,
)

from pallas_kernels import cached_attention, sparse_attention
from pallas_kernels.sparse_attention import triton
from pallas_kernels.sparse_attention.blocks import BlockSizes


def inputs(batch, num_rows, group, head_dim, capacity, dtype, listed, window, kv_heads=2):
    """Operands, with lists of random rows padded with -1, and which cache rows [B,T,S] each query sees."""
    q, k, v = operands(batch, num_rows, group, head_dim, capacity, dtype, kv_heads)
    start = starts(batch, num_rows, capacity)
    generator = np.random.default_rng(3)
    valid = np.maximum(start + num_rows - window, 0).astype(np.int32) if window else None
    rows = np.full((batch, listed), -1, np.int32)
    seen = np.zeros((batch, num_rows, capacity), bool)
    for b in range(batch):
        # Without a window rows past the position are listed too: they are not seen.
        limit = valid[b] if window else capacity
        count = min(limit, int(listed * (1.0, 0.3, 0.6)[b]))
        rows[b, :count] = np.sort(generator.permutation(limit)[:count])
        position = start[b] + np.arange(num_rows)
        seen[b][:, rows[b, :count]] = rows[b, :count] <= position[:, None]
        if window:
            seen[b][:, limit:] = np.arange(limit, capacity) <= position[:, None]
    return (q, k, v, rows, start, valid), seen


def check(operands, seen, window, backend, run=None):
    """Compares with the truth; unseen rows may hold anything."""
    q, k, v, rows, start, valid = operands
    scale = q.shape[-1] ** -0.5
    expected = weighted(softmax(head_logits(q, k, scale), seen[:, :, None]), v)
    run = run or functools.partial(sparse_attention, backend=backend)
    run = compiled(functools.partial(run, scale=scale, window=window), backend)
    unseen = ~seen.any(axis=1)
    got = poisoned(lambda k, v: run(q, k, v, rows, start, valid=valid), unseen, k, v)
    assert error(got, expected) <= TOLERANCE["out"][q.dtype.type]


@pytest.mark.parametrize("backend", BACKENDS)
@attention_cases(listed=(1, 40, 63), window=(0, 12))
def test_equals_float64(case, backend):
    check(*inputs(**case), case["window"], backend)


# splits that divide the steps and that do not, more splits than a short list has steps
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    "blocks", [BlockSizes(16, 16, 1), BlockSizes(64, 16, 3), BlockSizes(32, 32, 4), BlockSizes(16, 16, 9)]
)
def test_every_cut_gives_the_same(blocks, backend):
    kernel = functools.partial(triton.sparse_attention, layer=0, blocks=blocks, interpret=backend == "interpret")

    def run(q, k, v, rows, *rest, **options):
        count = jnp.full((1, rows.shape[0]), rows.shape[1], jnp.int32)
        return kernel(q, k, v, rows[None], *rest, count=count, **options)

    check(*inputs(3, 5, 8, 64, 200, F16, 100, 7), 7, backend, run)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layer", [0, 2])
def test_the_list_of_a_layer(layer, backend):
    operands_, seen = inputs(3, 1, 2, 64, 100, F32, 40, 7)
    rows = operands_[3]
    count = np.array([[0] * 3] * 3, np.int32)
    count[layer] = (rows >= 0).sum(axis=1)
    rows[rows < 0] = 0  # counted twice if it is looked at

    def run(q, k, v, rows, *rest, **options):
        lists = jnp.stack([jnp.zeros_like(rows)] * 3).at[layer].set(rows)
        return sparse_attention(q, k, v, lists, *rest, layer=layer, count=count, backend=backend, **options)

    check(operands_, seen, 7, backend, run)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("listed", "window"), [(40, 0), (40, 7), (1100, 5)])
def test_entries_past_the_count_are_not_looked_at(listed, window, backend):
    operands_, seen = inputs(3, 2, 2, 64, 1300, BF16, listed, window, kv_heads=1)
    rows = operands_[3]
    count = (rows >= 0).sum(axis=1).astype(np.int32)
    rows[rows < 0] = 0  # counted twice if it is looked at
    check(operands_, seen, window, backend, functools.partial(sparse_attention, count=count, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts_outside_the_list(backend):
    operands_, seen = inputs(3, 2, 2, 64, 100, F32, 40, 0)
    operands_[3][2], seen[2] = 5, False
    count = np.array([41, 2**31 - 1, -3], np.int32)
    check(operands_, seen, 0, backend, functools.partial(sparse_attention, count=count, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_rows_give_dense_attention(backend):
    (q, k, v, _, start, _), _ = inputs(3, 5, 6, 64, 70, F32, 1, 0)
    rows = np.tile(np.arange(70, dtype=np.int32), (3, 1))
    sparse = compiled(functools.partial(sparse_attention, scale=0.1, backend=backend), backend)(q, k, v, rows, start)
    dense, _ = compiled(functools.partial(cached_attention, scale=0.1, backend=backend), backend)(q, k, v, start)
    assert error(sparse, dense) <= TOLERANCE["out"][np.float32]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [0, 4])
def test_nothing_seen_gives_zeros(window, backend):
    (q, k, v, rows, _, _), _ = inputs(3, 2, 5, 64, 40, F32, 20, window)
    rows[:2] = -1  # the last query's position is negative, whatever is listed
    k[:] = v[:] = np.nan
    start = np.array([30, 10, -2], np.int32)
    valid = start + 2 if window else None
    run = compiled(functools.partial(sparse_attention, scale=1.0, window=window, backend=backend), backend)
    np.testing.assert_array_equal(run(q, k, v, rows, start, valid=valid), 0)


# rows outside the cache and padding in the middle of a list are not seen, on any backend
@pytest.mark.parametrize("backend", BACKENDS)
def test_order_and_padding_do_not_matter(backend):
    (q, k, v, _, start, _), _ = inputs(1, 2, 5, 64, 40, F32, 20, 0)
    run = compiled(functools.partial(sparse_attention, scale=0.3, backend=backend), backend)
    sorted_rows = np.array([[2, 5, 9, 30, -1, -1, -1, -1]], np.int32)
    mixed = np.array([[-1, 30, 2, -7, 9, 5, 40, 2**31 - 1]], np.int32)
    assert error(run(q, k, v, mixed, start), run(q, k, v, sorted_rows, start)) <= TOLERANCE["out"][np.float32]


def arguments(**changes):
    (q, k, v, rows, start, valid), _ = inputs(2, 3, 2, 16, 20, F32, 5, 4)
    named = {"q": q, "k": k, "v": v, "rows": rows, "start": start, "valid": valid, "window": 4, "scale": 1.0}
    return named | {"backend": "interpret"} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((2, 4, 16))}, r"q has shape \(2, 4, 16\); it must be \[B,T,N,H\]"),
        ({"k": jnp.zeros((2, 20, 2, 16), BF16)}, "k has dtype bfloat16; allowed: float32"),
        ({"k": jnp.zeros((2, 20, 3, 16)), "v": jnp.zeros((2, 20, 3, 16))}, "q has 4 heads and k has 3"),
        ({"v": jnp.zeros((2, 21, 2, 16))}, r"v has shape \(2, 21, 2, 16\); it must be \[B,S,K,H\] like k"),
        ({"rows": jnp.zeros((1, 5), jnp.int32)}, r"rows has shape \(1, 5\); it must be \[B,M\], here \[2, any >= 1\]"),
        ({"rows": jnp.zeros((2, 0), jnp.int32)}, r"rows has shape \(2, 0\)"),
        ({"rows": jnp.zeros((2, 5))}, "rows has dtype float32; allowed: int32"),
        ({"layer": 0}, r"rows has shape \(2, 5\); it must be \[L,B,M\] with layer"),
        ({"layer": 3, "rows": jnp.zeros((3, 2, 5), jnp.int32)}, "layer is 3; rows has layers 0 to 2"),
        ({"start": jnp.zeros((2, 1), jnp.int32)}, r"start has shape \(2, 1\); it must be \[B\]"),
        ({"valid": jnp.zeros(3, jnp.int32)}, r"valid has shape \(3,\); it must be \[B\]"),
        ({"window": 0}, "window is 0; with valid it must be at least 1"),
        ({"valid": None}, "window is 4 without valid; give valid"),
        ({"backend": "cuda"}, "backend is 'cuda'"),
        (
            {"q": jnp.zeros((2, 3, 4, 512)), "k": jnp.zeros((2, 8, 2, 512)), "v": jnp.zeros((2, 8, 2, 512))},
            "q has head dim 512; the kernel allows at most 256",
        ),
    ],
)
def test_rejects(changes, message):
    with pytest.raises(ValueError, match=message):
        sparse_attention(**arguments(**changes))
