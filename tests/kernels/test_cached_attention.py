"""`cached_attention`: every backend against float64 NumPy, and what must not change its result."""

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

from pallas_kernels import cached_attention
from pallas_kernels.cached_attention import reference, triton
from pallas_kernels.cached_attention.blocks import BlockSizes, choose_block_sizes

MODES = (None, "weight", "logit")


def inputs(batch, num_rows, group, head_dim, capacity, dtype, kv_heads=2):
    return *operands(batch, num_rows, group, head_dim, capacity, dtype, kv_heads), starts(batch, num_rows, capacity)


def truth(q, k, v, start, scale, scored=None, mode="weight", per_row=False):
    num_rows, capacity = q.shape[1], k.shape[1]
    position = start[:, None] + np.arange(num_rows)
    visible = np.arange(capacity) <= position[:, :, None]
    logits = head_logits(q, k, scale)
    weights = softmax(logits, visible[:, :, None])
    out = weighted(weights, v)
    if scored is None:
        return out, None
    pick = np.clip(scored, 0, num_rows - 1)[:, :, None]
    scores = np.take_along_axis((weights if mode == "weight" else logits).sum(axis=2), pick, axis=1)
    everywhere = np.take_along_axis(visible, pick, axis=1).all(axis=1, keepdims=True)
    if not per_row:
        scores, everywhere = scores.sum(axis=1), everywhere[:, 0]
    return out, np.where(everywhere, scores, -np.inf)


def scored_rows(batch, num_rows):
    # first and last, one query twice, and one out of range, which is clipped
    return np.array([[0, num_rows - 1], [num_rows - 1, num_rows - 1], [0, num_rows + 3]][:batch], np.int32)


def check(q, k, v, start, backend, mode, per_row, run=None, **more):
    """Compares with the truth; scratch rows may hold anything."""
    dtype = q.dtype.type
    options = {"scale": q.shape[-1] ** -0.5} | more
    expected = truth(q, k, v, start, options["scale"])[0], None
    if mode:
        scored = scored_rows(*q.shape[:2])
        expected = truth(q, k, v, start, options["scale"], scored, mode, per_row)
        options |= {"scored_rows": scored, "score_mode": mode, "per_row": per_row}
    run = compiled(functools.partial(run or functools.partial(cached_attention, backend=backend), **options), backend)
    scratch = np.arange(k.shape[1]) >= start[:, None] + q.shape[1]
    got = poisoned(lambda k, v: run(q, k, v, start), scratch, k, v)
    assert error(got[0], expected[0]) <= TOLERANCE["out"][dtype]
    if mode:
        assert error(got[1], expected[1]) <= TOLERANCE[mode][dtype]
    else:
        assert got[1] is None


@pytest.mark.parametrize("backend", BACKENDS)
@attention_cases(mode=MODES, per_row=(False, True))
def test_equals_float64(case, backend):
    case = dict(case)
    mode, per_row = case.pop("mode"), case.pop("per_row")
    check(*inputs(**case), backend, mode, per_row and mode is not None)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("mode", MODES[1:])
def test_reference_equals_float64(mode, per_row):
    check(*inputs(3, 5, 5, 64, 63, BF16), None, mode, per_row, run=reference.cached_attention)


# splits that divide the steps and that do not, with and without a loop of its own for steps that need no mask, more
# splits than a short row has steps, and several row tiles
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    ("blocks", "mode"),
    [
        (BlockSizes(16, 16, 1, split_tail=True), "weight"),
        (BlockSizes(16, 16, 3), "weight"),
        (BlockSizes(64, 64, 2, split_tail=True), "weight"),
        (BlockSizes(16, 16, 4, split_tail=True, stream=True), "logit"),
        (BlockSizes(64, 64, 1), "logit"),
        (BlockSizes(32, 32, 7), None),
    ],
)
def test_every_cut_gives_the_same(blocks, mode, backend):
    run = functools.partial(triton.cached_attention, blocks=blocks, interpret=backend == "interpret")
    check(*inputs(3, 5, 8, 64, 200, F16), backend, mode, False, run=run)


# Seven rows of 24 heads are several row tiles, of which only the last reaches every visible row: the others must leave
# its logits alone.
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_scores_of_several_row_tiles(dtype, mode, backend):
    blocks = choose_block_sizes(3, 7, 2, 24, 63, 64, dtype)
    assert blocks.rows < 7 * 24
    check(*inputs(3, 7, 24, 64, 63, dtype), backend, mode, True)


# more than 16 rows: scores come of passes of their own, and the reference path goes tile by tile
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_rows", "mode"), [(40, "logit"), (40, "weight"), (300, None)])
def test_chunks_of_a_prompt(num_rows, mode, backend):
    check(*inputs(2, num_rows, 3, 64, num_rows + 20, F32), backend, mode, False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_query_that_sees_nothing_gives_zeros(backend):
    q, k, v, _ = inputs(2, 3, 2, 64, 32, F32)
    start = np.array([-3, -2], np.int32)
    # the last query of the second sequence sees one row
    k[0], v[0], k[1, 1:], v[1, 1:] = (np.nan,) * 4
    run = compiled(functools.partial(cached_attention, scale=1.0, backend=backend), backend)
    out, scores = run(q, k, v, start, scored_rows=np.zeros((2, 1), np.int32))
    np.testing.assert_array_equal(out[0], 0)
    np.testing.assert_array_equal(out[1, :2], 0)
    np.testing.assert_array_equal(out[1, 2].reshape(2, 2, 64), np.repeat(v[1, 0][:, None], 2, axis=1))
    np.testing.assert_array_equal(scores, -np.inf)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_one_sequence_leaves_the_others_alone(backend):
    q, k, v, start = inputs(3, 2, 5, 64, 40, F32)
    run = compiled(functools.partial(cached_attention, scale=0.1, backend=backend), backend)
    clean, _ = run(q, k, v, start)
    k[0, 3] = v[0, 3] = np.nan
    out, _ = run(q, k, v, start)
    assert np.isnan(out[0]).all()
    np.testing.assert_array_equal(out[1:], clean[1:])


# logits far outside exp's range
@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits(backend):
    q, k, v, start = inputs(1, 2, 5, 64, 100, F32)
    expected, _ = truth(q, k, v, start, 100.0)
    out, _ = compiled(functools.partial(cached_attention, scale=100.0, backend=backend), backend)(q, k, v, start)
    # the error of a logit of some thousands is the relative error of its weight
    assert error(out, expected) <= 1e-3


def arguments(**changes):
    q, k, v, start = inputs(2, 3, 2, 16, 8, F32)
    return {"q": q, "k": k, "v": v, "start": start[:2], "scale": 1.0, "backend": "interpret"} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((2, 4, 16))}, r"q has shape \(2, 4, 16\); it must be \[B,T,N,H\]"),
        ({"q": jnp.zeros((2, 3, 4, 16), jnp.int32)}, "q has dtype int32; allowed: float32, bfloat16, float16"),
        ({"q": jnp.zeros((2, 0, 4, 16))}, r"q has shape \(2, 0, 4, 16\)"),
        ({"k": jnp.zeros((3, 8, 2, 16))}, r"k has shape \(3, 8, 2, 16\); it must be \[B,S,K,H\] with q's B and H"),
        ({"k": jnp.zeros((2, 8, 2, 32))}, "k has shape"),
        ({"k": jnp.zeros((2, 8, 2, 16), BF16)}, "k has dtype bfloat16; allowed: float32"),
        ({"k": jnp.zeros((2, 8, 3, 16))}, "q has 4 heads and k has 3; q's must be a multiple of k's"),
        ({"v": jnp.zeros((2, 9, 2, 16))}, r"v has shape \(2, 9, 2, 16\); it must be \[B,S,K,H\] like k"),
        ({"v": jnp.zeros((2, 8, 2, 16), F16)}, "v has dtype float16"),
        ({"start": jnp.zeros(3, jnp.int32)}, r"start has shape \(3,\); it must be \[B\], here \[2\]"),
        ({"start": jnp.zeros(2)}, "start has dtype float32; allowed: int32"),
        ({"scored_rows": jnp.zeros(2, jnp.int32)}, r"scored_rows has shape \(2,\); it must be \[B,R\]"),
        ({"scored_rows": jnp.zeros((2, 1))}, "scored_rows has dtype float32"),
        ({"score_mode": "sum"}, "score_mode is 'sum'; allowed are 'weight', 'logit'"),
        ({"per_row": True}, "per_row is set without scored_rows"),
        ({"backend": "cuda"}, "backend is 'cuda'; allowed are None, 'pallas', 'xla', 'interpret'"),
        (
            {"q": jnp.zeros((2, 3, 4, 512)), "k": jnp.zeros((2, 8, 2, 512)), "v": jnp.zeros((2, 8, 2, 512))},
            "q has head dim 512; the kernel allows at most 256",
        ),
    ],
)
def test_rejects(changes, message):
    with pytest.raises(ValueError, match=message):
        cached_attention(**arguments(**changes))
