"""`cached_step` and `sparse_step` against `rope_and_cache` and the attention after it, all in plain jnp."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import BACKENDS, BF16, DTYPES, F32, KERNELS, TOLERANCE, compiled, covering, error, normal

from pallas_kernels import cached_attention, cached_step, rope_and_cache, sparse_attention, sparse_step
from pallas_kernels.attention_step import triton
from pallas_kernels.cached_attention.blocks import BlockSizes as CachedBlocks
from pallas_kernels.sparse_attention.blocks import BlockSizes as SparseBlocks

WINDOW = 9
EXTRAS = {"plain": (), "bias": ("bias",), "both": ("bias", "q_scale", "k_scale")}


def inputs(batch, group, head_dim, dtype, num_parts, extras, capacity=100, kv_heads=2):
    """Operands and options: the newest row is the cache's last, one in its middle, and of a row that sees nothing."""
    members = (batch, 1, kv_heads, group + 2, head_dim)
    qkv = normal(0, (num_parts, *members), F32) / num_parts if num_parts > 1 else normal(0, members, dtype)
    caches = [normal(seed, (batch, capacity, kv_heads, head_dim), dtype) for seed in (1, 2)]
    angle = normal(3, (batch, 1, head_dim // 2), F32)
    start = np.array([capacity - 1, 40, 70][:batch], np.int32)
    attend_at = np.where(np.arange(batch) == 2, -1, start).astype(np.int32)
    shapes = {"bias": members[2:], "q_scale": head_dim, "k_scale": head_dim}
    options = {name: normal(5, shapes[name], dtype) for name in EXTRAS[extras]}
    return [qkv, *caches, np.cos(angle), np.sin(angle), start, attend_at], options | {"eps": 1e-5}


def lists(start, listed=40):
    """Sorted random rows before the recent ones, padded with -1."""
    valid = start - np.array([WINDOW - 1, 0, 3][: start.size], np.int32)
    generator = np.random.default_rng(4)
    rows = np.full((start.size, listed), -1, np.int32)
    for b, limit in enumerate(valid):
        count = min(limit, int(listed * (1.0, 0.3, 0.6)[b]))
        rows[b, :count] = np.sort(generator.permutation(limit)[:count])
    return {"rows": rows, "valid": valid, "window": WINDOW}


def in_two_ops(operands, listed, scale, layer=None, **projection):
    *operands, attend_at = operands
    q, k, v = rope_and_cache(*operands, **projection, backend="xla")
    if listed is None:
        return cached_attention(q, k, v, attend_at, scale=scale, backend="xla")[0], k, v
    listed = listed | {"layer": layer, "scale": scale}
    return sparse_attention(q, k, v, listed.pop("rows"), attend_at, **listed, backend="xla"), k, v


def in_one(operands, listed, backend, **options):
    if listed is None:
        return compiled(functools.partial(cached_step, **options, backend=backend), backend)(*operands)
    listed = dict(listed)
    operands = (*operands[:6], listed.pop("rows"), operands[6])
    return compiled(functools.partial(sparse_step, **listed, **options, backend=backend), backend)(*operands)


def check(operands, listed, options, run):
    options = {"scale": operands[1].shape[-1] ** -0.5} | options
    got = run(operands, listed, **options)
    for out, wanted in zip(got, in_two_ops(operands, listed, **options), strict=True):
        # rotated float32 sums may round the other way
        assert error(out, wanted) <= TOLERANCE["out"][operands[1].dtype.type]


# in plain jnp they are those two, see the other tests
@pytest.mark.parametrize("backend", KERNELS)
@covering(
    full=("batch", "group", "head_dim"),
    batch=(1, 3),
    group=(1, 5, 24),
    head_dim=(64, 96, 256),
    dtype=DTYPES,
    listed=(None, 1, 40),
    num_parts=(1, 3),
    extras=("plain", "both"),
)
def test_equals_the_two_ops(case, backend):
    case = dict(case)
    listed = case.pop("listed")
    operands, options = inputs(**case)
    listed = None if listed is None else lists(operands[5], listed)
    check(operands, listed, options, functools.partial(in_one, backend=backend))


CUTS = [
    *(SparseBlocks(16, 16, 1), SparseBlocks(16, 16, 3), SparseBlocks(32, 16, 9)),
    *(CachedBlocks(16, 16, 1, split_tail=True), CachedBlocks(16, 16, 1), CachedBlocks(16, 32, 3)),
]


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("blocks", CUTS, ids=str)
def test_every_cut_gives_the_same(blocks, backend):
    operands, options = inputs(3, 5, 64, BF16, 3, "bias")

    def run(operands, listed, bias, **options):
        *operands, attend_at = operands
        token = triton.Token(*operands, bias=bias)
        options |= {"blocks": blocks, "interpret": backend == "interpret"}
        if listed is None:
            return triton.cached_step(token, attend_at, **options)
        rows = listed["rows"][None]
        count = np.full(rows.shape[:2], rows.shape[2], np.int32)
        lists = {"layer": 0, "count": count, "valid": listed["valid"], "window": WINDOW}
        return triton.sparse_step(token, rows, attend_at, **lists, **options)

    check(operands, lists(operands[5]) if isinstance(blocks, SparseBlocks) else None, options, run)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_list_of_a_layer(backend):
    operands, options = inputs(2, 2, 64, F32, 1, "plain")
    listed = lists(operands[5])
    listed["rows"] = np.stack([np.zeros_like(listed["rows"]), listed["rows"]])
    check(operands, listed, options | {"layer": 1}, functools.partial(in_one, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sparse", [False, True])
def test_only_visible_rows_are_read_and_only_the_new_row_is_written(sparse, backend):
    operands, options = inputs(3, 3, 64, F32, 1, "plain")
    qkv, k, v, *rest, start, attend_at = operands
    listed = lists(start) if sparse else None
    read = (np.arange(k.shape[1]) < start[:, None]) & (attend_at >= 0)[:, None]
    if sparse:
        for b, rows in enumerate(listed["rows"]):
            read[b, np.setdiff1d(np.arange(listed["valid"][b]), rows)] = False
    poisoned = [np.where(read[:, :, None, None], x, np.nan) for x in (k, v)]
    run = functools.partial(in_one, listed=listed, backend=backend, scale=0.1, **options)
    out, *caches = run((qkv, *poisoned, *rest, start, attend_at))
    np.testing.assert_array_equal(out, run(operands)[0])
    np.testing.assert_array_equal(out[2], 0)
    for cache, before in zip(caches, poisoned, strict=True):
        others = np.arange(before.shape[1]) != start[:, None]
        np.testing.assert_array_equal(np.asarray(cache)[others], before[others])
    np.testing.assert_array_equal(np.asarray(caches[1])[np.arange(3), start], qkv[:, 0, :, -1])


# the newest row past the window, before the recent ones, and at a position that no query has reached
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("valid", "attend_at"), [(99 - WINDOW, 99), (100, 99), (95, 95), (None, 95), (None, -1)])
def test_a_newest_row_that_is_not_seen(valid, attend_at, backend):
    operands, options = inputs(1, 3, 64, F32, 1, "plain")
    listed = None if valid is None else lists(operands[5]) | {"valid": np.array([valid], np.int32)}
    operands[6] = np.array([attend_at], np.int32)
    check(operands, listed, options, functools.partial(in_one, backend=backend))


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, jnp.zeros((2, 3, 2, 5, 64)), "3 tokens"),
        (0, jnp.zeros((2, 1, 2, 2, 64)), "G >= 1"),
        (2, jnp.zeros((2, 99, 2, 64)), "v_cache has shape"),
        (6, jnp.zeros(3, jnp.int32), "attend_at has shape"),
    ],
)
@pytest.mark.parametrize("sparse", [False, True])
def test_rejects(sparse, position, value, message):
    operands, options = inputs(2, 3, 64, F32, 1, "plain")
    listed = lists(operands[5]) if sparse else None
    operands[position] = value
    if position == 0:
        operands[3:5] = [jnp.zeros((2, value.shape[1], 32))] * 2
    with pytest.raises(ValueError, match=message):
        in_one(operands, listed, "interpret", scale=0.1, **options)


@pytest.mark.parametrize(
    ("change", "message"), [({"window": 0}, "window is 0"), ({"rows": jnp.zeros((2, 40))}, "rows has dtype")]
)
def test_rejects_lists(change, message):
    operands, options = inputs(2, 3, 64, F32, 1, "plain")
    with pytest.raises(ValueError, match=message):
        in_one(operands, lists(operands[5]) | change, "interpret", scale=0.1, **options)
