"""Fits, formulas and files of the latency model."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from jaxspec.methods import Models, Vegas
from jaxspec.models import Decoder, ModelConfig, RopeConfig
from jaxspec.planning import LatencyProfile, Line, expected_tokens, fit_line, load_profile, save_profile
from jaxspec.planning import measure as measuring
from jaxspec.planning.measure import rows_of_a_tile

PROFILE = LatencyProfile(
    num_layers=4,
    batch=2,
    rows=11,
    attention=Line(2e-8, 3e-5),
    mlp=5e-5,
    head=1e-4,
    verify_attention=Line(3e-8, 4e-5),
    verify_mlp=8e-5,
    verify_head=2e-4,
    overhead=1e-5,
    selected=Line(0.0, 2e-5),
    scoring=Line(1e-9, 1e-5),
)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.97, 1.0])
@pytest.mark.parametrize("g", [0, 1, 5, 10])
def test_tokens_per_round_against_simulation(alpha, g):
    """Drafts are accepted with chance alpha until one is not; the round emits one token more."""
    rng = np.random.default_rng(0)
    accepted = np.cumprod(rng.random((200_000, g)) < alpha, axis=1).sum(axis=1) if g else np.zeros(200_000)
    spread = accepted.std() / np.sqrt(accepted.size)
    assert expected_tokens(alpha, g) == pytest.approx(1 + accepted.mean(), abs=5 * spread + 1e-12)


def test_limits_of_tokens_per_round():
    """At alpha = 1 and around it, and exactly 1 without drafts; arrays as well."""
    g = np.arange(33)
    np.testing.assert_array_equal(expected_tokens(1.0, g), g + 1)
    np.testing.assert_array_equal(expected_tokens(np.linspace(0, 1, 50), 0), 1)
    for alpha in (1 - 1e-9, 1 - 1e-4, 1 - 0.9999e-3, 1 - 1.0001e-3, 0.5):
        exact = np.array([sum(alpha**i for i in range(n + 1)) for n in g])
        np.testing.assert_allclose(expected_tokens(alpha, g), exact, rtol=1e-7)


def test_a_line_is_recovered():
    n = [1024, 4096, 32768]
    line, error = fit_line(n, [3e-8 * x + 5e-5 for x in n])
    np.testing.assert_allclose(line, (3e-8, 5e-5), rtol=1e-6)
    assert error < 1e-9
    noisy = np.array([3e-8 * x + 5e-5 for x in n]) * [1.1, 0.9, 1.0]
    line, error = fit_line(n, noisy)
    coefficients = np.linalg.lstsq(np.stack([n, np.ones(3)], axis=1), noisy, rcond=None)[0]
    np.testing.assert_allclose(line, coefficients, rtol=1e-9)
    assert error == pytest.approx(np.max(np.abs(line.at(np.array(n)) / noisy - 1)))


@pytest.mark.parametrize(
    ("n", "t", "line"),
    [
        ([5], [2.0], (0, 2)),  # one point has no slope
        ([1, 3], [4.0, 2.0], (0, 3)),  # time does not fall with length
        ([2, 4], [1.0, 4.0], (0.9, 0)),  # nor does it begin below 0: least squares through the origin
    ],
)
def test_no_figure_comes_out_negative(n, t, line):
    assert fit_line(n, t)[0] == pytest.approx(line)


def test_costs_of_rounds_by_hand():
    n, costs, sparse = 1000, PROFILE.costs(), PROFILE.costs(sparse=True)
    attention, verify_attention = 2e-8 * n + 3e-5, 3e-8 * n + 4e-5
    plain, most = 4 * (attention + 5e-5) + 1e-4, 4 * (verify_attention + 8e-5) + 2e-4
    assert costs.draft_step(3, 2, n) == pytest.approx(3 * attention + 2 * 5e-5 + 1e-4)
    assert costs.round(4, 4, 0, n) == costs.plain_step(n) == pytest.approx(plain + 1e-5)
    assert costs.verify(10, n) == pytest.approx(most)
    assert costs.verify(5, n) == pytest.approx((plain + most) / 2)
    assert costs.round(3, 2, 5, n) == pytest.approx(5 * costs.draft_step(3, 2, n) + (plain + most) / 2 + 1e-5)
    # over selected rows a draft's attention is flat in n, and verification scores and selects
    assert sparse.draft_step(3, 2, 10 * n) == sparse.draft_step(3, 2, n) == pytest.approx(3 * 2e-5 + 2 * 5e-5 + 1e-4)
    assert sparse.verify(5, n) == pytest.approx((plain + most) / 2 + 4 * (1e-9 * n + 1e-5))
    assert sparse.plain_step(n) == costs.plain_step(n)
    bare = dataclasses.replace(PROFILE, selected=None, scoring=None)
    with pytest.raises(ValueError, match="lacks sparse attention"):
        bare.costs(sparse=True)


def test_files(tmp_path):
    path = tmp_path / "profile.json"
    save_profile(path, PROFILE, {"device": "a device"})
    assert load_profile(path) == PROFILE
    assert hash(load_profile(path)) == hash(PROFILE)
    assert json.loads(path.read_text())["device"] == "a device"
    with pytest.raises(TypeError):
        save_profile(path, PROFILE, {"device": object()})
    assert load_profile(path) == PROFILE  # the old file stayed
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: "nonsense", "not valid JSON"),
        (lambda r: json.dumps([r]), "expected a JSON object, got list"),
        (lambda r: json.dumps({**r, "schema_version": 2}), "not a latency profile of schema version 1"),
        (lambda r: json.dumps({"schema_version": 1, "kind": "bench"}), "a file of kind 'bench', not a latency profile"),
        (
            lambda r: json.dumps({"schema_version": 1, "rows": [], "metrics": {}}),
            "a trace, not a latency profile, which",
        ),
        (lambda r: json.dumps({**r, "profile": 3}), "must have the fields attention, batch"),
        (lambda r: json.dumps({**r, "profile": {**r["profile"], "more": 1}}), "must have the fields"),
        (lambda r: json.dumps({**r, "profile": {**r["profile"], "mlp": "1"}}), "mlp must be finite seconds >= 0"),
        (lambda r: json.dumps({**r, "profile": {**r["profile"], "head": float("nan")}}), "head must be finite"),
        (lambda r: json.dumps({**r, "profile": {**r["profile"], "attention": [1.0]}}), "attention must be"),
        (lambda r: json.dumps({**r, "profile": {**r["profile"], "attention": None}}), "attention must be"),
        (lambda r: json.dumps({**r, "profile": {**r["profile"], "scoring": [-1.0, 0]}}), "scoring must be"),
        (lambda r: json.dumps({**r, "profile": {**r["profile"], "rows": 1}}), "rows must be an integer >= 2"),
        (lambda r: json.dumps({**r, "profile": {**r["profile"], "batch": 1.5}}), "batch must be an integer >= 1"),
    ],
)
def test_damaged_files(tmp_path, change, message):
    path = tmp_path / "profile.json"
    save_profile(path, PROFILE, {})
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(ValueError, match=message) as raised:
        load_profile(path)
    assert str(path) in str(raised.value)


def test_a_layer_takes_time():
    with pytest.raises(ValueError, match="a layer must take time"):
        dataclasses.replace(PROFILE, attention=(0.0, 0.0), mlp=0.0)


@pytest.mark.parametrize(("group", "rows"), [(1, 64), (6, 10), (8, 8), (24, 2), (64, 2)])
def test_query_rows_of_a_kernels_tile(group, rows):
    """64 (query, head) pairs of a kv head; without kernels there is no tile."""
    for backend, expected in (("interpret", rows), ("xla", None)):
        target = SimpleNamespace(backend=backend, config=SimpleNamespace(group_size=group))
        assert rows_of_a_tile(SimpleNamespace(target=target)) == expected


def test_whole_steps_add_up(monkeypatch):
    """Attention costs 3 + n / 100 beside MLPs and 2 more alone, an MLP 5 and 2 more alone; milliseconds, all layers."""

    class Loops:
        def __init__(self, models, batch, contexts, rows, steps, repeats, num_layers=None):
            self.num_layers = num_layers or 2

        def lower(self, job):
            return SimpleNamespace(compile=lambda: None)

        def time(self, job, contexts):
            return [1e-3 * self.milliseconds(job, n) for n in contexts]

        def milliseconds(self, job, n):
            k, rows = self.num_layers, job.keywords.get("count", 1)
            layers = job.keywords.get("layers") or SimpleNamespace(attn=(True,), mlp=(True,))
            attn, mlp = any(layers.attn), any(layers.mlp)
            attention = 1 if job.func is measuring.selected_forwards else 3 + n / 100
            scoring = 4 if job.func is measuring.scored_forwards else 0
            return rows + k * (attn * attention + mlp * 5 + 2 * (attn != mlp) + scoring)

        def drop(self):
            pass

    monkeypatch.setattr(measuring, "_Loops", Loops)
    config = ModelConfig("llama", 64, 32, 64, 6, 2, 2, 16, 4096, RopeConfig())
    models = Models(Decoder(config, "xla"), {"embedding": np.zeros(1, np.float32)})
    found = measuring.measure(models, 1, [100, 300], max_draft=3, selection=Vegas())
    costs, sparse = found.profile.costs(), found.profile.costs(sparse=True)
    for n in (100, 300):
        assert costs.mlp == pytest.approx(5e-3)
        assert costs.draft_step(6, 6, n) == pytest.approx(1e-3 * (1 + 6 * (8 + n / 100)))
        assert sparse.draft_step(6, 6, n) == pytest.approx(1e-3 * (1 + 6 * 6), abs=1e-5)
        assert costs.verify(3, n) == pytest.approx(1e-3 * (4 + 6 * (8 + n / 100)))
        assert sparse.verify(3, n) == pytest.approx(costs.verify(3, n) + 6 * 4e-3)
