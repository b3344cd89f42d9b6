"""`attention_scores`: every backend against float64 NumPy, and what must not change its result."""

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
)

from pallas_kernels import attention_scores
from pallas_kernels.attention_scores import triton
from pallas_kernels.attention_scores.blocks import BlockSizes


def choose(kind, group):
    """Query heads of two kv heads: one, one of each kv head, or unevenly many."""
    both = {"one": (2 * group - 1,), "two": (0, group), "many": (2 * group - 1, *range(group))}
    return both[kind]


def inputs(batch, num_rows, group, head_dim, capacity, dtype, kv_heads=2):
    q, k, _ = operands(batch, num_rows, group, head_dim, capacity, dtype, kv_heads)
    position = starts(batch, num_rows, capacity)[:, None] + np.arange(num_rows, dtype=np.int32)
    # rows scored beyond every position, a single row, and a length out of range
    length = np.array([capacity - num_rows, capacity + 3, 1][:batch], np.int32)
    return q, k, position, length


def truth(q, k, position, length, heads, scale):
    row = np.arange(k.shape[1])
    weights = softmax(head_logits(q, k, scale), (row <= position[:, :, None])[:, :, None])
    return np.where(row < length[:, None], weights[:, :, list(heads)].mean(axis=(1, 2)), -np.inf)


def check(q, k, position, length, heads, backend, run=None):
    """Compares with the truth; unseen rows may hold anything."""
    scale = q.shape[-1] ** -0.5
    expected = truth(q, k, position, length, heads, scale)
    run = run or functools.partial(attention_scores, backend=backend)
    run = compiled(functools.partial(run, heads=heads, scale=scale), backend)
    unseen = np.arange(k.shape[1]) > position.max(axis=1)[:, None]
    got = poisoned(lambda k: run(q, k, position, length), unseen, k)
    assert error(got, expected) <= TOLERANCE["weight"][q.dtype.type]
    return got


@pytest.mark.parametrize("backend", BACKENDS)
@attention_cases(heads=("one", "two", "many"))
def test_equals_float64(case, backend):
    case = dict(case)
    heads = choose(case.pop("heads"), case["group"])
    check(*inputs(**case), tuple(dict.fromkeys(heads)), backend)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("blocks", [BlockSizes(16, 1), BlockSizes(16, 3), BlockSizes(64, 5)])
def test_every_cut_gives_the_same(blocks, backend):
    run = functools.partial(triton.attention_scores, blocks=blocks, interpret=backend == "interpret")
    check(*inputs(3, 5, 8, 64, 200, F16), (1, 9, 12), backend, run)


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_need_not_be_consecutive(backend):
    q, k, _, _ = inputs(2, 3, 5, 64, 100, F32)
    position = np.array([[90, 3, 40], [-1, 20, -5]], np.int32)
    got = check(q, k, position, np.array([100, 50], np.int32), (0, 7), backend)
    # the share of the queries that see anything
    np.testing.assert_allclose(np.asarray(got)[0].sum(), 1, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(got)[1, :50].sum(), 1 / 3, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_length_zero_scores_nothing(backend):
    q, k, position, _ = inputs(2, 2, 5, 64, 70, F32)
    length = np.array([0, -1], np.int32)
    got = compiled(functools.partial(attention_scores, heads=(1,), scale=0.1, backend=backend), backend)(
        q, k, position, length
    )
    np.testing.assert_array_equal(got, -np.inf)


def arguments(**changes):
    q, k, position, length = inputs(2, 3, 2, 16, 20, F32)
    named = {"q": q, "k": k, "q_pos": position, "length": length, "heads": (0, 3), "scale": 1.0}
    return named | {"backend": "interpret"} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((2, 4, 16))}, r"q has shape \(2, 4, 16\); it must be \[B,R,N,H\]"),
        ({"q": jnp.zeros((2, 3, 4, 16), jnp.int32)}, "q has dtype int32"),
        ({"k": jnp.zeros((2, 20, 3, 16))}, "q has 4 heads and k has 3"),
        ({"k": jnp.zeros((2, 20, 2, 16), BF16)}, "k has dtype bfloat16; allowed: float32"),
        ({"q_pos": jnp.zeros((2, 2), jnp.int32)}, r"q_pos has shape \(2, 2\); it must be \[B,R\], here \[2, 3\]"),
        ({"q_pos": jnp.zeros((2, 3))}, "q_pos has dtype float32; allowed: int32"),
        ({"length": jnp.zeros(1, jnp.int32)}, r"length has shape \(1,\); it must be \[B\], here \[2\]"),
        ({"heads": ()}, r"heads is \(\); it must name distinct query heads in \[0, 4\), at least one"),
        ({"heads": (1, 1)}, r"heads is \(1, 1\)"),
        ({"heads": (4,)}, r"heads is \(4,\)"),
        ({"heads": (-1,)}, r"heads is \(-1,\)"),
        ({"backend": "cuda"}, "backend is 'cuda'"),
        (
            {"q": jnp.zeros((2, 3, 4, 512)), "k": jnp.zeros((2, 20, 2, 512))},
            "q has head dim 512; the kernel allows at most 256",
        ),
        (
            {"q": jnp.zeros((2, 3, 256, 256), BF16), "k": jnp.zeros((2, 20, 2, 256), BF16), "heads": tuple(range(128))},
            r"512 query rows of one kv head.*head dim 256; the kernel allows 302",
        ),
    ],
)
def test_rejects(changes, message):
    with pytest.raises(ValueError, match=message):
        attention_scores(**arguments(**changes))
