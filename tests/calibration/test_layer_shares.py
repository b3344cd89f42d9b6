"""Which layers need how many rows, and the file that Vegas takes."""

import itertools

import jax
import numpy as np
import pytest

from jaxspec import Vegas
from jaxspec.calibration.layer_shares import LEAST, MOST, calibrate_rows, overlaps, shares_of
from jaxspec.calibration.records import ROWS, write_record
from jaxspec.methods import Models
from jaxspec.models import Decoder, ModelConfig, RopeConfig, init_params

LAYERS = 3


@pytest.fixture(scope="module")
def models():
    config = ModelConfig("llama", 31, 32, 48, LAYERS, 4, 2, 16, 256, RopeConfig())
    params = jax.tree.map(lambda x: 1.5 * x, init_params(config, jax.random.key(0)))
    return Models(Decoder(config), params)


@pytest.fixture(scope="module")
def text():
    return np.random.default_rng(1).integers(0, 31, 90).tolist()


@pytest.mark.parametrize("costs", [(1, 1, 1), (0.1, 0.4, 0.9), (0.2, 0.2, 5), (0, 0.01, 4)])
def test_shares_cost_least(costs):
    """Beside all shares on a grid: a layer with share s costs a / s."""
    shares = shares_of(np.array([*(1 - np.array(costs)), 1.0]))
    assert np.mean(shares) == pytest.approx(1, abs=2e-3)
    assert min(shares) >= LEAST
    assert max(shares) <= MOST
    grid = np.linspace(LEAST, MOST - LEAST, 45)
    cost = lambda of: sum(a / s for a, s in zip(costs, of, strict=True))  # noqa: E731
    others = [(a, b, 3 - a - b) for a, b in itertools.product(grid, grid) if LEAST <= 3 - a - b <= MOST]
    assert cost(shares) <= min(map(cost, others)) * 1.001


@pytest.mark.parametrize(
    ("overlap", "shares"),
    [
        ([1.0, 1.1, 1.0], (1.0, 1.0)),
        # what the first layer may not have goes to the others
        ([0.5, 1, 1, 1, 1, 1, 1], (MOST, 0.6, 0.6, 0.6, 0.6, 0.6)),
    ],
)
def test_layers_that_lose_nothing(overlap, shares):
    assert shares_of(np.array(overlap)) == shares


def test_overlaps_that_are_no_numbers():
    with pytest.raises(ValueError, match="overlaps must be finite"):
        shares_of(np.array([np.nan, 1.0]))


def test_all_rows_predict_as_the_full_model_does(models, text):
    for found in overlaps(models, [text, text[::-1]], Vegas(rho=1.0, num_draft=3), 4):
        assert found.shape == (LAYERS + 1,)
        assert found[-1] == pytest.approx(1, abs=1e-5)
        assert np.all(found[:-1] < 0.999)


def test_a_layer_that_reads_few_rows(models, text):
    """The same as drafts whose shares say so."""
    found = np.array(list(overlaps(models, [text], Vegas(0.3, 8, 3), 4)))
    for layer in (0, LAYERS - 1):
        shares = tuple(LEAST if i == layer else 1.0 for i in range(LAYERS))
        expected = [overlap[-1] for overlap in overlaps(models, [text], Vegas(0.3, 8, 3, layer_shares=shares), 4)]
        np.testing.assert_allclose(found[:, layer], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"context": 60, "rounds": 12}, "context must lie in 104..252 for 12 rounds of 3 drafts"),
        ({"context": 253}, "context must lie in"),
        ({"context": 91}, "texts need 91 tokens each, the shortest has 90"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"method": Vegas(rho=0.01, min_keep=1, num_draft=3)}, "must give 8 rows or more at 60 tokens, got 1"),
        ({"method": Vegas(layer_shares=(1.0,) * LAYERS)}, "method must be without layer_shares"),
    ],
)
def test_impossible_settings_write_nothing(models, text, tmp_path, options, wrong):
    options = {"context": 60, "rounds": 2, "method": Vegas(num_draft=3)} | options
    with pytest.raises(ValueError, match=wrong):
        calibrate_rows("tiny", models, [text], path=tmp_path / "rows.json", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "shares", [(1.0, 0.0004), (1.0, "2"), [1.0, 1.0], np.ones(2), (float("nan"), 1.0), (17.0, 1.0), None]
)
def test_shares_that_are_none(shares):
    with pytest.raises(ValueError, match=r"layer_shares must be a tuple of numbers in 0\.001\.\.16"):
        Vegas(layer_shares=shares)


@pytest.mark.parametrize(
    ("shares", "wrong"),
    [([], "shares must be a list of numbers, got \\[\\]"), ([1.0, -1.0], "numbers in 0.001..16, got -1.0 for layer 1")],
)
def test_a_damaged_file_is_named(tmp_path, shares, wrong):
    write_record(tmp_path / "rows.json", ROWS, {"shares": shares})
    with pytest.raises(ValueError, match=f"rows.json: .*{wrong}"):
        Vegas(layer_shares=str(tmp_path / "rows.json"))


def test_no_shares_are_one_method():
    assert Vegas(layer_shares=()) == Vegas()


def test_shares_of_another_model(models):
    with pytest.raises(ValueError, match="layer_shares are those of 2 layers, the model has 3"):
        Vegas(layer_shares=(0.5, 1.5)).check_model(models.target)
