"""`rope_and_cache` and `add_rms_norm`: the interpreted kernels against their references and NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_rms_norm, rope_and_cache
from pallas_kernels.rope_and_cache import reference

# one rounding of a float32 result to the output's dtype, plus reordered float32 sums
TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 2**-7, jnp.float16: 2**-10}
DTYPES = list(TOLERANCE)
KERNELS = ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)]


def relative_error(out, expected):
    out, expected = np.asarray(out, np.float64), np.asarray(expected, np.float64)
    assert np.isfinite(out).all()
    return np.abs(out - expected).max() / np.abs(expected).max()


def rope_inputs(batch, num_rows, kv_heads, group, head_dim, capacity, dtype, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    angle = rng.uniform(-3, 3, (batch, num_rows, head_dim // 2))
    return {
        "qkv": draw(batch, num_rows, kv_heads, group + 2, head_dim),
        "k_cache": draw(batch, capacity, kv_heads, head_dim),
        "v_cache": draw(batch, capacity, kv_heads, head_dim),
        "cos": jnp.asarray(np.cos(angle), jnp.float32),
        "sin": jnp.asarray(np.sin(angle), jnp.float32),
        "start": jnp.asarray(rng.integers(0, capacity - num_rows + 1, batch), jnp.int32),
    }


# every value of each parameter, and every pair of (extras, dtype)
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    ("batch", "num_rows", "kv_heads", "group", "head_dim", "extras", "dtype"),
    [
        (1, 1, 4, 7, 128, "plain", jnp.float32),
        (3, 5, 2, 1, 64, "bias", jnp.float32),
        (2, 7, 1, 5, 96, "norms", jnp.float32),
        (2, 2, 1, 24, 16, "both", jnp.float32),
        (1, 20, 2, 6, 256, "plain", jnp.bfloat16),
        (1, 1, 4, 7, 128, "bias", jnp.bfloat16),
        (3, 5, 2, 1, 64, "norms", jnp.bfloat16),
        (2, 7, 1, 5, 96, "both", jnp.bfloat16),
        (2, 2, 1, 24, 16, "plain", jnp.float16),
        (2, 7, 1, 5, 96, "bias", jnp.float16),
        (1, 1, 4, 7, 128, "norms", jnp.float16),
        (1, 20, 2, 6, 256, "both", jnp.float16),
    ],
)
def test_rope_and_cache_kernel_equals_reference(batch, num_rows, kv_heads, group, head_dim, extras, dtype, backend):
    inputs = rope_inputs(batch, num_rows, kv_heads, group, head_dim, 50, dtype)
    rng = np.random.default_rng(1)
    options = {}
    if extras in ("bias", "both"):
        options["bias"] = jnp.asarray(rng.normal(size=(kv_heads, group + 2, head_dim)), dtype)
    if extras in ("norms", "both"):
        options["q_scale"] = jnp.asarray(rng.normal(size=head_dim), dtype)
        options["k_scale"] = jnp.asarray(rng.normal(size=head_dim), dtype)
    got = rope_and_cache(**inputs, **options, eps=1e-5, backend=backend)
    expected = rope_and_cache(**inputs, **options, eps=1e-5, backend="xla")
    for out, reference_out in zip(got, expected, strict=True):
        assert relative_error(out, reference_out) <= TOLERANCE[dtype]


@pytest.mark.parametrize("backend", ["xla", *KERNELS])
def test_rope_and_cache_touches_its_rows_only(backend):
    inputs = rope_inputs(2, 3, 2, 3, 64, 20, jnp.float32)
    inputs["k_cache"] = inputs["k_cache"].at[:, ::2].set(jnp.nan)
    _, k, v = rope_and_cache(**inputs, backend=backend)
    for b, start in enumerate(np.asarray(inputs["start"])):
        written = np.arange(20) - start
        written = (written >= 0) & (written < 3)
        np.testing.assert_array_equal(k[b, ~written], inputs["k_cache"][b, ~written])
        np.testing.assert_array_equal(v[b, ~written], inputs["v_cache"][b, ~written])
        np.testing.assert_array_equal(v[b, written], inputs["qkv"][b, :, :, -1])


def test_rope_and_cache_reference_is_complex_rotation():
    inputs = rope_inputs(2, 4, 2, 3, 32, 10, jnp.float32)
    q, k, _ = rope_and_cache(**inputs, backend="xla")
    qkv = np.asarray(inputs["qkv"], np.float64)
    rotation = (np.asarray(inputs["cos"], np.float64) + 1j * np.asarray(inputs["sin"], np.float64))[:, :, None, None]
    turned = (qkv[..., :16] + 1j * qkv[..., 16:]) * rotation
    turned = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(q, turned[:, :, :, :3].reshape(2, 4, 6, 32), atol=1e-6)
    for b, start in enumerate(np.asarray(inputs["start"])):
        np.testing.assert_allclose(k[b, start : start + 4], turned[b, :, :, 3], atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": jnp.zeros((2, 3, 2, 2, 64))}, "G >= 1"),
        ({"qkv": jnp.zeros((2, 3, 2, 5, 64), jnp.int32)}, "qkv has dtype int32"),
        ({"k_cache": jnp.zeros((2, 20, 1, 64))}, "k_cache has shape"),
        ({"v_cache": jnp.zeros((2, 21, 2, 64))}, "v_cache has shape"),
        ({"cos": jnp.zeros((2, 3, 64))}, "cos has shape"),
        ({"start": jnp.zeros(2)}, "start has dtype"),
        ({"bias": jnp.zeros((5, 64))}, "bias has shape"),
        ({"q_scale": jnp.zeros(64)}, "go together"),
        ({"backend": "cuda"}, "backend"),
    ],
)
def test_rope_and_cache_rejects(change, message):
    inputs = rope_inputs(2, 3, 2, 3, 64, 20, jnp.float32) | {"backend": "interpret"} | change
    with pytest.raises(ValueError, match=message):
        rope_and_cache(**inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_update", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 3584), (3, 7, 96)])
@pytest.mark.parametrize("backend", KERNELS)
def test_add_rms_norm_kernel_equals_float64(shape, has_update, dtype, backend):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=shape), dtype)
    update = jnp.asarray(rng.normal(size=shape), dtype) if has_update else None
    scale = jnp.asarray(rng.normal(size=shape[-1]), dtype)
    total, norm = add_rms_norm(x, update, scale, eps=1e-5, backend=backend)
    expected, expected_norm = add_rms_norm(x, update, scale, eps=1e-5, backend="xla")
    np.testing.assert_array_equal(total, expected)
    assert relative_error(norm, expected_norm) <= TOLERANCE[dtype]
    exact = np.asarray(expected, np.float64)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(scale, np.float64)
    assert relative_error(norm, exact) <= TOLERANCE[dtype]


@pytest.mark.parametrize("backend", ["xla", *KERNELS])
def test_add_rms_norm_keeps_nan_to_its_row(backend):
    x = jnp.ones((2, 2, 64)).at[0, 1, 3].set(jnp.nan)
    _, norm = add_rms_norm(x, x, jnp.ones(64), eps=1e-6, backend=backend)
    np.testing.assert_array_equal(np.isnan(norm).all(-1), [[False, True], [False, False]])
    np.testing.assert_array_equal(np.isnan(norm).any(-1), [[False, True], [False, False]])


@pytest.mark.parametrize(
    ("x", "update", "scale", "message"),
    [
        (jnp.zeros((2, 64)), None, jnp.ones(64), "x has shape"),
        (jnp.zeros((1, 2, 64)), jnp.zeros((1, 1, 64)), jnp.ones(64), "update has shape"),
        (jnp.zeros((1, 2, 64)), jnp.zeros((1, 2, 64), jnp.bfloat16), jnp.ones(64), "update has dtype"),
        (jnp.zeros((1, 2, 64)), None, jnp.ones(63), "scale has shape"),
    ],
)
def test_add_rms_norm_rejects(x, update, scale, message):
    with pytest.raises(ValueError, match=message):
        add_rms_norm(x, update, scale, eps=1e-6)


def test_reference_rms_norm_is_the_heads_norm():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4, 16)), jnp.float32)
    out = reference.rms_norm(x, jnp.full(16, 2.0), 0.0)
    np.testing.assert_allclose(np.sqrt((np.asarray(out) ** 2).mean(-1)), 2.0, rtol=1e-6)
