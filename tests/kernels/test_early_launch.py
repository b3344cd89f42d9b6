"""Launching early changes no result: the same numbers, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    add_rms_norm,
    cached_attention,
    cached_step,
    dispatch,
    gated_matmul,
    skinny_matmul,
    sparse_attention,
    sparse_step,
)
from pallas_kernels.early_launch import AVAILABLE, early_launch

KERNELS = ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)]


def draw(*shape, dtype=jnp.bfloat16):
    # of its own per shape
    return jax.random.normal(jax.random.key(sum(shape)), shape, dtype)


Q, K, V = draw(2, 3, 8, 64), draw(2, 500, 2, 64), draw(2, 500, 2, 64) * 2
START, ROWS = jnp.array([497, 300], jnp.int32), jnp.arange(2 * 250, dtype=jnp.int32).reshape(2, 250) % 250
SCORED = jnp.array([[0, 2], [1, 1]], jnp.int32)
# one token of each sequence, and the tables of its rotation
TOKEN = draw(2, 1, 2, 6, 64), K, V, draw(2, 1, 32, dtype=jnp.float32), draw(2, 1, 32, dtype=jnp.float32), START

CALLS = {
    "skinny_matmul": functools.partial(skinny_matmul, draw(3, 512), draw(512, 96)),
    "gated_matmul": functools.partial(gated_matmul, draw(3, 512), draw(512, 2, 96)),
    "add_rms_norm": functools.partial(add_rms_norm, draw(2, 3, 96), draw(2, 3, 96), draw(96), eps=1e-6),
    "sparse_attention": functools.partial(sparse_attention, Q, K, V, ROWS, START, scale=0.1),
    "sparse_step": functools.partial(sparse_step, *TOKEN, ROWS, START, valid=START - 2, window=3, scale=0.1),
    "cached_step": functools.partial(cached_step, *TOKEN, START, scale=0.1),
    "cached_attention": functools.partial(cached_attention, Q, K, V, START, scale=0.1),
    "weights": functools.partial(cached_attention, Q, K, V, START, scale=0.1, scored_rows=SCORED),
    "logits": functools.partial(cached_attention, Q, K, V, START, scale=0.1, scored_rows=SCORED, score_mode="logit"),
}


@pytest.mark.parametrize("backend", ["xla", *KERNELS])
@pytest.mark.parametrize("call", CALLS)
def test_the_result_is_the_same(call, backend):
    early, late = (jax.tree.leaves(CALLS[call](early=early, backend=backend)) for early in (True, False))
    for x, y in zip(early, late, strict=True):
        np.testing.assert_array_equal(x, y)
        assert np.isfinite(x[x != -jnp.inf]).all()


def kernel(*refs):
    del refs


@pytest.mark.parametrize(
    ("early", "interpret", "hopper"), [(False, False, True), (True, True, True), (True, False, False)]
)
def test_a_kernel_stays_as_it_is_where_nothing_can_start_early(early, interpret, hopper, monkeypatch):
    monkeypatch.setattr(dispatch, "at_least_hopper", lambda: hopper)
    assert early_launch(kernel, early, interpret=interpret) is kernel


def test_it_needs_an_xla_that_has_kernels_wait(monkeypatch):
    monkeypatch.setattr(dispatch, "at_least_hopper", lambda: True)
    waits = jax.__version_info__ >= (0, 11)
    assert waits == AVAILABLE
    assert waits == (early_launch(kernel, True, interpret=False) is not kernel)
