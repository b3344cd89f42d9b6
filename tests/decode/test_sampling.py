"""`to_probs` against a sorting float64 reference and transformers' own warpers; `sample` against its distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec import Sampling
from jaxspec.sampling import sample, to_probs

probs_of = jax.jit(to_probs)


def warped(logits, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """One row, float64, by sorting: the filters in the order and with the rules of transformers. A token that ties with
    the last one kept is kept too, by top-k as in transformers, by top-p as a rule of ours: which of equal tokens goes
    would otherwise depend on the sort."""
    scaled = np.asarray(logits, np.float64) / temperature
    if top_k is not None:
        kth = np.sort(scaled)[::-1][min(top_k, scaled.size) - 1]
        scaled = np.where(scaled >= kth, scaled, -np.inf)
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    if top_p is not None and top_p < 1:
        order = np.sort(probs)[::-1]
        crossing = np.searchsorted(np.cumsum(order), top_p)
        probs = np.where(probs >= order[min(crossing, probs.size - 1)], probs, 0)
    if min_p is not None:
        probs = np.where(probs >= min_p * probs.max(), probs, 0)
    return probs / probs.sum()


def assert_probs(ours, expected):
    np.testing.assert_array_equal(np.asarray(ours) > 0, expected > 0)
    np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=1e-9)


def margins(logits, temperature, top_k, top_p, min_p):
    """How far the decisions of the reference are from flipping: float32 may decide otherwise within rounding."""
    probs = warped(logits, temperature, top_k)
    gaps = [1.0]
    if top_p is not None and top_p < 1:
        gaps.append(np.abs(np.cumsum(np.sort(probs)[::-1]) - top_p).min())
    if min_p:
        gaps.append(np.abs(warped(logits, temperature, top_k, top_p) / probs.max() - min_p).min())
    return min(gaps)


FILTERS = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_k 1": {"temperature": 1.0, "top_k": 1},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "small top_p": {"temperature": 1.0, "top_p": 0.01},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "min_p 1": {"temperature": 1.0, "min_p": 1.0},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    "top_k and top_p": {"temperature": 0.5, "top_k": 3, "top_p": 0.95},
}


@pytest.mark.parametrize("case", FILTERS)
def test_equals_transformers_warpers(case):
    torch = pytest.importorskip("torch")
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    options = FILTERS[case]
    logits = np.random.default_rng(1).normal(0, 3, (16, 97)).astype(np.float32)
    scores = TemperatureLogitsWarper(options["temperature"])(None, torch.tensor(logits))
    for name, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        if name in options:
            scores = warper(options[name])(None, scores)
    expected = torch.softmax(scores, -1).numpy()
    assert_probs(probs_of(jnp.asarray(logits), Sampling(**options)), expected)
    for row, reference_row in zip(logits, expected, strict=True):
        np.testing.assert_allclose(warped(row, **options), reference_row, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize(
    ("case", "vocab"), [(case, 97) for case in FILTERS] + [("all", 1), ("all", 2), ("all", 5000), ("top_p", 5000)]
)
def test_equals_the_sorting_reference(case, vocab):
    logits = np.random.default_rng(vocab).normal(0, 4, (16, vocab)).astype(np.float32)
    options = {"top_k": None, "top_p": None, "min_p": None, **FILTERS[case]}
    ours = probs_of(jnp.asarray(logits), Sampling(**FILTERS[case]))
    for row, probs in zip(logits, ours, strict=True):
        if margins(row, **options) > 1e-5:
            assert_probs(probs, warped(row, **options))


def test_random_filters_and_values():
    hypothesis = pytest.importorskip("hypothesis")
    from hypothesis import strategies as st

    finite = {"allow_nan": False, "allow_infinity": False, "width": 32}
    # two shapes only, so that two programs serve every example
    rows = st.sampled_from([(3, 8), (2, 33)]).flatmap(
        lambda shape: st.lists(
            st.one_of(
                st.floats(-30, 30, **finite), st.integers(-3, 3).map(float), st.just(-float("inf")), st.just(-0.0)
            ),
            min_size=shape[0] * shape[1],
            max_size=shape[0] * shape[1],
        ).map(lambda values: np.array(values, np.float32).reshape(shape))
    )

    @hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
    @hypothesis.given(
        rows,
        st.floats(0.05, 5),
        st.integers(1, 40),
        st.floats(1e-6, 1),
        st.floats(0, 1),
    )
    def check(logits, temperature, top_k, top_p, min_p):
        logits[:, 0] = np.maximum(logits[:, 0], -30)  # some token must be possible
        options = {
            "temperature": float(np.float32(temperature)),
            "top_k": top_k,
            "top_p": float(np.float32(top_p)),
            "min_p": float(np.float32(min_p)),
        }
        probs = np.asarray(probs_of(jnp.asarray(logits), Sampling(**options)))
        np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-5)
        for row, got in zip(logits, probs, strict=True):
            # float32 cannot tell apart what float64 can, nor hold what is below its range
            expected = warped(row, **options)
            different = np.diff(np.unique(row[row > -np.inf])) / options["temperature"] > 1e-5
            clear = margins(row, **options) > 1e-5 and np.all(different)
            if clear and not np.any((expected > 0) & (expected < 1e-30)):
                assert_probs(got, expected)
            assert got[np.argmax(row)] > 0
            assert not np.any(got[row == -np.inf])

    check()


def test_top_k_keeps_ties_with_the_kth():
    logits = jnp.array([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0], [0.0, -0.0, 0.0, -1.0, -1.0, -2.0]])
    probs = probs_of(logits, Sampling(temperature=1.0, top_k=2))
    np.testing.assert_array_equal(probs > 0, [[0, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]])


def test_top_p_keeps_ties_with_the_crossing_token():
    """A rule of ours: transformers keeps those of the equal tokens that its sort puts last."""
    logits = jnp.log(jnp.array([[0.4, 0.2, 0.2, 0.2]]))
    probs = probs_of(logits, Sampling(temperature=1.0, top_p=0.5))
    np.testing.assert_allclose(probs, [[0.4, 0.2, 0.2, 0.2]], rtol=1e-6)


def test_top_p_keeps_the_crossing_token():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    for top_p, kept in ((0.3, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4)):
        probs = probs_of(logits, Sampling(temperature=1.0, top_p=top_p))
        assert int(jnp.sum(probs > 0)) == kept, top_p


@pytest.mark.parametrize("scale", [1, 10, 30])
@pytest.mark.parametrize("off", [{"top_p": 1.0}, {"top_k": 32_000}, {"top_k": 2**31 - 1}, {"min_p": 0.0}])
def test_filters_that_filter_nothing(off, scale):
    """Also not the tokens whose probability is too small to change a float32 sum."""
    logits = jnp.asarray(np.random.default_rng(0).normal(0, scale, (2, 32_000)), jnp.float32)
    np.testing.assert_array_equal(
        probs_of(logits, Sampling(temperature=1.0, **off)) > 0, probs_of(logits, Sampling(temperature=1.0)) > 0
    )


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-8, 1e-6, 1e-5, 9.9e-5])
def test_tiny_temperatures_are_argmax(temperature):
    logits = np.random.default_rng(0).normal(0, 5, (4, 50)).astype(np.float32)
    logits[1, 7] = logits[1, 30] = 40.0  # the first of equals
    logits[2] *= 1e30
    expected = np.eye(50)[logits.argmax(-1)]
    for sampling in (
        Sampling(temperature=temperature),
        Sampling(temperature=temperature, top_k=3, top_p=0.9, min_p=0.1),
        Sampling(temperature=np.full(4, temperature)),
    ):
        np.testing.assert_array_equal(probs_of(jnp.asarray(logits), sampling), expected)
        np.testing.assert_array_equal(probs_of(jnp.asarray(logits), sampling.check(4)), expected)
    assert Sampling(temperature=temperature, top_k=3).check(4).greedy


def test_greedy_without_temperature():
    logits = jnp.array([[1.0, 5.0, 5.0], [-1.0, -3.0, -0.5]])
    assert Sampling().greedy
    np.testing.assert_array_equal(probs_of(logits, Sampling()), [[0, 1, 0], [0, 0, 1]])


@pytest.mark.parametrize("extra", [(), (3,)])
def test_values_per_row(extra):
    """[B] values, with one or several distributions per row, a greedy row among them."""
    logits = np.random.default_rng(3).normal(0, 3, (4, *extra, 60)).astype(np.float32)
    options = {
        "temperature": np.array([0.5, 0.0, 2.0, 1.0], np.float32),
        "top_k": np.array([1, 2, 5, 60], np.int32),
        "top_p": np.array([1.0, 0.5, 0.7, 0.9], np.float32),
        "min_p": np.array([0.0, 0.5, 0.1, 0.2], np.float32),
    }
    ours = np.asarray(probs_of(jnp.asarray(logits), Sampling(**options)))
    for b in range(4):
        for got, row in zip(ours[b].reshape(-1, 60), logits[b].reshape(-1, 60), strict=True):
            if b == 1:
                np.testing.assert_array_equal(got, np.eye(60)[row.argmax()])
            else:
                assert_probs(got, warped(row, **{k: v[b].item() for k, v in options.items()}))


def test_no_token_outside_the_nucleus_is_drawn():
    logits = np.random.default_rng(0).normal(0, 2, (1, 200)).astype(np.float32)
    expected = warped(logits[0], 1.5, top_p=0.6)
    probs = probs_of(jnp.asarray(logits), Sampling(temperature=1.5, top_p=0.6))
    drawn = sample(jnp.repeat(probs, 5000, axis=0), jax.random.split(jax.random.key(0), 5000))
    assert set(np.unique(drawn)) <= set(np.flatnonzero(expected))


def test_sample_has_the_distribution():
    probs = np.array([0.5, 0.0, 0.25, 0.125, 0.1, 0.024, 0.001, 0.0])
    draws = 200_000
    drawn = jax.jit(lambda keys: sample(jnp.tile(jnp.asarray(probs, jnp.float32), (draws, 1)), keys))(
        jax.random.split(jax.random.key(1), draws)
    )
    counts = np.bincount(drawn, minlength=8)
    assert counts[probs == 0].sum() == 0
    assert stats.chisquare(counts[probs > 0], draws * probs[probs > 0]).pvalue > 1e-3


@pytest.mark.parametrize("zeros", ["first", "last", "all but one"])
def test_sample_never_draws_probability_zero(zeros):
    probs = np.zeros(1000, np.float32)
    kept = {"first": slice(500, None), "last": slice(0, 500), "all but one": slice(777, 778)}[zeros]
    probs[kept] = np.finfo(np.float32).tiny  # even the smallest normal number beats zero
    drawn = sample(jnp.tile(probs, (200, 1)), jax.random.split(jax.random.key(0), 200))
    assert np.all(probs[np.asarray(drawn)] > 0)
    assert drawn.dtype == jnp.int32


REJECTED = {
    "temperature negative": ({"temperature": -0.1}, "temperature must be a finite number >= 0, got -0.1"),
    "temperature nan": ({"temperature": float("nan")}, "temperature must be a finite"),
    "temperature infinite": ({"temperature": float("inf")}, "temperature must be a finite"),
    "temperature text": ({"temperature": "1"}, "temperature must be a finite"),
    "temperature true": ({"temperature": True}, "temperature must be a finite"),
    "one temperature of a batch": ({"temperature": [1.0, -1.0]}, "temperature must be a finite"),
    "temperature shape": ({"temperature": [1.0, 1.0, 1.0]}, r"temperature must be a scalar or have shape \[2\]"),
    "top_k 0": ({"temperature": 1.0, "top_k": 0}, "top_k must be an integer >= 1, got 0"),
    "top_k float": ({"temperature": 1.0, "top_k": 5.0}, "top_k must be an integer >= 1"),
    "top_k beyond int32": ({"temperature": 1.0, "top_k": 2**31}, "top_k must be an integer >= 1"),
    "top_k far beyond": ({"temperature": 1.0, "top_k": 2**70}, "top_k must be an integer >= 1"),
    "top_p 0": ({"temperature": 1.0, "top_p": 0.0}, r"top_p must be a number in \(0, 1\]"),
    "top_p 1.1": ({"temperature": 1.0, "top_p": 1.1}, r"top_p must be a number in \(0, 1\]"),
    "min_p negative": ({"temperature": 1.0, "min_p": -0.1}, r"min_p must be a number in \[0, 1\]"),
    "min_p 2": ({"temperature": 1.0, "min_p": 2}, r"min_p must be a number in \[0, 1\]"),
    "filters without temperature": ({"top_k": 5}, "filters need a temperature"),
    "min_p without temperature": ({"min_p": 0.1}, "filters need a temperature"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_wrong_values_raise(case):
    options, message = REJECTED[case]
    with pytest.raises(ValueError, match=message):
        Sampling(**options).check(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "sampling temperature must be a finite number >= 0, got -1"),
        ({"temperature": float("nan")}, "sampling temperature must be a finite number >= 0, got nan"),
        ({"temperature": 1.0, "top_k": 0}, "sampling top_k must be an integer >= 1, got 0"),
        ({"temperature": 1.0, "top_p": 1.5}, r"sampling top_p must be a number in \(0, 1\], got 1.5"),
    ],
)
def test_wrong_numbers_raise_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_what_jax_maps_over_is_not_checked():
    sampling = Sampling(temperature=np.ones(2), top_k=np.ones(2, np.int32), top_p=np.ones(2))
    assert jax.vmap(lambda one: one.top_k)(sampling).tolist() == [1, 1]
    assert jax.tree.map(lambda x: x - 2, sampling).temperature.tolist() == [-1, -1]
    assert not jax.jit(lambda t: Sampling(temperature=t).valid)(-1.0)


def test_unknown_options_raise():
    with pytest.raises(TypeError, match="repetition_penalty"):
        Sampling(repetition_penalty=1.1)
