"""`sparse_step` against `rope_and_cache` followed by `sparse_attention`, both in plain jnp."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import BACKENDS, BF16, DTYPES, F32, KERNELS, TOLERANCE, compiled, covering, error, normal

from pallas_kernels import rope_and_cache, sparse_attention, sparse_step
from pallas_kernels.sparse_attention.blocks import BlockSizes
from pallas_kernels.sparse_step import triton

WINDOW = 9
EXTRAS = {"plain": (), "bias": ("bias",), "norms": ("q_scale", "k_scale"), "both": ("bias", "q_scale", "k_scale")}


def inputs(batch, group, head_dim, dtype, listed, num_parts, extras, capacity=100, kv_heads=2):
    """Operands and options: the newest row is the last of the cache, in its middle, and of a row that sees nothing."""
    members = (batch, 1, kv_heads, group + 2, head_dim)
    qkv = normal(0, (num_parts, *members), F32) / num_parts if num_parts > 1 else normal(0, members, dtype)
    caches = [normal(seed, (batch, capacity, kv_heads, head_dim), dtype) for seed in (1, 2)]
    angle = normal(3, (batch, 1, head_dim // 2), F32)
    start = np.array([capacity - 1, 40, 70][:batch], np.int32)
    valid = start - np.array([WINDOW - 1, 0, 3][:batch], np.int32)
    generator = np.random.default_rng(4)
    rows = np.full((batch, listed), -1, np.int32)
    for b in range(batch):
        count = min(valid[b], int(listed * (1.0, 0.3, 0.6)[b]))
        rows[b, :count] = np.sort(generator.permutation(valid[b])[:count])
    attend_at = np.where(np.arange(batch) == 2, -1, start).astype(np.int32)
    options = {"valid": valid, "window": WINDOW, "scale": head_dim**-0.5, "eps": 1e-5}
    shapes = {"bias": members[2:], "q_scale": head_dim, "k_scale": head_dim}
    options |= {name: normal(5, shapes[name], dtype) for name in EXTRAS[extras]}
    return (qkv, *caches, np.cos(angle), np.sin(angle), start, rows, attend_at), options


def in_two_steps(qkv, k, v, cos, sin, start, rows, attend_at, *, valid, window, scale, layer=None, **projection):
    q, k, v = rope_and_cache(qkv, k, v, cos, sin, start, **projection, backend="xla")
    lists = {"valid": valid, "window": window, "layer": layer}
    return sparse_attention(q, k, v, rows, attend_at, **lists, scale=scale, backend="xla"), k, v


def check(operands, options, run, backend):
    got = compiled(functools.partial(run, **options), backend)(*operands)
    expected = in_two_steps(*operands, **options)
    for out, wanted in zip(got, expected, strict=True):
        # rotated float32 sums may round the other way
        assert error(out, wanted) <= TOLERANCE["out"][operands[1].dtype.type]
    return got


@pytest.mark.parametrize("backend", BACKENDS)
@covering(
    full=("batch", "group", "head_dim"),
    batch=(1, 3),
    group=(1, 5, 8, 24),
    head_dim=(64, 96, 128, 256),
    dtype=DTYPES,
    listed=(1, 40),
    num_parts=(1, 3),
    extras=tuple(EXTRAS),
)
def test_equals_the_two_ops(case, backend):
    check(*inputs(**case), functools.partial(sparse_step, backend=backend), backend)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("blocks", [BlockSizes(16, 16, 1), BlockSizes(16, 16, 3), BlockSizes(32, 16, 9)])
def test_every_cut_gives_the_same(blocks, backend):
    def run(*operands, **options):
        *operands, rows, attend_at = operands
        options = {"layer": 0, "count": None, "bias": None, "q_scale": None, "k_scale": None} | options
        interpret = backend == "interpret"
        return triton.sparse_step(*operands, rows[None], attend_at, **options, blocks=blocks, interpret=interpret)

    check(*inputs(3, 5, 64, BF16, 40, 3, "bias"), run, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_list_of_a_layer(backend):
    operands, options = inputs(2, 2, 64, F32, 40, 1, "plain")
    lists = np.stack([np.zeros_like(operands[6]), operands[6]])
    operands = (*operands[:6], lists, operands[7])
    check(operands, options | {"layer": 1}, functools.partial(sparse_step, backend=backend), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_visible_rows_are_read_and_only_the_new_row_is_written(backend):
    (qkv, k, v, *rest), options = inputs(3, 3, 64, F32, 40, 1, "plain")
    start, rows, attend_at = rest[2:]
    read = np.zeros(k.shape[:2], bool)
    for b in range(3):
        read[b, rows[b][rows[b] >= 0]] = read[b, options["valid"][b] : start[b]] = attend_at[b] >= 0
    poisoned = [np.where(read[:, :, None, None], x, np.nan) for x in (k, v)]
    run = compiled(functools.partial(sparse_step, **options, backend=backend), backend)
    out, *caches = run(qkv, *poisoned, *rest)
    assert error(out, run(qkv, k, v, *rest)[0]) == 0
    np.testing.assert_array_equal(out[2], 0)
    for cache, before in zip(caches, poisoned, strict=True):
        others = np.arange(before.shape[1]) != start[:, None]
        np.testing.assert_array_equal(np.asarray(cache)[others], before[others])
    np.testing.assert_array_equal(np.asarray(caches[1])[np.arange(3), start], qkv[:, 0, :, -1])


# the newest row past the window, before the recent ones, and at a position that no query has reached
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "change", [{"valid": np.array([99 - WINDOW], np.int32)}, {"valid": np.array([100], np.int32)}, {"attend_at": 95}]
)
def test_a_newest_row_that_is_not_seen(change, backend):
    operands, options = inputs(1, 3, 64, F32, 40, 1, "plain")
    attend_at = np.array([change.get("attend_at", 99)], np.int32)
    options |= {name: x for name, x in change.items() if name == "valid"}
    check((*operands[:7], attend_at), options, functools.partial(sparse_step, backend=backend), backend)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, jnp.zeros((2, 3, 2, 5, 64)), "3 tokens"),
        (0, jnp.zeros((2, 1, 2, 2, 64)), "G >= 1"),
        (2, jnp.zeros((2, 99, 2, 64)), "v_cache has shape"),
        (6, jnp.zeros((2, 40)), "rows has dtype"),
        (7, jnp.zeros(3, jnp.int32), "start has shape"),
    ],
)
def test_rejects(position, value, message):
    operands, options = inputs(2, 3, 64, F32, 40, 1, "plain")
    operands = list(operands)
    operands[position] = value
    if position == 0:
        operands[3:5] = [jnp.zeros((2, value.shape[1], 32))] * 2
    with pytest.raises(ValueError, match=message):
        sparse_step(*operands, **options, backend="interpret")


def test_rejects_a_window_of_nothing():
    operands, options = inputs(2, 3, 64, F32, 40, 1, "plain")
    with pytest.raises(ValueError, match="window is 0"):
        sparse_step(*operands, **options | {"window": 0}, backend="interpret")
