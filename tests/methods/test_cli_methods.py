"""Methods on the command line, with a tiny model in place of a checkpoint."""

import json

import numpy as np
import pytest
from method_cases import VOCAB, similar_model, tiny_model
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import jaxspec
from jaxspec.checkpoint import Loaded
from jaxspec.cli import main, report
from jaxspec.cli import methods as cli_methods
from jaxspec.cli import verify as cli_verify
from jaxspec.cli.plans import draw_plans
from jaxspec.metrics import measure
from jaxspec.types import Stats
from tests.documented import documented


def loaded(model, params, size):
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Loaded(model, params, PreTrainedTokenizerFast(tokenizer_object=words), model.config, {}, (), {})


@pytest.fixture(autouse=True)
def tiny_checkpoints(monkeypatch):
    checkpoints = {
        "target": loaded(*tiny_model(1), VOCAB),
        "draft": loaded(*similar_model(1), VOCAB),
        "stranger": loaded(*similar_model(1), VOCAB - 5),
    }
    shuffled = Tokenizer(WordLevel({f"w{VOCAB - 1 - i}": i for i in range(VOCAB)}, unk_token="w0"))
    checkpoints["stranger"] = Loaded(
        *similar_model(1), PreTrainedTokenizerFast(tokenizer_object=shuffled), None, {}, (), {}
    )

    def load(path, **_):
        return checkpoints[path]

    monkeypatch.setattr(jaxspec, "load", load)
    monkeypatch.setattr(cli_methods, "load", load)


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(" ".join(f"w{i}" for i in np.random.default_rng(0).integers(0, 18, 700)))
    return path


RECENT = ("--method", "self-dustin", "--signal", "recency")


def run(capsys, *args):
    code = main(list(args))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_run_with_its_trace_and_plot(capsys, tmp_path, prompt_file):
    pytest.importorskip("matplotlib")
    trace, plot = tmp_path / "trace.json", tmp_path / "plot.png"
    shared = ["generate", "--model", "target", "--prompt-file", str(prompt_file), "--max-new-tokens", "30"]
    vegas = ["--method", "vegas", "--min-keep", "8", "--rho", "0.02", "--num-draft", "3"]
    code, text, line = run(capsys, *shared, *vegas, "--trace", str(trace), "--plot", str(plot))
    assert code == 0
    assert text.split() == run(capsys, *shared)[1].split()
    record = json.loads(trace.read_text())
    assert record["schema_version"] == 1
    assert record["method"] == "vegas"
    assert record["options"] == {
        "rho": 0.02,
        "min_keep": 8,
        "num_draft": 3,
        "score_mode": "weight",
        "collect": "two",
        "layer_shares": "",
    }
    (row,) = record["rows"]
    assert set(row) == {"rounds", "emitted", "drafted", "accepted"}
    assert len(row["drafted"]) == len(row["accepted"]) == row["rounds"]
    assert row["emitted"] == 29
    assert f"{29 / row['rounds']:.2f} tokens per round" in line
    first = record["metrics"]["acceptance_by_position"][0]
    assert first == pytest.approx(np.mean(np.array(row["accepted"][:-1]) > 0))
    assert f"by position {first:.2f}" in line
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size > 5000


def test_the_plot_of_plain_decoding_has_no_empty_half(monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(report, "save_figure", lambda figure, path: figures.append(figure))
    flags = ["generate", "--model", "target", "--prompt", "w3 w4 w5", "--max-new-tokens", "4"]
    assert run(capsys, *flags, "--plot", str(tmp_path / "x.png"))[0] == 0
    (figure,) = figures
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["tokens of a round", "running mean"]
    _, mean = axes.lines
    assert (len(mean.get_xdata()), mean.get_ydata()[-1]) == (3, 1.0)


def test_a_single_plan_is_drawn_whole():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    sublayers, rates = figure.subplots(1, 2)
    plan = {"length": 60, "num_draft": 3, "attn": (True, False), "mlp": (True, True), "taken": "first"}
    plan |= {"predicted_tokens_per_second": 10.0, "predicted_plain_tokens_per_second": 9.0}
    draw_plans(sublayers, rates, [plan])
    (low, high), (left, right) = rates.get_ylim(), rates.get_xlim()
    assert (low, high) == (0, pytest.approx(11))
    assert left < 60 < right


def test_a_plan_that_does_not_speculate_is_drawn(tmp_path, monkeypatch):
    """It says so instead of showing a mask, nothing hides the rate that it predicts, and no panel is empty."""
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(report, "save_figure", lambda figure, path: figures.append(figure))
    none, drafts = ({"length": n, "num_draft": n // 30, "attn": (True, False), "mlp": (True, True)} for n in (20, 60))
    for plan in (none, drafts):
        plan |= {"taken": "changed", "predicted_tokens_per_second": 9.0, "predicted_plain_tokens_per_second": 9.0}
    zeros = np.zeros((1, 4), np.int16)
    stats = Stats(np.array([4]), np.array([4]), zeros, zeros)
    report.write_plot(tmp_path / "x.png", "none", stats, measure(stats), [none, drafts])
    rounds, sublayers, rates = figures[0].axes
    assert rounds.get_subplotspec().colspan == range(2)
    assert [text.get_text() for text in sublayers.texts] == ["does not speculate"]
    (image,) = sublayers.images
    np.testing.assert_array_equal(image.get_array().filled(-1), [[-1, -1, -1, 1, 1], [-1, -1, -1, 0, 1]])
    layers = [tick for tick in sublayers.get_yticks() if -0.5 <= tick <= 1.5]
    assert layers == [0, 1]
    plain = rates.lines[2]
    assert plain.get_label() == "plain, predicted"
    assert plain.get_markerfacecolor() == "none"
    report.write_plot(tmp_path / "x.png", "none", stats, measure(stats), [none])
    said = "none\nThe planner chose not to speculate: plain decoding at 9.0 tokens/s, predicted"
    assert [figure.get_suptitle() for figure in figures] == ["none", said]


def test_a_draft_model_and_json(capsys):
    code, out, _ = run(
        capsys,
        *("generate", "--model", "target", "--prompt", "w3 w4 w5", "--max-new-tokens", "12", "--json"),
        *("--method", "draft-model", "--draft", "draft", "--num-draft", "2"),
    )
    record = json.loads(out)
    assert code == 0
    assert set(record) == documented("generate") - {"report", "plans", "rows"}
    assert set(record["metrics"]) == documented("generate", 1)
    assert record["method"] == "draft-model"
    assert record["metrics"]["emitted"] == 11
    assert len(record["metrics"]["acceptance_by_position"]) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rho", "0.1"], "--rho does not apply to --method plain; it belongs to quest, streaming, vegas"),
        (
            ["--method", "vegas", "--sinks", "4"],
            "--sinks does not apply to --method vegas; it belongs to dustin, self-dustin, streaming",
        ),
        (["--method", "vegas", "--rho", "2"], "jaxspec: --rho must lie above 0 and be at most 1, got 2.0"),
        (["--method", "quest", "--page-size", "12"], "power of two in 1..128, got 12"),
        (
            ["--method", "vegas", "--skipped-layers", "0"],
            "--skipped-layers does not apply to --method vegas; it belongs to self-dustin",
        ),
        (
            [*RECENT, "--skipped-layers", "0", "3"],
            "jaxspec: --skipped-layers must be some, not all, of the model's layers 0..0, got (0, 3)",
        ),
        (
            [*RECENT, "--skipped-layers", "-1"],
            "jaxspec: --skipped-layers must be a tuple of integers in 0..1048576, got (-1,)",
        ),
        (["--method", "draft-model"], "--method draft-model needs --draft MODEL"),
        (["--method", "vegas", "--draft", "draft"], "--method vegas takes no --draft MODEL"),
        (["--method", "draft-model", "--draft", "stranger"], "the vocabularies differ in 18 tokens"),
        (["--trace", "/"], "--trace /: not a file in an existing directory"),
        (["--plot", "/no/such/place/plot.png"], "--plot /no/such/place/plot.png: not a file in an existing directory"),
        (["--trace", "/proc/x.json"], "--trace /proc/x.json: its directory cannot be written to: "),
        (["--plot", "plot.xyz"], "--plot plot.xyz: the suffix must be one of "),
    ],
)
def test_wrong_flags(capsys, flags, message):
    code, out, err = run(capsys, "generate", "--model", "target", "--prompt", "w1", *flags)
    assert code == 2
    assert out == ""
    assert message in err


def test_a_plot_without_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run(capsys, "generate", "--model", "target", "--prompt", "w1", "--plot", str(tmp_path / "plot.png"))
    assert code == 2
    assert "pip install matplotlib" in err


def test_verify(capsys, monkeypatch, prompt_file):
    monkeypatch.setattr(cli_verify, "PROMPT_TOKENS", (60, 40, 30))
    flags = ["--prompt-file", str(prompt_file), "--draws", "100", "--max-new-tokens", "8"]
    vegas = ["--method", "vegas", "--num-draft", "1", "--min-keep", "8"]
    code, out, _ = run(capsys, "verify", "--model", "target", *flags, *vegas, "--json")
    record = json.loads(out)
    assert code == 0
    assert set(record) == documented("verify")
    assert record["passed"]
    assert [check["name"].split(",")[0] for check in record["checks"]] >= [
        "all paths of a tiny model",
        "all paths of a tiny model",
        "sampled tokens",
        "greedy output",
    ]
    assert all(check["passed"] for check in record["checks"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "choose a --method to verify"),
        (["--method", "vegas", "--prompt-file", "none.txt"], "cannot read none.txt: No such file or directory"),
        (["--method", "vegas", "--draws", "10"], "--draws must be at least 100"),
        (["--method", "vegas", "--temperature", "0"], "--temperature must be at least 0.1"),
    ],
)
def test_wrong_flags_of_verify(capsys, flags, message):
    code, _, err = run(capsys, "verify", "--model", "target", *flags)
    assert code == 2
    assert message in err


def test_verify_needs_a_text_longer_than_the_budget(capsys, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("w1 w2")
    code, _, err = run(capsys, "verify", "--model", "target", "--method", "vegas", "--prompt-file", str(short))
    assert code == 2
    assert "2 tokens, at least 700 are needed" in err


def test_a_failed_check_is_an_exit_code(capsys, monkeypatch, prompt_file):
    from jaxspec import lossless

    failed = lossless.Check("x", False, "why")
    monkeypatch.setattr(lossless, "check_enumeration", lambda *_: failed)
    monkeypatch.setattr(lossless, "check_sampling", lambda *_: [])
    monkeypatch.setattr(lossless, "check_greedy", lambda *_: lossless.Check("y", True, ""))
    flags = ["--method", "vegas", "--prompt-file", str(prompt_file)]
    code, out, err = run(capsys, "verify", "--model", "target", *flags)
    assert code == 1
    assert out.startswith("FAILED  x")
    assert [line.split(",")[0] for line in err.splitlines()[:4]] == [
        "  checking all paths of a tiny model",
        "  checking all paths of a tiny model",
        "  checking 500 sampled rounds",
        "  checking greedy output",
    ]
    assert "NOT lossless" in err
