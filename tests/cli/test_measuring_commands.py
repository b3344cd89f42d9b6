"""`jaxspec bench`, `jaxspec tune` and `jaxspec generate --tuned`, on a tiny checkpoint."""

import json

import pytest

import jaxspec
from jaxspec.benchmarking import runs as benchmark_runs
from jaxspec.benchmarking import search
from jaxspec.cli import main, speed_plot
from jaxspec.method_specs import build_method, describe, parse_spec
from tests.documented import documented

pytest.importorskip("rich")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    return str(path)


def run(capsys, *args):
    code = main([str(arg) for arg in args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_bench(capsys, tmp_path, checkpoint, text):
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    shared = ["--context", 100, "--new-tokens", 12, "--repeats", 2, "--json", out, "--plot", plot, "--phases"]
    code, shown, _ = run(
        capsys, "bench", "--model", checkpoint.converted, "--text", text, "--batch", 2, *shared,
        "--methods", "vegas:rho=0.5,min_keep=4,num_draft=2",
    )  # fmt: skip
    assert code == 0
    record = json.loads(out.read_text())
    plain, vegas = record["results"]
    assert set(record) == documented("bench")
    synthetic = {"assumed_acceptance", "whole_step_bytes", "extrapolated_from_layers"}
    of_plain = {"step_bytes", "share_of_bandwidth", "ceiling_bytes_per_second"}
    assert set(plain) == documented("bench", 1) - synthetic
    assert set(vegas) == set(plain) - of_plain
    assert (record["schema_version"], record["kind"], record["synthetic"]) == (1, "bench", False)
    assert plain["method"] == "plain"
    assert plain["speedup"] == 1
    assert plain["tokens_per_round"] == 1
    assert vegas["spec"] == {"method": "vegas", "options": {"rho": 0.5, "min_keep": 4, "num_draft": 2}}
    assert vegas["speedup"] == pytest.approx(vegas["tokens_per_second"] / plain["tokens_per_second"])
    assert vegas["runs"] == 2
    assert set(vegas["phases_milliseconds"]) == {"draft", "verify", "accept", "observe", "round"}
    all_running = "tokens_per_second_all_running"
    assert plain["speedup_all_running"] == 1
    assert vegas["speedup_all_running"] == pytest.approx(vegas[all_running] / plain[all_running])
    # plain rows end together
    assert plain[all_running] == pytest.approx(plain["tokens_per_second"])
    assert plain["tokens_per_round_by_row"] == [1, 1]
    for result in (plain, vegas):
        assert result["method"] in shown
        assert f"{result['speedup_all_running']:.2f}" in shown
        per_round = result[all_running] * result["milliseconds_per_round"] / 1e3 / 2
        assert 1 - 1e-6 <= per_round <= (3 if result is vegas else 1) + 1e-6
        assert len(result["tokens_per_round_by_row"]) == 2
        assert min(result["tokens_per_round_by_row"]) <= result["tokens_per_round"]
        assert result["program_bytes"] > 0
    # the selection comes on top
    assert vegas["program_bytes"] > plain["program_bytes"]
    assert plot.stat().st_size > 5000


def test_the_plot_of_a_record(monkeypatch):
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(speed_plot, "save_figure", lambda figure, path: figures.append(figure))
    lossy = "dustin:sparse_drafts=last,refresh_every=8,budget=1024"

    def result(method, batch, speedup, running, lossless=True):
        speedups = {"speedup": speedup, "speedup_all_running": running}
        return {"method": method, "batch": batch, "context": 32000, "lossless": lossless, **speedups}

    results = [result("plain", 1, 1, 1), result("vegas", 1, 1.5, 1.5)]
    results += [result("plain", 16, 1, 1), result("vegas", 16, 1.75, 2.25), result("knapspec", 16, 1.25, None)]
    results += [result(lossy, 16, 0.125, 0.0625, lossless=False)]
    speed_plot.write_speed_plot(None, {"model": None, "shape": "tiny", "device": "NVIDIA H200", "results": results})
    (figure,) = figures
    first, second = figure.axes
    bars = [(bar.get_y(), bar.get_width(), bar.get_fill() and bar.get_facecolor()[3] == 1) for bar in second.patches]
    rows = [sorted((width, filled) for y, width, filled in bars if round(y + 0.33) == i) for i in range(4)]
    assert rows == [
        [(1, False), (1, True)],
        [(1.75, True), (2.25, False)],
        [(1.25, True)],
        [(0.0625, False), (0.125, True)],
    ]
    colors = [{bar.get_edgecolor() for bar in second.patches if round(bar.get_y() + 0.33) == i} for i in range(4)]
    assert [len(found) for found in colors] == [1] * 4
    assert len(set.union(*colors)) == 4
    assert [text.get_text() for text in first.texts] == ["1.00", "1.50"]
    assert [text.get_text() for text in second.texts] == ["1.00", "1.75", "2.25", "1.25", "0.12 / 0.06"]
    names = [label.get_text() for label in second.get_yticklabels()]
    assert names[3] == "dustin:sparse_drafts=last,\nrefresh_every=8,budget=1024 (lossy)"
    assert [text.get_text() for legend in figure.legends for text in legend.get_texts()] == [
        "until the last row has ended",
        "while all rows run",
    ]
    assert figure.get_suptitle() == "tiny (synthetic), NVIDIA H200"
    assert second.get_title(loc="left") == "batch 16, 32,000 tokens of context"

    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in (*axes.texts, *axes.get_yticklabels())]
        assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
        assert all(figure.bbox.contains(*corner) for box in boxes for corner in box.corners())


def test_bench_of_a_shape_says_that_it_is_synthetic(capsys, monkeypatch, tmp_path):
    def timed(loop, state, request):
        """A millisecond a layer: rounds this short are noise, from which nothing is extrapolated."""
        state, _, part = time_loop(loop, state, request)
        seconds = 1e-3 * len(state.cache) * part.rounds
        return state, seconds, part._replace(seconds=seconds)

    time_loop = benchmark_runs.time_loop
    monkeypatch.setattr(benchmark_runs, "time_loop", timed)
    out = tmp_path / "bench.json"
    shared = ["--context", 100, "--new-tokens", 8, "--repeats", 1, "--acceptance", 0.5, "--json", out]
    code, shown, _ = run(
        capsys, "bench", "--shape", "tiny", *shared, "--layers", 1, "--methods", "streaming:num_draft=2"
    )
    assert code == 0
    assert "SYNTHETIC" in shown
    assert "extrapolated from 1 and 2 layers" in shown
    plain, streaming = json.loads(out.read_text())["results"]
    measured = {"metrics", "tokens_per_round_by_row", "phases_milliseconds"}
    assert set(plain) == documented("bench", 1) - measured
    assert streaming["synthetic"]
    assert streaming["tokens_per_round"] == 1.75
    assert streaming["tokens_per_second"] == pytest.approx(1.75e3 / streaming["milliseconds_per_round"])
    assert streaming["tokens_per_second_all_running"] == streaming["tokens_per_second"]
    assert streaming["program_bytes"] > 0


def test_a_deeper_program_that_is_no_slower_is_not_extrapolated():
    from jaxspec.cli.bench import _extrapolated

    shared = {"method": "plain", "tokens_per_second": 1.0, "tokens_per_second_all_running": 1.0, "program_bytes": None}
    shallow, deep = ({**shared, "milliseconds_per_round": milliseconds} for milliseconds in (2.0, 3.0))
    assert _extrapolated(shallow, deep, 1, 4)["milliseconds_per_round"] == 5.0
    with pytest.raises(ValueError, match="2 layers of plain were no slower than 1"):
        _extrapolated(deep, shallow, 1, 4)


def test_bench_of_a_method_that_replans_has_no_rate_of_all_rows(capsys, tmp_path, checkpoint, text):
    out = tmp_path / "bench.json"
    shared = ["--context", 100, "--new-tokens", 6, "--repeats", 1, "--json", out]
    code, _, _ = run(
        capsys, "bench", "--model", checkpoint.converted, "--text", text, *shared, "--methods", "knapspec:max_draft=2"
    )
    assert code == 0
    knapspec = json.loads(out.read_text())["results"][1]
    assert knapspec["speedup_all_running"] is None
    assert knapspec["program_bytes"] is None
    assert knapspec["milliseconds_per_round"] > 0


def test_tune_and_generate(capsys, tmp_path, monkeypatch, checkpoint, text):
    monkeypatch.setattr(search, "RHOS", (0.3, 0.6))
    monkeypatch.setattr(search, "DRAFTS", (1, 2))
    out = tmp_path / "tuned.json"
    shared = ["--model", checkpoint.converted, "--text", text, "--context", 100, "--new-tokens", 10, "--repeats", 2]
    code, shown, _ = run(capsys, "tune", *shared, "--only", "vegas", "--out", out)
    assert code == 0
    record = json.loads(out.read_text())
    assert set(record) == documented("bench") | documented("tune")
    assert set(record["tried"][0]) == {"spec", "tokens_per_second", "tokens_per_round"}
    rates = {result["method"]: result["tokens_per_second"] for result in record["results"]}
    chosen = describe(record["chosen"])
    assert rates[chosen] >= rates["plain"]
    assert f"chosen: {chosen}" in shown
    assert len(record["tried"]) >= 4
    assert jaxspec.load_method(out) == build_method(record["chosen"])

    named = ["--methods", "plain", out, "--json", tmp_path / "bench.json"]
    assert run(capsys, "bench", *shared, *named)[0] == 0
    assert json.loads((tmp_path / "bench.json").read_text())["results"][-1]["spec"] == record["chosen"]

    # whatever was fastest here: a file that names another method is followed
    record["chosen"] = {"method": "vegas", "options": {"rho": 0.3, "min_keep": 4, "num_draft": 2}}
    out.write_text(json.dumps(record))
    prompt = ["--model", checkpoint.converted, "--prompt", "the quick brown fox", "--max-new-tokens", 6, "--json"]
    code, tuned, said = run(capsys, "generate", *prompt, "--tuned", out)
    assert code == 0
    assert f"jaxspec: {out} chose vegas:rho=0.3,min_keep=4,num_draft=2, at batch 1 and 100 tokens of context\n" in said
    assert json.loads(tuned)["method"] == "vegas"
    assert json.loads(tuned)["options"]["rho"] == 0.3
    for more in (["--rho", 0.5], ["--refresh-every", 0]):
        code, _, error = run(capsys, "generate", *prompt, "--tuned", out, *more)
        assert code == 2
        assert "--tuned brings a method with all its options" in error
    record["config"] = str(out.with_name("dustin.json"))
    out.write_text(json.dumps(record))
    code, _, error = run(capsys, "generate", *prompt, "--tuned", out, "--trace", record["config"])
    assert code == 2
    assert f"--trace {record['config']} would replace a file that this command reads" in error
    out.write_text(json.dumps({**record, "config": 3}))
    code, _, error = run(capsys, "generate", *prompt, "--tuned", out)
    assert (code, error) == (2, f"jaxspec: {out}: config must be a path or null, got 3\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["bench", "--shape", "tiny"], "give --acceptance"),
        (["bench", "--shape", "gpt-5", "--methods", "plain"], "qwen3-32b, got 'gpt-5'"),
        (["bench", "--shape", "tiny", "--methods", "vega"], "no method 'vega'; there are"),
        (["bench", "--shape", "tiny", "--methods", "vegas:depth=3"], "'depth=3' is no option=value of vegas"),
        (["bench", "--shape", "tiny", "--methods", "vegas:rho=x"], "rho must be a value of type float"),
        (
            ["bench", "--shape", "tiny", "--methods", "self-dustin:skipped_layers=1+x"],
            "skipped_layers must be integers joined by +, got '1+x'",
        ),
        (
            [
                "bench",
                "--shape",
                "tiny",
                "--acceptance",
                "0.5",
                "--methods",
                "self-dustin:signal=recency,skipped_layers=9",
            ],
            "skipped_layers must be some, not all, of the model's layers 0..3, got (9,)",
        ),
        (["bench", "--shape", "tiny", "--methods", "plain", "--layers", "3"], "--layers must lie in 1..2"),
        (["bench", "--shape", "tiny", "--methods", "plain", "--repeats", "0"], "--repeats must be at least 1"),
        (["bench", "--shape", "tiny", "--methods", "draft-model", "--acceptance", "0.5"], "draft-model needs --draft"),
        (["bench", "--shape", "qwen2.5-72b", "--methods", "plain", "--batch", "99999"], "GiB of cache"),
        (["bench", "--model", "x", "--acceptance", "0.5"], "belong to --shape"),
        (
            ["bench", "--model", "pyproject.toml", "--json", "pyproject.toml"],
            "would replace a file that this command reads",
        ),
        (
            ["bench", "--model", "tests", "--json", "tests/conftest.py"],
            "--json tests/conftest.py would replace a file in ",
        ),
        (
            ["bench", "--model", "x", "--json", "a.json", "--methods", "knapspec:profile=a.json"],
            "--json a.json would replace a file that this command reads",
        ),
        (
            ["bench", "--shape", "tiny", "--methods", "plain", "--context", "1048576"],
            "jaxspec: --context + --new-tokens must fit the model's 1048576 positions",
        ),
        (["bench", "--model", "x", "--plot", "x.xyz"], "--plot x.xyz: the suffix must be one of "),
        (["tune", "--model", "x", "--only", "dustin", "--out", "tuned.json"], "needs --allow-lossy"),
        (["tune", "--model", "x", "--only", "draft-model", "--out", "tuned.json"], "needs --draft MODEL"),
        (["tune", "--model", "x", "--out", "tuned.json", "--repeats", "1"], "--repeats must be at least 2, got 1"),
        (["tune", "--model", "x", "--out", "no/such/folder/tuned.json"], "not a file in an existing directory"),
        (["generate", "--model", "x", "--prompt", "x", "--tuned", "pyproject.toml"], "pyproject.toml"),
    ],
    ids=lambda value: None if isinstance(value, list) else value,
)
def test_wrong_input_is_refused_before_any_work(capsys, args, message):
    code, _, error = run(capsys, *args)
    assert code == 2
    assert message in error


def test_specs_round_trip():
    spec = parse_spec("vegas:rho=0.05,num-draft=4,score_mode=logit")
    assert spec == {"method": "vegas", "options": {"rho": 0.05, "num_draft": 4, "score_mode": "logit"}}
    assert parse_spec(describe(spec)) == spec
    several = parse_spec("self-dustin:signal=recency,skipped_layers=3+7+12")
    assert describe(several) == "self-dustin:signal=recency,skipped_layers=3+7+12"
    assert build_method(json.loads(json.dumps(several))) == jaxspec.SelfDustin(
        signal="recency", skipped_layers=(3, 7, 12)
    )
    none = parse_spec("self-dustin:signal=recency,skipped_layers=")
    assert build_method(none) == jaxspec.SelfDustin(signal="recency")
    assert parse_spec(describe(none)) == none
    nested = {"method": "knapspec", "options": {"selection": spec, "max_draft": 4}}
    assert build_method(nested).selection == jaxspec.Vegas(rho=0.05, num_draft=4, score_mode="logit")
    plan = {"attn": [True, False], "mlp": [True, True], "num_draft": 3}
    planned = {"method": "knapspec", "options": {"plan": plan}}
    assert build_method(planned).plan == jaxspec.Plan((True, False), (True, True), 3)
    assert describe(planned) == "knapspec:plan=[3 drafts, attention 1/2, MLP 2/2, 0334]"
    assert parse_spec(describe(nested))["options"]["selection"] == describe(spec)
    assert build_method(parse_spec(describe(nested))) == build_method(nested)
    for last, digest in ((0.5, "9c86"), (0.6, "cf45")):
        shares = {"method": "vegas", "options": {"layer_shares": [1.0] * 8 + [last]}}
        assert describe(shares) == f"vegas:layer_shares=[9 numbers, {digest}]"
    with pytest.raises(ValueError, match="plan must have attn, mlp and num_draft"):
        build_method({"method": "knapspec", "options": {"plan": {"attn": [True]}}})
    assert describe(nested) == "knapspec:selection=[vegas:rho=0.05,num_draft=4,score_mode=logit],max_draft=4"
