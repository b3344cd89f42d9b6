"""The examples run, with the model that they make and with a checkpoint."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name", ["generate_in_jit", "convert_and_generate", "add_a_method", "add_a_family", "long_document", "many_prompts"]
)
def test_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60


def test_generate_in_jit(capsys):
    example("generate_in_jit").main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("temperature 0.5: scores [")
    assert lines[2].startswith("temperature 1.0: scores [")
    for ids in (lines[1], lines[3]):
        assert len(ids.strip("[]").split(",")) == 32


def test_convert_and_generate(capsys):
    pytest.importorskip("safetensors")
    example("convert_and_generate").main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "24,736 parameters of a llama in float32"
    assert all(len(ids.strip("[]").split(",")) == 24 for ids in lines[1:])
    assert len(lines) == 3


def test_add_a_method(capsys, checkpoint):
    for arguments in ((), (checkpoint.converted,)):
        example("add_a_method").main(*arguments)
        printed = r"Plain, 63 rounds:\n(.*)\nPromptLookup, (\d+) rounds:\n(.*)\n"
        plain, rounds, lookup = re.fullmatch(printed, capsys.readouterr().out, re.DOTALL).groups()
        assert plain == lookup
        assert int(rounds) < 63


def test_add_a_family(capsys):
    example("add_a_family").main()
    assert len(capsys.readouterr().out.strip("[]\n").split(",")) == 16


def test_long_document(capsys, checkpoint, tmp_path):
    document = tmp_path / "document.txt"
    document.write_text("the quick brown fox jumps over the lazy dog, and the dog sleeps. " * 3)
    module = example("long_document")
    module.METHODS = {name: module.METHODS[name] for name in ("plain", "vegas")}
    module.main(checkpoint.converted, str(document), "who sleeps?", 12)
    out = capsys.readouterr().out
    assert "tokens of prompt" in out
    assert re.search(r"plain +[\d.]+ tokens/s +1\.00 tokens per round", out)
    assert re.search(r"vegas +[\d.]+ tokens/s +[\d.]+ tokens per round", out)


def test_many_prompts(capsys, checkpoint, tmp_path):
    for name in ("first", "second", "third"):
        (tmp_path / f"{name}.txt").write_text(f"the quick brown fox jumps over the {name} dog. ")
    example("many_prompts").main(checkpoint.converted, str(tmp_path), 2, 100, 8)
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.partition(":")[0] for line in lines) == ["first.txt", "second.txt", "third.txt"]


@pytest.mark.parametrize("name", ["long_document", "many_prompts"])
def test_usage(name):
    done = subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"\npython examples/{name}.py checkpoints/smollm2 docs" in done.stderr
    assert "Traceback" not in done.stderr


def test_with_a_checkpoint(capsys, checkpoint):
    example("generate_in_jit").main(checkpoint.converted)
    example("convert_and_generate").main(checkpoint.source)
    out = capsys.readouterr().out
    assert "parameters of a llama" in out
    assert out.count("temperature") == 2
