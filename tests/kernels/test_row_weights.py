"""The normalised sum of stored weights, against the formula; programs take one step or several."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import row_weights

BATCH, STEPS, KV_HEADS, BLOCK_S, COLUMNS = 3, 5, 2, 16, 16
CAPACITY = STEPS * BLOCK_S - 3
USED = 12  # the other columns are padding


def load_lse(lse_ref, batch, kv_head, column, mask):
    return pltriton.load(lse_ref.at[batch, kv_head, column], mask=mask, other=0.0)


@pytest.mark.parametrize("per_program", [1, 2, 3, 7, None])
@pytest.mark.parametrize("num_out", [1, 3])
@pytest.mark.parametrize("keys_first", [True, False])
def test_sum(keys_first, num_out, per_program):
    generator = np.random.default_rng(0)
    tile = (BLOCK_S, COLUMNS) if keys_first else (COLUMNS, BLOCK_S)
    weights = generator.random((BATCH, STEPS, KV_HEADS, *tile), np.float32)
    top = generator.normal(size=(BATCH, STEPS, KV_HEADS, COLUMNS)).astype(np.float32)
    lse = generator.normal(size=(BATCH, KV_HEADS, COLUMNS)).astype(np.float32)
    written, visible = np.array([CAPACITY, 20, 0], np.int32), np.array([CAPACITY, 18, 0], np.int32)
    by_row = weights if keys_first else np.swapaxes(weights, -1, -2)
    shares = by_row * np.exp2(top - lse[:, None])[:, :, :, None]
    shares = np.moveaxis(shares, 2, 3).reshape(BATCH, STEPS * BLOCK_S, KV_HEADS, COLUMNS)[:, :CAPACITY, :, :USED]
    expected = shares.reshape(BATCH, CAPACITY, KV_HEADS, num_out, -1).sum(axis=(2, 4)) * 0.5
    row = np.arange(CAPACITY)
    expected = np.where((row < visible[:, None])[..., None], expected, -np.inf)

    # steps that never ran hold anything
    ran = np.arange(STEPS) * BLOCK_S < written[:, None]
    got = row_weights.sum_weights(
        jnp.asarray(np.where(ran[:, :, None, None, None], weights, np.nan)),
        jnp.asarray(np.where(ran[:, :, None, None], top, np.nan)),
        jnp.asarray(written),
        jnp.asarray(visible),
        (jnp.asarray(lse),),
        load_lse,
        capacity=CAPACITY,
        keys_first=keys_first,
        used=USED,
        num_out=num_out,
        factor=0.5,
        interpret=True,
        name="sum",
        per_program=per_program,
    )
    np.testing.assert_allclose(got, np.swapaxes(expected, 1, 2), rtol=1e-5)
