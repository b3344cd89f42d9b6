"""Planted retrieval heads are found, and a scan survives interruption."""

import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calibration_cases import PLANTED

from jaxspec.calibration import scan as scan_module
from jaxspec.calibration.heads import Answers, answer, mass_on_span, retrieval_heads
from jaxspec.calibration.needles import Needle, filler, make_needle, read_texts
from jaxspec.calibration.records import HEADS, model_hash, read_record
from jaxspec.calibration.scan import Scan, default_lengths, scan_heads
from jaxspec.calibration.search import HeadSet

PAYLOAD = (41, 42, 43, 44)


def hidden(length, depth, seed):
    """Random ids below 40 with 41, 42, 43, 44 somewhere in them; 40 asks for them."""
    rng = np.random.default_rng(seed)
    hay = rng.integers(0, 38, length - 5).tolist()
    at = int(depth * len(hay))
    return Needle((*hay[:at], *PAYLOAD, *hay[at:], 40), (at, at + 4), PAYLOAD, depth)


def test_exactly_the_planted_heads_are_found(planted):
    needles = [hidden(length, depth, i) for i, (length, depth) in enumerate([(60, 0.1), (90, 0.5), (100, 0.9)])]
    found = answer(planted, needles, 100)
    np.testing.assert_array_equal(found.tokens[:, :4], [PAYLOAD] * 3)
    np.testing.assert_array_equal(found.recall, 1)
    scores = np.mean(found.mass, axis=0) / len(PAYLOAD)
    assert scores.shape == (2, 8)
    ranked = np.dstack(np.unravel_index(np.argsort(-scores, axis=None), scores.shape))[0]
    assert {tuple(map(int, at)) for at in ranked[: len(PLANTED)]} == set(PLANTED)
    assert min(scores[at] for at in PLANTED) > 0.9
    assert sorted(scores.ravel())[-len(PLANTED) - 1] < 0.3
    assert HeadSet(1, (4, 5)) in retrieval_heads(scores, 4, per_layer=2)
    assert retrieval_heads(scores, 4, per_layer=1)[0] == HeadSet(0, (1,))


def test_heads_earn_nothing_for_other_tokens(planted):
    """A needle whose payload is never emitted: the model answers with what stands in the text."""
    needle = hidden(60, 0.5, 0)
    other = Needle(needle.ids, needle.span, (50, 51, 52, 53), 0.5)
    found = answer(planted, [other], 60)
    assert found.recall == [0]
    assert not found.mass.any()


def test_an_answer_ends_with_an_end_id(planted):
    found = answer(planted, [hidden(60, 0.5, 0)], 60, eos_ids=(43,))
    assert found.tokens[0].tolist()[:3] == [41, 42, -1]
    assert found.recall == [0.5]


def test_mass_on_a_span():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 4, 8)), rng.normal(size=(2, 20, 2, 8))
    position, span = np.array([15, 9]), np.array([[3, 7], [8, 12]])
    mass = mass_on_span(*(jnp.asarray(x, jnp.float32) for x in (q, k)), jnp.asarray(position), jnp.asarray(span))
    for b in range(2):
        for head in range(4):
            logits = k[b, : position[b] + 1, head // 2] @ q[b, head] / np.sqrt(8)
            weights = np.exp(logits) / np.exp(logits).sum()
            np.testing.assert_allclose(mass[b, head], weights[span[b, 0] : span[b, 1]].sum(), rtol=1e-5)


def test_candidates_of_a_layer():
    scores = np.array([[9, 1, 8, 7, 2, 6, 0, 3], [1, 2, 3, 4, 9, 9, 9, 9]], float)
    found = retrieval_heads(scores, num_kv_heads=2, per_layer=4)
    assert found == [HeadSet(0, (0, 2, 3, 5)), HeadSet(0, (0, 1, 2, 3)), HeadSet(1, (4, 5, 6, 7))]


def encode(text):
    return [ord(c) % 64 for c in text]


def test_needle_prompts():
    text = encode(filler(400, seed=3))
    for depth in (0.0, 0.35, 1.0):
        needle = make_needle(encode, text, 500, depth, 7, ("<user>", "<end>"))
        assert len(needle.ids) == 500
        begin, end = needle.span
        fact = list(needle.ids[begin:end])
        assert any(tuple(fact[i : i + len(needle.payload)]) == needle.payload for i in range(len(fact)))
        room = 500 - (end - begin) - 6
        assert begin == pytest.approx(6 + depth * room, abs=0.35 * room * depth + 1)
        assert needle.ids[:6] == tuple(encode("<user>"))
        assert needle.recall([*needle.payload, 1]) == 1
        assert needle.recall([]) == 0
    assert make_needle(encode, text, 500, 0.5, 7) == make_needle(encode, text, 500, 0.5, 7)
    assert make_needle(encode, text, 500, 0.5, 7) != make_needle(encode, text, 500, 0.5, 8)
    # a text shorter than the haystack is repeated
    assert len(make_needle(encode, text[:50], 500, 0.5, 7).ids) == 500
    with pytest.raises(ValueError, match="need at least"):
        make_needle(encode, text, 50, 0.5, 0)
    with pytest.raises(ValueError, match=r"depth must lie in 0\.\.1"):
        make_needle(encode, text, 500, 1.5, 0)


def test_texts(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abc")
    assert read_texts([path], encode) == [encode("abc")]
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_texts([path], encode)
    path.write_text("")
    with pytest.raises(ValueError, match="holds no text"):
        read_texts([path], encode)


class Fake:
    """Stands in for `answer`: needles below four fifths of the depth are recalled; it can be interrupted."""

    def __init__(self, fail_at=None, recall=1.0):
        self.calls, self.fail_at, self.recall = 0, fail_at, recall

    def __call__(self, models, needles, width, eos_ids=()):
        self.calls += 1
        if self.calls == self.fail_at:
            raise KeyboardInterrupt
        config = models.target.config
        heads = np.arange(config.num_layers * config.num_heads).reshape(1, config.num_layers, config.num_heads)
        mass = np.array([n.depth * len(n.payload) for n in needles])[:, None, None] * heads
        recall = np.array([self.recall if n.depth < 0.8 else 0.5 for n in needles])
        return Answers(np.zeros((len(needles), 4), np.int32), recall, mass)


def run_scan(monkeypatch, models, path, fake, **changes):
    monkeypatch.setattr(scan_module, "answer", fake)
    monkeypatch.setattr(scan_module, "TOKENS_AT_ONCE", 1000)
    seen = []
    scan = Scan(**{"lengths": (300, 450), "depths": 5, **changes})
    record = scan_heads("tiny", models, encode, [encode(filler(300))], scan, path, progress=lambda *n: seen.append(n))
    return record, seen


def test_a_needle_is_made_once(monkeypatch, pair, tmp_path):
    made = mock.Mock(wraps=make_needle)
    monkeypatch.setattr(scan_module, "make_needle", made)
    run_scan(monkeypatch, pair[0], tmp_path / "heads.json", Fake())
    assert made.call_count == 10


def test_an_interrupted_scan_goes_on_where_it_stopped(monkeypatch, pair, tmp_path):
    whole, seen = run_scan(monkeypatch, pair[0], tmp_path / "whole.json", Fake())
    assert seen[0] == (0, 10)
    assert seen[-1] == (10, 10)
    path = tmp_path / "heads.json"
    path.write_text("what was there before")
    with pytest.raises(KeyboardInterrupt):
        run_scan(monkeypatch, pair[0], path, Fake(fail_at=3))
    assert path.read_text() == "what was there before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["heads.json", "heads.json.partial", "whole.json"]
    with pytest.raises(ValueError, match="another model or other settings"):
        run_scan(monkeypatch, pair[0], path, Fake(), depths=4)
    rest = Fake()
    record, seen = run_scan(monkeypatch, pair[0], path, rest)
    assert seen[0] == (5, 10)
    assert rest.calls == 3
    assert record == whole
    assert sorted(p.name for p in tmp_path.iterdir()) == ["heads.json", "whole.json"]
    stored = read_record(path, HEADS)
    assert stored["scores"] == record["scores"]
    # recalled are the needles at depths .1 .3 .5 .7, at both lengths
    np.testing.assert_allclose(record["scores"], 0.4 * np.arange(8).reshape(2, 4), atol=1e-5)
    assert record["answered"] == 8


def test_only_answers_that_recall_count(monkeypatch, pair, tmp_path):
    with pytest.raises(ValueError, match="answered none of 10 needles"):
        run_scan(monkeypatch, pair[0], tmp_path / "a.json", Fake(recall=0.5))
    # a run that is finished is in the way of no other
    assert not list(tmp_path.iterdir())
    assert run_scan(monkeypatch, pair[0], tmp_path / "a.json", Fake(), depths=4)[0]["answered"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": ()}, "lengths must lie in"),
        ({"lengths": (600,)}, r"in 1\.\.496"),
        ({"depths": 0}, "at least 1"),
        ({"lengths": (300, 40)}, "needle prompts need at least"),
    ],
)
def test_impossible_scans(monkeypatch, pair, tmp_path, changes, message):
    fake = Fake()
    with pytest.raises(ValueError, match=message):
        run_scan(monkeypatch, pair[0], tmp_path / "a.json", fake, **changes)
    assert not fake.calls
    assert not list(tmp_path.iterdir())


def test_default_lengths():
    assert default_lengths(8192) == (1024, 2048, 4096)
    assert default_lengths(40000) == (1024, 2048, 4096, 8192, 16384, 32768)
    assert default_lengths(600) == (300,)


def test_the_models_hash(pair):
    models, _ = pair
    name = model_hash(models.target, models.params)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), models.params)
    assert model_hash(models.target, half) == name
    other = {**models.params, "lm_head": models.params["lm_head"].at[0, 0].add(1)}
    assert model_hash(models.target, other) != name


def test_records_are_checked(tmp_path):
    path = tmp_path / "x.json"
    for record, message in (
        ({"schema_version": 1, "kind": "dustin"}, r"not a retrieval-heads file \(its kind is 'dustin'\)"),
        ({}, r"not a retrieval-heads file \(it states no kind\)"),
        ({"schema_version": 9, "kind": HEADS}, "schema version 9 instead of 1"),
    ):
        path.write_text(json.dumps(record))
        with pytest.raises(ValueError, match=message):
            read_record(path, HEADS)
    path.write_text("[1")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_record(path, HEADS)
