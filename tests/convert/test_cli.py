"""The command line: exit codes, one-line errors, and that nothing is left behind."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from convert.cli import main
from jaxspec.checkpoint import is_checkpoint

ROOT = Path(__file__).parents[2]


def test_conversion(tiny, tmp_path, capsys):
    directory, _ = tiny("llama")
    assert main([str(directory), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    assert "llama" in captured.out
    assert "bfloat16" in captured.out
    assert json.loads((tmp_path / "out" / "report.json").read_text())["dtype"] == "bfloat16"


def test_check_passes_and_prints_its_table(tiny, tmp_path, capsys):
    assert main([str(tiny("qwen3")[0]), str(tmp_path / "out"), "--check"]) == 0
    assert "cached decoding" in capsys.readouterr().out
    assert is_checkpoint(tmp_path / "out")


def test_failed_check(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("convert.check.LOGIT_TOLERANCE", 0.0)
    assert main([str(tiny("qwen3")[0]), str(tmp_path / "out"), "--check"]) == 1
    captured = capsys.readouterr()
    assert "FAILED" in captured.out
    assert one_line(captured.err).endswith("the converted model differs from transformers: " + failed_rows())
    assert not (tmp_path / "out").exists()


def failed_rows():
    return "full forward, 512 tokens, cached decoding, last 32 tokens"


def one_line(stderr):
    lines = [line for line in stderr.splitlines() if line.startswith("jaxspec-convert")]
    assert len(lines) == 1
    assert "Traceback" not in stderr
    return lines[0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./nothing/at/all", "cannot read ./nothing/at/all: No such file or directory"),
        ("damaged", "truncated"),
        ("pickle.bin", "safe_serialization=True"),
        ("text.gguf", "not a GGUF file"),
    ],
)
def test_errors_are_one_line(source, message, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny("llama")[0], tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"\0")
    (tmp_path / "pickle.bin").write_bytes(b"\x80\x04.")
    (tmp_path / "text.gguf").write_text("text")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main([source, "out"]) == 2
    line = one_line(capsys.readouterr().err)
    assert line.startswith("jaxspec-convert: error: ")
    assert message in line
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_existing_destination(tiny, tmp_path, capsys):
    directory, _ = tiny("llama")
    assert main([str(directory), str(tmp_path / "out")]) == 0
    assert main([str(directory), str(tmp_path / "out")]) == 2
    assert "--overwrite" in one_line(capsys.readouterr().err)
    assert main([str(directory), str(tmp_path / "out"), "--overwrite"]) == 0


def test_destination_and_source_apart(tmp_path, capsys):
    (tmp_path / "source").mkdir()
    assert main([str(tmp_path / "source"), str(tmp_path / "source" / "out")]) == 2
    assert "out lies inside its source directory, " in one_line(capsys.readouterr().err)
    assert main([str(tmp_path / "source"), str(tmp_path), "--overwrite"]) == 2
    assert "holds its source, " in one_line(capsys.readouterr().err)
    assert [path.name for path in tmp_path.rglob("*")] == ["source"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_destination_without_permission(tiny, tmp_path, capsys):
    (tmp_path / "locked").mkdir(mode=0o500)
    assert main([str(tiny("llama")[0]), str(tmp_path / "locked" / "out")]) == 2
    one_line(capsys.readouterr().err)


def test_destination_below_a_file(tiny, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main([str(tiny("llama")[0]), str(tmp_path / "file" / "out")]) == 2
    one_line(capsys.readouterr().err)


@pytest.mark.parametrize("arguments", [[], ["a"], ["a", "b", "--dtype", "int8"], ["a", "b", "--nothing"]])
def test_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: jaxspec-convert" in capsys.readouterr().err


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "example:\n  jaxspec-convert ./" in capsys.readouterr().out


def test_interrupt(tiny, tmp_path, capsys, monkeypatch):
    def interrupt(directory, *args):
        directory.mkdir()
        (directory / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("convert.writer._write_params", interrupt)
    assert main([str(tiny("llama")[0]), str(tmp_path / "out")]) == 130
    assert "interrupted; nothing was written" in one_line(capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_interrupt_from_the_terminal(tiny, tmp_path):
    """SIGINT while Orbax's threads write: a clean end and no traceback."""
    script = (
        "import os, signal, sys\n"
        # a shell that starts the tests in the background has it ignored
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from convert import cli, writer\n"
        "original, calls = writer._build, []\n"
        "def build(*args):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 5: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return original(*args)\n"
        "writer._build = build\n"
        "cli.entry()\n"
    )
    done = interrupted(script, tiny, tmp_path)
    assert done.returncode == 130
    assert one_line(done.stderr)
    assert not list(tmp_path.iterdir())


def test_interrupt_while_a_leaf_is_written(tiny, tmp_path):
    """What Orbax's threads had still to write does not come back after everything was removed."""
    script = (
        "import os, signal, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from pathlib import Path\n"
        "import orbax.checkpoint as ocp\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from convert import cli\n"
        "def late(folder):\n"
        "    time.sleep(0.2)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    end = time.monotonic() + 1\n"
        "    while time.monotonic() < end:\n"
        "        folder.mkdir(parents=True, exist_ok=True)\n"
        "async def serialize(self, values, infos, args=None):\n"
        "    return [ThreadPoolExecutor(1).submit(late, Path(infos[0].parent_dir))]\n"
        "ocp.type_handlers.NumpyHandler.serialize = serialize\n"
        "cli.entry()\n"
    )
    done = interrupted(script, tiny, tmp_path)
    assert done.returncode == 130
    assert one_line(done.stderr)
    assert not list(tmp_path.iterdir())


def interrupted(script, tiny, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", script, str(tiny("llama")[0]), str(tmp_path / "out")]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_module_entry_point(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "convert", "nobody/nothing", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "the hub cannot be reached; download the repository" in done.stderr


@pytest.mark.parametrize("left", [(), ("tokenizer_config.json",)])
def test_a_model_without_a_tokenizer_is_noted(left, tiny, tmp_path, capsys):
    directory = tmp_path / "model"
    shutil.copytree(tiny("llama")[0], directory)
    for path in directory.glob("tokenizer*"):
        if path.name not in left:
            path.unlink()
    assert main([str(directory), str(tmp_path / "out")]) == 0
    assert "has no tokenizer; the checkpoint takes token ids only" in capsys.readouterr().err
