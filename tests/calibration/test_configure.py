"""Traces measure what both models attend to, and end as a configuration that Dustin takes."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.calibration.configure import SIGNALS, configure
from jaxspec.calibration.plots import plot_arr, plot_heads
from jaxspec.calibration.records import DUSTIN, read_record
from jaxspec.calibration.search import HeadSet
from jaxspec.calibration.traces import collect_traces
from jaxspec.dustin.config import options_from_config
from jaxspec.methods import Dustin
from jaxspec.models import init_cache
from jaxspec.types import Collect

G, ROUNDS = 2, 3
TARGET = [HeadSet(0, (0, 1)), HeadSet(1, (1, 3))]
DRAFT = [HeadSet(0, (2,)), HeadSet(0, (0, 3))]


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 19, n).tolist() for n in (40, 33)]


@partial(jax.jit, static_argnums=0)
def run(model, params, tokens):
    layers = tuple(range(model.config.num_layers))
    cache = init_cache(model.config, 1, 64, jnp.float32)
    return model.apply({"params": params}, tokens, cache, jnp.int32(0), collect=Collect(queries=layers))


def dense(model, params, tokens):
    """Queries and keys per layer of one whole text, and its logits."""
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(tokens)] = tokens
    out = run(model, params, padded)
    return [np.asarray(q[0]) for q in out.queries], [np.asarray(c.k[0]) for c in out.cache], np.asarray(out.logits[0])


def mass(query, keys, last, n, heads, group):
    """Mean softmax weight over heads of rows < n for a query that sees rows up to `last`."""
    total = np.zeros(n)
    for head in heads:
        logits = keys[: last + 1, head // group].astype(np.float64) @ query[head] / np.sqrt(query.shape[-1])
        weights = np.exp(logits - logits.max())
        total += (weights / weights.sum())[:n]
    return total / len(heads)


def test_traces_are_the_true_attention(pair, prompts):
    models, draft = pair
    rounds = list(collect_traces(models, draft, prompts, TARGET, DRAFT, num_draft=G, rounds=ROUNDS))
    assert len(rounds) == ROUNDS
    for b, prompt in enumerate(prompts):
        text = list(prompt)
        text.append(int(np.argmax(dense(models.target, models.params, text)[2][len(text) - 1])))
        for found in rounds:
            trace, n = found[b], len(text) - 1
            assert trace.weights.shape == (2, n)
            drafts = []
            for _ in range(G):
                logits = dense(draft, models.draft_params, text + drafts)[2]
                drafts.append(int(np.argmax(logits[len(text) + len(drafts) - 1])))
            queries, keys, logits = dense(models.target, models.params, text + drafts)
            for layer in range(2):
                window = [mass(queries[layer][n + i], keys[layer], n - 1, n, range(4), 2) for i in range(G + 1)]
                np.testing.assert_allclose(trace.weights[layer], np.mean(window, axis=0), atol=1e-5)
            for scores, (layer, heads) in zip(trace.history, ((c.layer, c.heads) for c in TARGET), strict=True):
                np.testing.assert_allclose(
                    scores, mass(queries[layer][n - 1], keys[layer], n - 1, n, heads, 2), atol=1e-5
                )
            own_queries, own_keys, _ = dense(draft, models.draft_params, text + drafts)
            for scores, candidate in zip(trace.draft, DRAFT, strict=True):
                each = [mass(own_queries[0][n + i], own_keys[0], n + i, n, candidate.heads, 2) for i in range(G)]
                np.testing.assert_allclose(scores, np.mean(each, axis=0), atol=1e-5)
            choice = np.argmax(logits[n : n + G + 1], axis=1).tolist()
            accepted = next((i for i in range(G) if drafts[i] != choice[i]), G)
            text += [*drafts[:accepted], choice[accepted]]


@pytest.fixture(scope="module")
def record(pair, prompts, tmp_path_factory):
    models, draft = pair
    path = tmp_path_factory.mktemp("config") / "dustin.json"
    scores = [np.random.default_rng(i).random((layers, 4)) for i, layers in enumerate((2, 1))]
    lines = []
    found = configure(
        ("big", "small"), models, draft, tuple(scores), prompts, path, budgets=(12, 20), num_draft=G, rounds=ROUNDS,
        sinks=2, window=3, per_layer=2, progress=lines.append,
    )  # fmt: skip
    assert lines[0] == "traces of round 1 of 3"
    assert lines[-1].startswith("ARR with 20 rows: hybrid ")
    assert read_record(path, DUSTIN) == {"schema_version": 1, "kind": "dustin", **json.loads(json.dumps(found))}
    return path, found


def test_a_configuration_is_one_that_dustin_takes(pair, record):
    path, found = record
    for budget in ("12", "20"):
        table = found["arr"][budget]
        mean = {signal: np.mean(table[signal]) for signal in SIGNALS}
        assert all(len(table[signal]) == 2 for signal in SIGNALS)
        assert max(mean.values()) == mean["oracle"]
        assert mean["hybrid"] >= max(mean["history"], mean["draft"]) - 1e-9
        assert 0 <= found["splits"][budget] <= int(budget) - 5
    assert all(np.mean(found["arr"]["20"][s]) > np.mean(found["arr"]["12"][s]) for s in SIGNALS)
    assert found["target"]["num_layers"] == 2
    assert found["target"]["hash"] != found["draft"]["hash"]
    method = Dustin(model=pair[1], **options_from_config(path))
    assert (method.budget, method.sinks, method.window, method.num_draft) == (12, 2, 3, G)
    assert method.split == found["splits"]["12"]
    assert [[layer, list(heads)] for layer, heads in method.target_heads] == found["target_heads"]
    assert [[layer, list(heads)] for layer, heads in method.draft_heads] == found["draft_heads"]
    assert options_from_config(path, 20)["split"] == found["splits"]["20"]
    assert options_from_config({**found, "splits": {"12": 3}}, 26)["split"] == 9
    hash(method)


@pytest.mark.parametrize("damage", [{"settings": {}}, {"splits": []}, {"target_heads": 3}, {"budget": "x"}])
def test_damaged_configurations(record, damage):
    with pytest.raises(ValueError, match="malformed configuration of dustin"):
        options_from_config({**record[1], **damage})


def test_wrong_requests(pair, prompts):
    models, draft = pair
    scores = (np.ones((2, 4)), np.ones((1, 4)))
    with pytest.raises(ValueError, match=r"budgets must exceed sinks \+ window = 20, got \[20\]"):
        configure(("a", "b"), models, draft, scores, prompts, None, budgets=(20,))
    with pytest.raises(ValueError, match="prompts longer than the budget of 64 rows"):
        configure(("a", "b"), models, draft, scores, prompts, None, budgets=(64,))


def test_plots(record, tmp_path):
    pytest.importorskip("matplotlib")
    plot_arr(tmp_path / "arr.png", record[1])
    plot_heads(tmp_path / "heads.png", {"scores": [[0.1, 0.5], [0.3, 0.2]], "model": {"name": "big"}})
    for name in ("arr.png", "heads.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / name).stat().st_size > 5000
