"""`skinny_matmul` and `gated_matmul` against float64, and the ops that take partial sums."""

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import BACKENDS, BF16, F16, F32, KERNELS

from pallas_kernels import add_rms_norm, gated_matmul, rope_and_cache, skinny_matmul

# float32 sums of products that are exact in float32, as shares of the largest result; gated results round to the dtype
SUM = 2e-6
GATED = {F32: 4e-6, BF16: 2**-6, F16: 2**-9}
# one rounding of a float32 result to the dtype, and float32 sums in another order
ROUNDED = {F32: 2e-6, BF16: 2**-7, F16: 2**-10}
SHAPES = [(1, 64, 64), (5, 100, 70), (33, 2100, 70), (17, 4200, 64)]


def draw(seed, *shape, dtype=F32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def relative_error(out, expected):
    out = np.asarray(out, np.float64)
    assert np.isfinite(out).all()
    return np.abs(out - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(("rows", "depth", "columns"), SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_sum_to_the_product(backend, rows, depth, columns, dtype):
    x, kernel = draw(0, rows, depth, dtype=dtype), draw(1, depth, columns, dtype=dtype)
    parts = skinny_matmul(x, kernel, backend=backend)
    assert (parts.dtype, parts.shape[1:]) == (F32, (rows, columns))
    expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    assert relative_error(np.asarray(parts, np.float64).sum(axis=0), expected) <= SUM
    np.testing.assert_array_equal(skinny_matmul(x, kernel, backend=backend), parts)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(("rows", "depth", "columns"), SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gated_matmul_equals_float64(backend, rows, depth, columns, dtype):
    x, kernel = draw(0, rows, depth, dtype=dtype), draw(1, depth, 2, columns, dtype=dtype) / depth**0.5
    out = gated_matmul(x, kernel, backend=backend)
    assert out.dtype == dtype
    gate, up = np.einsum("rd,dgi->gri", np.asarray(x, np.float64), np.asarray(kernel, np.float64))
    assert relative_error(out, gate / (1 + np.exp(-gate)) * up) <= GATED[dtype]
    np.testing.assert_array_equal(gated_matmul(x, kernel, backend=backend), out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_do_not_touch_each_other(backend):
    x, kernel = draw(0, 3, 256).at[1].set(jnp.nan), draw(1, 256, 2, 96)
    for out in (
        jnp.sum(skinny_matmul(x, kernel[:, 0], backend=backend), axis=0),
        gated_matmul(x, kernel, backend=backend),
    ):
        np.testing.assert_array_equal(np.isnan(out), np.broadcast_to([[False], [True], [False]], (3, 96)))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("num_parts", [1, 2, 5])
@pytest.mark.parametrize("backend", KERNELS)
def test_add_rms_norm_takes_partial_sums(num_parts, backend, dtype):
    x, scale, parts = draw(0, 2, 3, 96, dtype=dtype), draw(1, 96, dtype=dtype), draw(2, num_parts, 2, 3, 96)
    got = add_rms_norm(x, parts, scale, eps=1e-5, backend=backend)
    summed = parts[0]
    for part in parts[1:]:
        summed += part
    expected = add_rms_norm(x, summed.astype(dtype), scale, eps=1e-5, backend=backend)
    for out, wanted in zip(got, expected, strict=True):
        assert relative_error(out, np.asarray(wanted, np.float64)) <= ROUNDED[dtype]


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("num_parts", [1, 2, 5])
@pytest.mark.parametrize("backend", KERNELS)
def test_rope_and_cache_takes_partial_sums(num_parts, backend, dtype):
    parts, bias = draw(0, num_parts, 2, 3, 2, 5, 32), draw(1, 2, 5, 32, dtype=dtype)
    cache = jnp.zeros((2, 20, 2, 32), dtype)
    angle = np.random.default_rng(2).uniform(-3, 3, (2, 3, 16))
    tables = jnp.asarray(np.cos(angle), F32), jnp.asarray(np.sin(angle), F32)
    start = jnp.array([4, 9], jnp.int32)
    summed = parts[0]
    for part in parts[1:]:
        summed += part
    got, expected = (
        rope_and_cache(qkv, cache, cache, *tables, start, bias=bias, backend=backend)
        for qkv in (parts, summed.astype(dtype))
    )
    for out, wanted in zip(got, expected, strict=True):
        assert relative_error(out, np.asarray(wanted, np.float64)) <= ROUNDED[dtype]


@pytest.mark.parametrize(
    ("function", "x", "kernel", "message"),
    [
        (skinny_matmul, (65, 64), (64, 64), "at most 64"),
        (skinny_matmul, (1, 2, 64), (64, 64), "x has shape"),
        (skinny_matmul, (2, 64), (32, 64), "kernel has shape"),
        (gated_matmul, (2, 64), (64, 64), "kernel has shape"),
        (gated_matmul, (65, 64), (64, 2, 64), "at most 64"),
    ],
)
def test_rejects(function, x, kernel, message):
    with pytest.raises(ValueError, match=message):
        function(jnp.zeros(x), jnp.zeros(kernel))


def test_rejects_dtypes():
    with pytest.raises(ValueError, match="kernel has dtype"):
        skinny_matmul(jnp.zeros((1, 8)), jnp.zeros((8, 8), BF16))
    with pytest.raises(ValueError, match="partial sums"):
        add_rms_norm(jnp.zeros((1, 1, 8)), jnp.zeros((2, 1, 1, 9)), jnp.zeros(8), eps=1e-6)
    with pytest.raises(ValueError, match="update has dtype"):
        add_rms_norm(jnp.zeros((1, 1, 8)), jnp.zeros((2, 1, 1, 8), BF16), jnp.zeros(8), eps=1e-6)
