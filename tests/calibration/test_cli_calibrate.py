"""`jaxspec calibrate`, and `jaxspec generate` with what it wrote; a tiny pair in place of checkpoints."""

import json
from pathlib import Path

import numpy as np
import pytest
from calibration_cases import random_pair
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import jaxspec
from jaxspec.calibration import scan
from jaxspec.calibration.heads import Answers
from jaxspec.calibration.records import ROWS, model_hash, write_record
from jaxspec.checkpoint import Loaded
from jaxspec.cli import main
from jaxspec.cli import methods as cli_methods
from tests.documented import documented

WORDS = {f"w{i}": i for i in range(19)}


def tokenizer(words):
    made = Tokenizer(WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.fixture(autouse=True)
def checkpoints(monkeypatch):
    models, draft = random_pair()
    other = {f"w{18 - i}": i for i in range(19)}
    loaded = {
        "target": Loaded(models.target, models.params, tokenizer(WORDS), models.target.config, {}, (), {}),
        "draft": Loaded(draft, models.draft_params, tokenizer(WORDS), draft.config, {}, (), {}),
        "stranger": Loaded(draft, models.draft_params, tokenizer(other), draft.config, {}, (), {}),
    }
    for module in (jaxspec, cli_methods):
        monkeypatch.setattr(module, "load", lambda path, **_: loaded[path])

    def answered(models, needles, width, eos_ids=()):
        config = models.target.config
        mass = np.random.default_rng(config.num_layers).random((len(needles), config.num_layers, config.num_heads))
        return Answers(np.zeros((len(needles), 4), np.int32), np.ones(len(needles)), mass)

    monkeypatch.setattr(scan, "answer", answered)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{i}" for i in np.random.default_rng(0).integers(0, 19, 90)))
    return str(path)


def run(capsys, *args):
    code = main([str(arg) for arg in args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


SCAN = ("--lengths", "80", "--depths", "2")


def test_heads(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "heads.json", tmp_path / "heads.png"
    code, said, progress = run(capsys, "calibrate", "heads", "--model", "draft", "--out", out, "--plot", plot, *SCAN)
    assert code == 0
    assert "2 of 2 needles answered" in said
    assert "2/2" in progress
    record = json.loads(out.read_text())
    assert set(record) == documented("calibrate heads")
    assert (record["schema_version"], record["kind"], record["model"]["name"]) == (1, "retrieval-heads", "draft")
    assert np.shape(record["scores"]) == (1, 4)
    assert plot.stat().st_size > 5000


def test_a_pair_and_generating_with_it(capsys, tmp_path, text):
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "dustin.json", tmp_path / "arr.png"
    code, said, _ = run(
        capsys, "calibrate", "dustin", "--target", "target", "--draft", "draft", "--text", text, "--out", out,
        "--budget", 32, "--contexts", 60, "--rounds", 2, "--num-draft", 2, "--plot", plot, *SCAN,
    )  # fmt: skip
    assert code == 0
    assert "verification with them is lossy" in said
    record = json.loads(out.read_text())
    assert set(record) == documented("calibrate dustin")
    assert record["settings"]["num_draft"] == 2
    assert plot.stat().st_size > 5000
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["arr.png", "dustin.draft-heads.json", "dustin.json", "dustin.target-heads.json", "text.txt"]

    flags = ["generate", "--model", "target", "--prompt-file", text, "--max-new-tokens", 8, "--method", "dustin"]
    flags += ["--draft", "draft", "--config", out, "--sparse-drafts", "last", "--budget", 40, "--refresh-every", 1]
    code, _, line = run(capsys, *flags)
    assert code == 0
    assert "| lossy |" in line
    assert "tokens per round" in line
    assert "agreed" in line
    result = json.loads(run(capsys, *flags, "--json")[1])
    assert set(result) == documented("generate") - {"plans", "rows"}
    assert result["lossless"] is False
    assert 0 < result["report"]["agreed"] <= result["report"]["checked"] < 8
    assert result["report"]["drift"] >= 0
    options = {"budget": 40, "sparse_drafts": "last", "num_draft": 2, "sinks": 4, "window": 16}
    assert options.items() <= result["options"].items()


def test_rows_and_generating_with_them(capsys, tmp_path, text):
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "rows.json", tmp_path / "rows.png"
    method = "vegas:min_keep=8,num_draft=2,score_mode=logit"
    flags = ["--context", 60, "--rounds", 3, "--method", method, "--plot", plot]
    code, said, progress = run(capsys, "calibrate", "rows", "--model", "target", "--text", text, "--out", out, *flags)
    assert code == 0
    assert "times the budget; overlap" in said
    assert "3/3" in progress
    record = json.loads(out.read_text())
    assert set(record) == documented("calibrate rows")
    assert (record["kind"], record["model"]["name"], record["settings"]["context"]) == ("layer-rows", "target", 60)
    assert np.mean(record["shares"]) == pytest.approx(1, abs=1e-3)
    assert plot.stat().st_size > 5000

    flags = ["generate", "--model", "target", "--prompt-file", text, "--max-new-tokens", 8, "--json"]
    plain = json.loads(run(capsys, *flags)[1])
    drafted = json.loads(run(capsys, *flags, "--method", "vegas", "--min-keep", 4, "--layer-shares", out)[1])
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["options"]["layer_shares"] == record["shares"]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("streaming", "--method must be vegas without layer_shares, got 'streaming'"),
        ("vegas:layer_shares=before.json", "--method must be vegas without layer_shares"),
        ("vegas:rho=2", "Vegas rho must lie above 0 and be at most 1, got 2.0"),
        ("vega", "no method 'vega'"),
        ("vegas --rounds 0", "--rounds must be at least 1, got 0"),
        ("vegas --context 100000", "--context must lie in"),
    ],
)
def test_rows_that_cannot_be_measured(capsys, tmp_path, text, method, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_record(Path("before.json"), ROWS, {"shares": [1.0, 1.0]})
    flags = ["--text", text, "--out", "rows.json", "--method", *method.split()]
    code, _, said = run(capsys, "calibrate", "rows", "--model", "target", *flags)
    assert code == 2
    assert message in said
    assert not Path("rows.json").exists()


def test_outputs_replace_no_rows(capsys, tmp_path, text):
    rows = tmp_path / "before.json"
    write_record(rows, ROWS, {"shares": [1.0, 1.0]})
    flags = ["generate", "--model", "target", "--prompt-file", text, "--trace", rows, "--method"]
    for method in (["vegas", "--layer-shares", rows], ["knapspec", "--selection", f"vegas:layer_shares={rows}"]):
        code, _, said = run(capsys, *flags, *method)
        assert code == 2
        assert f"--trace {rows} would replace a file that this command reads" in said


def test_a_model_that_drafts_for_itself(capsys, tmp_path, text):
    out = tmp_path / "dustin.json"
    code, *_ = run(
        capsys, "calibrate", "dustin", "--target", "target", "--draft", "target", "--text", text, "--out", out,
        "--budget", 32, "--contexts", 60, "--rounds", 2, "--num-draft", 2, *SCAN,
    )  # fmt: skip
    assert code == 0
    record = json.loads(out.read_text())
    assert record["draft"]["hash"] == record["target"]["hash"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dustin.json", "dustin.target-heads.json", "text.txt"]

    # a layer without draft heads can be left out
    record["draft_heads"] = [[0, [1, 2]]]
    out.write_text(json.dumps(record))
    flags = ["generate", "--model", "target", "--prompt-file", text, "--max-new-tokens", 8, "--json", "--config", out]
    code, shown, _ = run(capsys, *flags, "--method", "self-dustin", "--skipped-layers", 1)
    assert code == 0
    assert json.loads(shown)["options"]["skipped_layers"] == [1]
    assert json.loads(shown)["metrics"]["rounds"] > 0
    code, _, err = run(capsys, *flags, "--method", "self-dustin", "--skipped-layers", 0)
    assert code == 2
    assert "draft_heads must lie in layers that run; skipped_layers holds [0]" in err


def test_known_heads_are_not_scanned_again(capsys, tmp_path, text, monkeypatch):
    heads = tmp_path / "heads.json"
    assert run(capsys, "calibrate", "heads", "--model", "draft", "--out", heads, *SCAN)[0] == 0
    shared = ("--target", "target", "--draft", "draft", "--text", text, "--out", tmp_path / "d.json")
    code, _, err = run(capsys, "calibrate", "dustin", *shared, "--target-heads", heads, "--contexts", 60)
    assert code == 2
    assert "holds the heads of another model than target" in err
    out = tmp_path / "d.json"
    monkeypatch.setattr(scan, "answer", None)  # no scan may run
    files = ("--target-heads", tmp_path / "big.json", "--draft-heads", heads)
    record = json.loads(heads.read_text())
    models, _ = random_pair()
    record["model"]["hash"] = model_hash(models.target, models.params)
    record["scores"] = [[0.1, 0.2, 0.3, 0.4]] * 2
    files[1].write_text(json.dumps(record))
    flags = ("--contexts", 60, "--budget", 32, "--rounds", 2, "--num-draft", 2)
    code, *_ = run(capsys, "calibrate", "dustin", *shared, *files, *flags)
    assert code == 0
    # the best four, or those of them that share a kv head
    assert json.loads(out.read_text())["target_heads"][0][1] in ([0, 1, 2, 3], [2, 3])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["heads", "--model", "draft", "--out", "/no/such/place/x.json"], "not a file in an existing directory"),
        (["heads", "--model", "draft", "--out", "x.json", "--lengths", "600"], "lengths must lie in 1..496"),
        (["heads", "--model", "draft", "--out", "x.json", "--lengths", "20"], "needle prompts need at least"),
        (["heads", "--model", "draft", "--out", "x.json", "--plot", "x.xyz"], "the suffix must be one of "),
        (["dustin", "--target", "target", "--draft", "draft", "--plot", "x.xyz"], "the suffix must be one of "),
        (
            ["dustin", "--target", "target", "--draft", "draft", "--contexts", "60", "--lengths", "600"],
            "lengths must lie in 1..496",
        ),
        (["heads", "--model", "draft", "--out", "x.json", "--chat", *SCAN], "--chat needs a model whose tokenizer"),
        (["dustin", "--target", "target", "--draft", "stranger"], "the vocabularies differ in 18 tokens"),
        (["dustin", "--target", "target", "--draft", "draft", "--contexts", "500"], "--contexts must be at most 465"),
        (["dustin", "--target", "target", "--draft", "draft", "--contexts", "95"], "the longest text has 90 tokens"),
    ],
)
def test_wrong_input(capsys, tmp_path, monkeypatch, text, args, message):
    monkeypatch.chdir(tmp_path)
    more = ["--text", text, "--out", "x.json"] if args[0] == "dustin" else []
    code, out, err = run(capsys, "calibrate", *args, *more)
    assert code == 2
    assert out == ""
    # no progress bar either
    assert err == f"jaxspec: {err[len('jaxspec: ') :].strip()}\n"
    assert message in err
    assert not list(tmp_path.glob("x.*"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--method", "dustin", "--draft", "draft"], "needs target_heads: jaxspec calibrate dustin finds them"),
        (["--method", "vegas", "--config", "x.json"], "--config does not apply to --method vegas"),
        (["--method", "dustin", "--draft", "draft", "--config", "x.json"], "cannot read x.json: No such file"),
        (["--method", "dustin"], "--method dustin needs --draft MODEL"),
    ],
)
def test_wrong_flags_of_generate(capsys, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "generate", "--model", "target", "--prompt", "w1", *args)
    assert code == 2
    assert message in err


def test_what_is_lossy_is_not_verified(capsys):
    code, _, err = run(capsys, "verify", "--model", "target", "--method", "dustin")
    assert code == 2
    assert "--method dustin is lossy by design" in err


def test_nor_is_what_tune_chose(capsys, tmp_path):
    tuned = tmp_path / "tuned.json"
    record = {"schema_version": 1, "kind": "tuned", "chosen": {"method": "dustin", "options": {}}, "draft": "draft"}
    tuned.write_text(json.dumps(record))
    code, _, err = run(capsys, "verify", "--model", "target", "--tuned", tuned)
    assert code == 2
    assert "--method dustin is lossy by design" in err
