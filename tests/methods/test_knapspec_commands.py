"""`jaxspec profile`, and `jaxspec generate` and `verify` with KnapSpec, on a tiny model in place of a checkpoint."""

import json
import time
from dataclasses import replace

import pytest
from method_cases import VOCAB, tiny_model
from test_cli_methods import loaded

import jaxspec
from jaxspec import KnapSpec
from jaxspec.cli import main
from jaxspec.cli import methods as cli_methods
from jaxspec.method_specs import build_method, parse_spec
from jaxspec.planning import LatencyProfile, Line, ProfileWarning, controller, load_profile, save_profile
from tests.documented import documented


@pytest.fixture(autouse=True)
def tiny_checkpoint(monkeypatch):
    monkeypatch.setattr(jaxspec, "load", lambda *_, **__: loaded(*tiny_model(2), VOCAB))
    monkeypatch.setattr(cli_methods, "load", jaxspec.load)


def run(capsys, *args):
    code = main(list(args))
    return code, *capsys.readouterr()


# how well times of microseconds are fitted is chance
@pytest.mark.filterwarnings("ignore::jaxspec.planning.ProfileWarning")
def test_profile_then_generate(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path, plot, trace = tmp_path / "profile.json", tmp_path / "profile.png", tmp_path / "trace.json"
    measured = ["profile", "--model", "m", "--contexts", "100", "30", "--max-draft", "3", "--repeats", "1"]
    code, out, err = run(capsys, *measured, "--selection", "vegas:min_keep=8", "--out", str(path), "--plot", str(plot))
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["30", "100"]
    for part in ("t_attention(n) = ", "t_mlp", "t_head", "over selected rows at 100", "largest error"):
        assert part in out
    assert "compiling" in err
    assert plot.read_bytes().startswith(b"\x89PNG")
    record = json.loads(path.read_text())
    assert set(record) == documented("profile")
    assert record["schema_version"] == 1
    assert record["selection"] == "vegas:min_keep=8"
    assert record["model"]["num_layers"] == 2
    assert [p.name for p in tmp_path.glob(".*")] == []
    profile = load_profile(path)
    assert (profile.num_layers, profile.batch, profile.rows) == (2, 1, 4)
    # a plain step of these dozens of microseconds is noise, so that drafting is made to pay
    record["profile"]["overhead"] = 1.0
    path.write_text(json.dumps(record))

    shared = ["generate", "--model", "m", "--prompt", " ".join(f"w{i % 18}" for i in range(60))]
    shared += ["--max-new-tokens", "24"]
    knapspec = ["--method", "knapspec", "--profile", str(path), "--max-draft", "3", "--selection", "vegas:min_keep=8"]
    knapspec += ["--max-cells", "8", "--replan-every", "2", "--planner-share", "1.0"]
    code, text, _ = run(capsys, *shared, *knapspec, "--trace", str(trace), "--plot", str(plot))
    assert code == 0
    assert text.split() == run(capsys, *shared)[1].split()
    written = json.loads(trace.read_text())
    assert set(written) == documented("generate") - {"text", "tokens", "report"}
    assert written["options"]["profile"] == load_profile(path).as_dict() | {
        name: list(value) for name, value in load_profile(path).as_dict().items() if isinstance(value, tuple)
    }
    first = written["plans"][0]
    assert (first["round"], first["length"], first["taken"]) == (0, 60, "first")
    assert first["num_draft"] == 3
    assert first["measured_tokens_per_second"] > 0
    assert plot.stat().st_size > 10_000


def test_planning_is_no_decoding(capsys, tmp_path, monkeypatch):
    """Tokens per second are those of the rounds; what planning took stands beside them."""
    path = tmp_path / "profile.json"
    assert (
        run(capsys, "profile", "--model", "m", "--contexts", "30", "90", "--repeats", "1", "--out", str(path))[0] == 0
    )
    planned = controller._search

    def slow(*args):
        time.sleep(3)
        return planned(*args)

    monkeypatch.setattr(controller, "_search", slow)
    flags = ["generate", "--model", "m", "--prompt", "w1 w2 w3", "--max-new-tokens", "16"]
    knapspec = [*flags, "--method", "knapspec", "--profile", str(path), "--max-cells", "8"]
    figures = json.loads(run(capsys, *knapspec, "--json")[1])
    assert 3 <= figures["planning_seconds"] < 20
    assert 15 / figures["decode_tokens_per_second"] < 3
    assert "| planning and measuring 3." in run(capsys, *knapspec)[2]
    assert json.loads(run(capsys, *flags, "--json")[1])["planning_seconds"] is None


def test_messages_stay_out_of_the_text(capsys, monkeypatch):
    """Both streams are one on a terminal: measuring is over before the first token is shown."""
    written = []

    def measured(*args):
        args[-1]("something")
        line, none = Line(0.0, 1e-3), Line(0.0, 0.0)
        # verification costs more than drafts could ever save
        return LatencyProfile(2, 1, 11, line, 1e-3, 1e-3, Line(0.0, 1.0), 1.0, 1.0, 0.0, line, none)

    monkeypatch.setattr("jaxspec.planning.measure.measured_profile", measured)
    monkeypatch.setattr("sys.stdout.write", lambda text: written.append(text))
    monkeypatch.setattr("sys.stderr.write", lambda text: written.append(text))
    flags = ["--max-new-tokens", "4", "--method", "knapspec", "--max-cells", "8"]
    assert main(["generate", "--model", "m", "--prompt", "w1 w2 w3", *flags]) == 0
    lines = "".join(written).splitlines()
    assert lines[0] == "jaxspec: measuring latencies for KnapSpec: something"
    assert lines[1].startswith("w")
    assert "| the plan: do not speculate |" in lines[2]


def test_a_profile_of_another_batch_is_refused_before_any_text(capsys, tmp_path):
    path = tmp_path / "profile.json"
    line = Line(0.0, 1e-3)
    save_profile(path, LatencyProfile(2, 16, 11, line, 1e-3, 1e-3, line, 1e-3, 1e-3, 0.0), {})
    flags = ["--method", "knapspec", "--profile", str(path)]
    code, out, err = run(capsys, "generate", "--model", "m", "--prompt", "w1", *flags)
    assert (code, out) == (2, "")
    assert err == "jaxspec: KnapSpec profile was measured at batch 16, this run has batch 1\n"


def tiny_profile(path, errors=(0.1, 0.1), rows=3):
    line, measured = Line(0.0, 1e-3), dict(zip(("fit_error", "plain_error"), errors, strict=True))
    profile = LatencyProfile(2, 1, rows, line, 1e-3, 1e-3, line, 1e-3, 1e-3, 0.0)
    save_profile(path, profile, {"measured": measured})
    return ["generate", "--model", "m", "--prompt", "w1", "--method", "knapspec", "--profile", str(path)]


def test_a_profile_that_fits_poorly_warns_wherever_it_is_used(capsys, tmp_path):
    path = tmp_path / "profile.json"
    poor = f"jaxspec: warning: {path}: the model misses what was measured by up to 10% (attention) and 30% (plain"
    for errors, warned in (((0.1, 0.25), False), ((0.1, 0.3), True)):
        flags = tiny_profile(path, errors)
        assert run(capsys, *flags, "--max-new-tokens", "1")[2].startswith(poor) is warned
    tiny_profile(path, ("0.3", None))
    assert load_profile(path).rows == 3
    tiny_profile(path, (0.3, 0.0))
    with pytest.warns(ProfileWarning, match="30% \\(attention\\) and 0%"):
        load_profile(path)


def test_more_drafts_than_were_timed_are_not_ignored_silently(capsys, tmp_path):
    flags = [*tiny_profile(tmp_path / "profile.json"), "--max-new-tokens", "1"]
    capped = "jaxspec: warning: --max-draft is 3, the latency profile was measured for at most 2 drafts: no more are "
    for more, warned in (([], False), (["--max-draft", "2"], False), (["--max-draft", "3"], True)):
        assert run(capsys, *flags, *more)[2].startswith(capped) is warned
    with pytest.warns(ProfileWarning, match="max_draft is 3"):
        build_method(parse_spec(f"knapspec:max_draft=3,profile={tmp_path / 'profile.json'}"))


def test_a_trace_does_not_replace_the_profile(capsys, tmp_path):
    path = tmp_path / "profile.json"
    flags = tiny_profile(path)
    before = path.read_text()
    code, out, err = run(capsys, *flags, "--trace", str(path))
    assert (code, out) == (2, "")
    assert err == f"jaxspec: --trace {path} would replace a file that this command reads\n"
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch", "0"], "--batch must lie in 1..1024, got 0"),
        (["--max-draft", "40"], "--max-draft must lie in 1..32, got 40"),
        (["--repeats", "0"], "--repeats must lie in 1..1000"),
        (["--contexts", "0", "9"], "jaxspec: --contexts must lie in 1..4085, got [0, 9]"),
        (["--contexts", "9", "5000"], "contexts must lie in 1..4085, got [9, 5000]"),
        (["--contexts", "64"], "--contexts must be at least two different lengths, for a slope, got 64"),
        (["--contexts", "64", "64"], "--contexts must be at least two different lengths, for a slope, got 64 64"),
        (["--plot", "x.xyz"], "--plot x.xyz: the suffix must be one of "),
        (["--selection", "best"], "jaxspec: --selection must be one of quest, streaming, vegas, got 'best'"),
        (
            ["--selection", "vegas:size=3"],
            "'size=3' is no option=value of vegas; options: collect, layer_shares",
        ),
        (["--selection", "vegas:rho=x"], "rho must be a value of type float, got 'x'"),
        (["--selection", "vegas:rho=2"], "jaxspec: Vegas rho must lie above 0 and be at most 1"),
        (["--out", "/"], "--out /: not a file in an existing directory"),
        (["--plot", "/no/such/place/x.png"], "not a file in an existing directory"),
    ],
)
def test_wrong_flags_of_profile(capsys, flags, message):
    code, out, err = run(capsys, "profile", "--model", "m", *flags)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tau", "2"], "jaxspec: --tau must lie above -1 and be at most 1, got 2.0"),
        (["--profile", "/no/such/file"], "cannot read /no/such/file: No such file"),
        (["--selection", "vegas:min_keep=0"], "jaxspec: Vegas min_keep must be an integer in 1..1048576, got 0"),
        (["--selection", "quest:page_size=12"], "power of two in 1..128, got 12"),
    ],
)
def test_wrong_flags_of_generate(capsys, flags, message):
    code, _, err = run(capsys, "generate", "--model", "m", "--prompt", "w1", "--method", "knapspec", *flags)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(("positions", "contexts"), [(3000, (1494, 2989)), (5000, (1024, 4096))])
def test_contexts_without_any_given_make_a_slope(monkeypatch, positions, contexts):
    class Measured(Exception):
        pass

    def measure(models, batch, contexts, **_):
        raise Measured(*contexts)

    model, params = tiny_model(2)
    model = model.clone(config=replace(model.config, max_positions=positions))
    monkeypatch.setattr(jaxspec, "load", lambda *_, **__: loaded(model, params, VOCAB))
    monkeypatch.setattr("jaxspec.planning.measure.measure", measure)
    with pytest.raises(Measured) as measured:
        main(["profile", "--model", "m"])
    assert measured.value.args == contexts


def test_verify_needs_no_measurement():
    """Checks that must repeat exactly take a fixed plan, a few sublayers short of the model."""
    fixed = KnapSpec(profile="", max_draft=2).fixed(8)
    assert (fixed.plan.num_attention, fixed.plan.num_mlp, fixed.plan.num_draft) == (6, 7, 2)
    assert fixed.segment_rounds == 0
    assert fixed.fixed(8) is fixed
