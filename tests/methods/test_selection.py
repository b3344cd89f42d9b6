import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.selection import budget, buffer_width, layer_budgets, sink_and_recent_rows, top_rows


@pytest.mark.parametrize("rho", ["0.01", "0.02", "0.05", "0.07", "0.15", "0.3", "0.9", "1"])
def test_budget_is_exact_at_every_length(rho):
    length = np.arange(1, 1 << 17, dtype=np.int32)
    limit = length - length % 3
    k = budget(float(rho), 256, jnp.asarray(length), jnp.asarray(limit))
    expected = [min(max(math.ceil(Fraction(rho) * int(n)), 256), int(m)) for n, m in zip(length, limit, strict=True)]
    np.testing.assert_array_equal(k, expected)
    assert max(expected) <= buffer_width(float(rho), 256, 1 << 17) <= 1 << 17


def test_budgets_of_layers_are_exact():
    shares = (0.125, 1.0, 2.7, 16.0)
    length = np.arange(1, 1 << 20, 7, dtype=np.int32)
    k = layer_budgets(0.05, 256, shares, jnp.asarray(length), jnp.asarray(length - 1))
    equal = np.maximum(-(-length // 20), 256)
    for share, found in zip(shares, k, strict=True):
        np.testing.assert_array_equal(found, np.minimum(-(-round(1000 * share) * equal // 1000), length - 1))
    assert k.max() <= buffer_width(0.05, 256, 1 << 20, shares) <= 1 << 20
    assert buffer_width(0.05, 256, 1000, (0.5, 1.5)) == 384


def test_buffer_never_exceeds_the_cache():
    assert buffer_width(0.07, 256, 128) == 128
    assert buffer_width(0.07, 256, 1024) == 256
    assert buffer_width(0.07, 256, 100_000) == 7000


def test_top_rows_of_all_layers_and_rows():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(3, 2, 64)).astype(np.float32)
    scores[:, :, 60:] = np.nan
    valid, k = np.array([50, 5], np.int32), np.array([[7, 5], [1, 2], [9, 0]], np.int32)
    rows = np.asarray(top_rows(jnp.asarray(scores), jnp.asarray(valid), jnp.asarray(k), 9, None))
    assert rows.shape == (3, 2, 9)
    for layer in range(3):
        for b in range(2):
            expected = sorted(np.argsort(-scores[layer, b, : valid[b]])[: k[layer, b]])
            assert rows[layer, b].tolist() == [*expected, *[-1] * (9 - k[layer, b])]


@pytest.mark.parametrize(("length", "k"), [(40, 10), (40, 40), (40, 3), (3, 3), (5, 5), (1, 1)])
def test_sinks_and_recent_rows(length, k):
    rows = np.asarray(sink_and_recent_rows(jnp.array([length]), jnp.array([k]), 4, 48))[0, 0]
    sinks = list(range(min(4, k)))
    recent = list(range(length - max(k - 4, 0), length))
    assert rows.tolist() == [*sinks, *recent, *[-1] * (48 - k)]
    assert len(set(rows[:k])) == k
