"""`cached_attention` of prefill chunks by cuDNN: which calls go there, and what it makes of its two parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import BF16, F16, F32, TOLERANCE, compiled, error, operands, poisoned

from pallas_kernels import cached_attention, dispatch
from pallas_kernels.cached_attention import cudnn, reference

SCALE = 0.125
# of a chunk of T rows over S: T, S -> start
POSITIONS = {
    "first": lambda rows, capacity: [0, 0, 0],
    "shared": lambda rows, capacity: [rows, rows, rows],
    "ragged, one without a past": lambda rows, capacity: [capacity - rows, 0, 1],
    "ragged": lambda rows, capacity: [1, rows // 2 + 3, capacity - rows - 1],
    "before the cache": lambda rows, capacity: [-3, 0, -rows],
}
every_position = pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)


def with_xla(q, k, v, length, scale):
    """cuDNN's part by JAX's plain implementation. Values that no query sees are taken out, since 0 * NaN is NaN."""
    options = {"scale": scale, "implementation": "xla", "return_residual": True}
    if length is None:
        options["is_causal"] = True
    else:
        options["key_value_seq_lengths"] = length
        v = jnp.where((jnp.arange(v.shape[1]) < length[:, None])[:, :, None, None], v, 0)
    out, lse = jax.nn.dot_product_attention(q, k, v, **options)
    return out, jnp.swapaxes(lse, 1, 2)


def unseen(start, num_rows, capacity):
    return np.arange(capacity) >= start[:, None] + num_rows


# one program for all positions: which of its branches runs is chosen at run time
@functools.cache
def plain_chunks(group, kv_heads):
    attend = functools.partial(cudnn.cached_attention, scale=SCALE, part=with_xla, interpret=True)
    expected = jax.jit(functools.partial(reference.cached_attention, scale=SCALE))
    return compiled(attend, "interpret"), expected, operands(3, 16, group, 32, 64, F32, kv_heads)


@every_position
@pytest.mark.parametrize(("group", "kv_heads"), [(1, 2), (6, 2), (7, 1)])
def test_parts_add_up(group, kv_heads, positions):
    attend, expected, (q, k, v) = plain_chunks(group, kv_heads)
    start = np.array(positions(16, 64), np.int32)
    out = poisoned(lambda k, v: attend(q, k, v, start), unseen(start, 16, 64), k, v)
    assert error(out, expected(q, k, v, start)[0]) <= TOLERANCE["out"][F32]


def test_positions_past_the_cache_see_all_of_it():
    attend, expected, (q, k, v) = plain_chunks(6, 2)
    start = np.array([50, 5, 65], np.int32)
    assert error(attend(q, k, v, start), expected(q, k, v, start)[0]) <= TOLERANCE["out"][F32]


def test_log_sum_exps_far_apart():
    attend, expected, (q, k, v) = plain_chunks(6, 2)
    start = np.array([20, 3, 0], np.int32)
    # logits in the hundreds, so that most queries look at one of the parts only
    assert error(attend(300 * q, k, v, start), expected(300 * q, k, v, start)[0]) <= 1e-4


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, True),
        ({"available": False}, False),
        ({"dtype": F16}, True),
        ({"dtype": F32}, False),
        ({"head_dim": 64}, True),
        ({"head_dim": 100}, False),
        ({"head_dim": 256}, False),
        ({"num_rows": 4096, "capacity": 4095}, False),
        # too few tiles of queries to fill the card, unless there are more sequences
        ({"num_rows": 2048}, False),
        ({"num_rows": 2048, "batch": 2}, True),
        # shorter than a tile of keys, however many sequences
        ({"num_rows": 128, "batch": 64}, False),
    ],
)
def test_which_calls_go_to_cudnn(changes, chosen):
    shape = {"batch": 1, "num_rows": 4096, "heads": 12, "head_dim": 128, "capacity": 32768, "dtype": BF16}
    assert cudnn.is_faster(**({"available": True} | shape | changes)) == chosen


def test_no_cudnn_without_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert not dispatch.has_cudnn()


@pytest.mark.parametrize("missing", [RuntimeError("cuDNN not found."), 90800])
def test_no_cudnn_or_an_old_one(missing, monkeypatch):
    def version():
        if isinstance(missing, Exception):
            raise missing
        return missing

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", version)
    assert not dispatch.has_cudnn()


@functools.cache
def fused_chunks(num_rows, capacity, group, kv_heads, head_dim, dtype):
    attend = functools.partial(cached_attention, scale=SCALE, backend="pallas")
    expected = functools.partial(reference.cached_attention, scale=SCALE)
    return jax.jit(attend), jax.jit(expected), operands(3, num_rows, group, head_dim, capacity, dtype, kv_heads)


# 256 rows are the shortest chunk, of which tiles at the end of the past hold the most rows that follow the chunk
@pytest.mark.gpu
@every_position
@pytest.mark.parametrize(
    "shape",
    [
        (256, 1000, 6, 8, 128, BF16),
        (256, 600, 7, 8, 64, BF16),
        (1024, 2500, 7, 4, 128, BF16),
        (300, 1111, 1, 30, 96, F16),
    ],
)
def test_on_the_gpu(shape, positions):
    attend, expected, (q, k, v) = fused_chunks(*shape)
    num_rows, capacity, *_, dtype = shape
    assert cudnn.is_faster(*q.shape, capacity, dtype, available=dispatch.has_cudnn())
    start = np.array(positions(num_rows, capacity), np.int32)
    # Other values in the rows that nothing sees, and to the bit the same result: so two runs give the same, too.
    out = poisoned(lambda k, v: attend(q, k, v, start)[0], unseen(start, num_rows, capacity), k, v)
    assert error(out, expected(q, k, v, start)[0]) <= TOLERANCE["out"][dtype]


# the more the logits spread, the less do shares of rounded log-sum-exps add up to the result
@pytest.mark.gpu
@pytest.mark.parametrize("stretch", [1, 8])
def test_shares_on_the_gpu(stretch):
    q, k, v = operands(1, 4096, 6, 128, 8192, BF16)
    q, start = (q * stretch).astype(BF16), np.array([4096], np.int32)
    attend, plain = (
        jax.jit(functools.partial(cached_attention, scale=SCALE, backend=backend)) for backend in ("pallas", "xla")
    )
    assert error(attend(q, k, v, start)[0], plain(q, k, v, start)[0]) <= TOLERANCE["out"][BF16]
