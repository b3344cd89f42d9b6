import jax
import jax.numpy as jnp
import numpy as np
import pytest
from method_cases import make_case, prompts

from jaxspec import Finish, Sampling
from jaxspec.methods import Quest
from jaxspec.methods.quest import PageBounds, page_bounds, select_pages
from jaxspec.profiling import fused_step
from jaxspec.requests import check_request
from jaxspec.stream import _prefill

NEW = 24


def test_bounds_of_finished_pages_follow_the_cache():
    case = make_case("quest", layers=1, page_size=2)
    prompt, length = prompts()
    request = check_request(
        case.models.target, prompt, length, jax.random.key(0), case.method, Sampling(), NEW, (), 0, None
    )
    state, _ = _prefill(case.models, request, case.method, NEW)
    size = case.method.page_size
    while np.any(state.finish == Finish.RUNNING):
        state, _ = fused_step(case.models, state, request, np.zeros(3, bool), case.method, NEW)
        for bounds, layer in zip(state.method_state, state.cache, strict=True):
            for b in range(3):
                for page in range(int(state.length[b]) // size):
                    keys = np.asarray(layer.k[b, page * size : (page + 1) * size])
                    np.testing.assert_array_equal(bounds.low[b, page], keys.min(axis=0))
                    np.testing.assert_array_equal(bounds.high[b, page], keys.max(axis=0))
    assert np.min(state.length) > 2 * size


@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_are_ranked_by_the_summed_upper_bound_of_their_logits(page_size):
    rng = np.random.default_rng(0)
    q, keys = rng.normal(size=(2, 1, 4, 8)), rng.normal(size=(2, 32, 2, 8))
    num_pages, wanted = np.array([32, 20]) // page_size, np.array([3, 2])
    bounds = page_bounds(jnp.asarray(keys, jnp.float32), page_size)
    rows = select_pages(
        0,
        jnp.asarray(q, jnp.float32),
        None,
        None,
        ((PageBounds(*bounds),), jnp.asarray(num_pages, jnp.int32), jnp.asarray(wanted, jnp.int32)),
        page_size=page_size,
        width=4,
        backend=None,
    )
    for b in range(2):
        promise = []
        for page in range(num_pages[b]):
            rows_of_page = keys[b, page * page_size : (page + 1) * page_size]
            low, high = rows_of_page.min(axis=0), rows_of_page.max(axis=0)
            bound = [np.maximum(q[b, 0, n] * low[n // 2], q[b, 0, n] * high[n // 2]).sum() for n in range(4)]
            logits = np.einsum("nh,snh->ns", q[b, 0], rows_of_page[:, [0, 0, 1, 1]])
            assert np.all(bound >= logits.max(axis=1) - 1e-9)
            promise.append(np.sum(bound))
        best = sorted(np.argsort(promise)[::-1][: wanted[b]])
        expected = [page * page_size + i for page in best for i in range(page_size)]
        assert rows[b].tolist() == expected + [-1] * (4 * page_size - len(expected))


def test_wrong_page_sizes():
    for size in (0, 3, 256):
        with pytest.raises(ValueError, match=r"1\.\.128"):
            Quest(page_size=size)
