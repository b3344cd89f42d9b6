"""`jaxspec generate`: text, JSON, prompts from everywhere, and one line for every error."""

import dataclasses
import io
import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxspec
from jaxspec.cli import main

PROMPT = "the lazy dog"
NEW = 12


@pytest.fixture
def command(checkpoint, capsys):
    """`command(*flags) -> (exit code, standard output, standard error)`."""

    def run(*flags, model=checkpoint.converted, new_tokens=NEW):
        flags = ["generate", "--model", model, "--max-new-tokens", str(new_tokens), *flags]
        try:
            code = main(flags)
        except SystemExit as exit_:
            code = exit_.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def greedy(checkpoint, expected):
    ids = checkpoint.tokenizer(PROMPT)["input_ids"]
    return ids, *expected(ids, NEW)


def test_text_and_figures(command, greedy):
    code, out, err = command("--prompt", PROMPT)
    ids, tokens, text = greedy
    assert (code, out) == (0, text + "\n")
    lines = [line for line in err.splitlines() if line.startswith("[prompt")]
    assert len(lines) == 1
    assert lines[0].startswith(f"[prompt {len(ids)} tokens at ")
    assert f"{len(tokens)} new tokens at " in lines[0]
    assert "(ended by length)" in lines[0]


def test_json(command, greedy):
    code, out, _ = command("--prompt", PROMPT, "--json")
    ids, tokens, text = greedy
    record = json.loads(out)
    assert code == 0
    assert out.count("\n") == 1
    assert record["schema_version"] == 1
    assert (record["text"], record["tokens"], record["finish"]) == (text, tokens, "length")
    assert (record["prompt_tokens"], record["new_tokens"]) == (len(ids), NEW)
    assert (record["method"], record["options"]) == ("plain", {})
    for name in ("prompt_tokens_per_second", "decode_tokens_per_second", "peak_memory_bytes"):
        assert record[name] > 0, name
    assert record["compile_seconds"] >= 0


def test_one_token_has_no_decode_rate(command, greedy):
    _, out, _ = command("--prompt", PROMPT, "--json", new_tokens=1)
    record = json.loads(out)
    assert record["decode_tokens_per_second"] is None
    assert record["tokens"] == greedy[1][:1]
    code, out, err = command("--prompt", PROMPT, new_tokens=1)
    assert code == 0
    assert "1 new tokens (ended by length)" in err


def test_prompt_from_a_file_and_from_standard_input(command, greedy, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    assert command("--prompt-file", str(file))[:2] == (0, greedy[2] + "\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert command()[:2] == (0, greedy[2] + "\n")


def test_chat(command, checkpoint, expected):
    ids = checkpoint.tokenizer("[user] " + PROMPT + "\n[a] ", add_special_tokens=False)["input_ids"]
    tokens, text = expected(ids, NEW)
    _, out, _ = command("--prompt", PROMPT, "--chat", "--json")
    record = json.loads(out)
    assert (record["prompt_tokens"], record["tokens"], record["text"]) == (len(ids), tokens, text)


def test_model_is_a_hugging_face_directory(command, checkpoint, greedy, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    assert command("--prompt", PROMPT, model=checkpoint.source)[:2] == (0, greedy[2] + "\n")


def tokens_of(result):
    assert result[0] == 0, result[2]
    return json.loads(result[1])["tokens"]


def test_sampling_flags(command, greedy):
    hot = ("--prompt", PROMPT, "--json", "--temperature", "3")
    first = tokens_of(command(*hot, "--seed", "1"))
    assert first == tokens_of(command(*hot, "--seed", "1"))
    assert first != tokens_of(command(*hot, "--seed", "2"))
    assert first != greedy[1]
    for top_k, top_p, min_p in (("1", "1", "0"), ("300", "1e-6", "0"), ("300", "1", "1")):
        one_left = ("--top-k", top_k, "--top-p", top_p, "--min-p", min_p)
        assert tokens_of(command(*hot, *one_left)) == greedy[1], one_left
    assert tokens_of(command("--prompt", PROMPT, "--json", "--temperature", "1e-6", "--top-k", "5")) == greedy[1]


def test_seeds_of_any_size(command):
    hot = ("--prompt", PROMPT, "--json", "--temperature", "3", "--seed")
    assert tokens_of(command(*hot, str(2**32 - 1))) != tokens_of(command(*hot, "0"))


def test_stop(command, greedy):
    _, tokens, text = greedy
    stop = text[3:5]
    assert stop
    _, out, _ = command("--prompt", PROMPT, "--stop", "never in the text", "--stop", stop, "--json")
    record = json.loads(out)
    assert (record["text"], record["finish"]) == (text[: text.find(stop)], "stop")
    assert record["tokens"] == tokens[: len(record["tokens"])]
    assert command("--prompt", PROMPT, "--stop", stop)[1] == record["text"] + "\n"


WRONG = {
    "temperature negative": (["--temperature", "-1"], "jaxspec: --temperature must be a finite number >= 0"),
    "temperature nan": (["--temperature", "nan"], "jaxspec: --temperature must be a finite number >= 0"),
    "temperature infinite": (["--temperature", "inf"], "jaxspec: --temperature must be a finite number >= 0"),
    "temperature text": (["--temperature", "warm"], "--temperature: invalid float value: 'warm'"),
    "top_k 0": (["--temperature", "1", "--top-k", "0"], "jaxspec: --top-k must be an integer >= 1"),
    "top_k float": (["--temperature", "1", "--top-k", "1.5"], "--top-k: invalid int value"),
    "top_k huge": (["--temperature", "1", "--top-k", str(2**70)], "jaxspec: --top-k must be an integer >= 1"),
    "top_p 2": (["--temperature", "1", "--top-p", "2"], "jaxspec: --top-p must be a number in (0, 1]"),
    "min_p": (["--temperature", "1", "--min-p", "-1"], "jaxspec: --min-p must be a number in [0, 1]"),
    "filters at temperature 0": (["--top-p", "0.9"], "need --temperature above 0"),
    "seed too large": (["--seed", str(2**80)], "--seed must lie in 0..4294967295"),
    "seed negative": (["--seed", "-1"], "--seed must lie in 0..4294967295"),
    "no new tokens": (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
    "too many new tokens": (
        ["--max-new-tokens", "255"],
        "jaxspec: the prompt's tokens + --max-new-tokens must fit the model's 256 positions, 1 of them for the ",
    ),
    "empty stop": (["--stop", ""], "--stop must be text, got an empty string"),
    "unknown flag": (
        ["--repetition-penalty", "2"],
        "jaxspec generate: unrecognized arguments: --repetition-penalty 2; see jaxspec generate --help",
    ),
    "dtype": (["--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
    "two prompts": (["--prompt-file", "x"], "not allowed with argument --prompt"),
    "method": (["--method", "magic"], "--method: invalid choice: 'magic'"),
}


def assert_one_line(result, message):
    code, out, err = result
    lines = [line for line in err.splitlines() if line.strip()]
    assert (code, out) == (2, ""), result
    assert len(lines) == 1, err
    assert lines[0].startswith("jaxspec")
    assert message in lines[0]


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values(case, command):
    flags, message = WRONG[case]
    assert_one_line(command("--prompt", PROMPT, *flags), message)


def test_wrong_prompts(command, tmp_path, monkeypatch):
    assert_one_line(command("--prompt", ""), "the prompt is empty")
    none = tmp_path / "none.txt"
    assert_one_line(command("--prompt-file", str(none)), f"cannot read {none}: No such file or directory")
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    assert_one_line(command("--prompt-file", str(tmp_path / "latin1.txt")), "latin1.txt: not UTF-8 text")
    assert_one_line(command("--prompt-file", str(tmp_path)), f"cannot read {tmp_path}: Is a directory")
    # what the shell hands over of bytes that are no UTF-8
    assert_one_line(command("--prompt", "caf\udce9"), "UTF-8")
    monkeypatch.setattr("sys.stdin", io.StringIO("caf\udce9"))
    assert_one_line(command(), "UTF-8")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert_one_line(command(), "no prompt")


def test_wrong_models(command, checkpoint, tmp_path):
    assert_one_line(command("--prompt", PROMPT, model=str(tmp_path / "none")), "none")
    (tmp_path / "config.json").write_text("{}")
    assert_one_line(command("--prompt", PROMPT, model=str(tmp_path)), str(tmp_path))
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint.converted, damaged)
    shutil.rmtree(damaged / "params")
    missing = f"{damaged}: an unfinished or damaged conversion without params/_METADATA; convert it again"
    assert_one_line(command("--prompt", PROMPT, model=str(damaged)), missing)


def test_what_does_not_fit_in_memory(command, monkeypatch):
    monkeypatch.setattr("os.sysconf", lambda name: 1)
    code, out, err = command("--prompt", PROMPT)
    assert (code, out) == (2, "")
    assert "GiB of weights + " in err
    assert "Lower the batch, the context or the number of new tokens" in err


@pytest.mark.parametrize(("command", "shown"), [([], "generate text from a prompt"), (["calibrate"], "for retrieval")])
def test_no_command_shows_the_help(capsys, command, shown):
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(" ".join(["usage: jaxspec", *command]))
    assert shown in err


def test_a_file_that_cannot_be_written(command, monkeypatch, tmp_path):
    trace = tmp_path / "trace.json"

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    code, _, err = command("--prompt", PROMPT, "--trace", str(trace))
    assert code == 2
    assert err.splitlines()[-1] == f"jaxspec: cannot write {trace}: No space left on device"
    assert not list(tmp_path.iterdir())


def test_files_that_would_replace_others(command, tmp_path):
    prompt, link = tmp_path / "prompt.txt", tmp_path / "link.txt"
    prompt.write_text(PROMPT)
    link.symlink_to(prompt)
    for trace in (prompt, link):
        result = command("--prompt-file", str(prompt), "--trace", str(trace))
        assert_one_line(result, f"--trace {trace} would replace a file that this command reads")
    assert prompt.read_text() == PROMPT
    pytest.importorskip("matplotlib")
    both = str(tmp_path / "both.png")
    result = command("--prompt", PROMPT, "--trace", both, "--plot", both)
    assert_one_line(result, f"--trace and --plot name the same file, {both}")


def test_logits_that_are_nan(command, monkeypatch):
    load = jaxspec.load

    def damaged(*args, **options):
        loaded = load(*args, **options)
        return dataclasses.replace(loaded, params=jax.tree.map(lambda x: x * jnp.nan, loaded.params))

    monkeypatch.setattr(jaxspec, "load", damaged)
    code, _, err = command("--prompt", PROMPT)
    assert code == 2
    assert "(ended by nan)" in err
    assert err.splitlines()[-1].startswith("jaxspec: the logits are NaN or infinite: the checkpoint is damaged")


@pytest.mark.parametrize("flags", [[], ["--method", "vegas", "--min-keep", "4", "--num-draft", "2"]])
def test_as_a_process(flags, checkpoint, greedy, default_environment):
    """The prompt through a pipe, nothing but the text on standard output, and the same text when XLA optimises."""
    command = [sys.executable, "-m", "jaxspec.cli", "generate", "--model", checkpoint.converted, *flags]
    result = subprocess.run(
        [*command, "--max-new-tokens", str(NEW)],
        input=PROMPT.encode(),
        capture_output=True,
        env={**default_environment, "JAX_PLATFORMS": "cpu"},
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stdout.decode()) == (0, greedy[2] + "\n"), result.stderr.decode()


def test_a_reader_that_leaves_is_no_error(checkpoint):
    """`jaxspec generate ... | head -c1`."""
    command = f"{sys.executable} -m jaxspec.cli generate --model {checkpoint.converted} --prompt x --max-new-tokens 200"
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; JAX_PLATFORMS=cpu {command} | head -c1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stderr == ""
