"""Conversions that are killed: what was there stays, what is unfinished never loads, and the next one cleans up."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from convert import ConversionError, convert
from convert.atomic import is_staging, locked, replace_file, staged
from jaxspec.checkpoint import is_checkpoint, load

ROOT = Path(__file__).parents[2]

# kills its own process, with no chance to clean up, when `function` of `module` is called for the n-th time
KILL = """
import os, signal, sys
from convert import atomic, convert, writer

def kill_at(module, function, n, after=False):
    original, calls = getattr(module, function), []

    def wrapper(*args, **kwargs):
        calls.append(1)
        if len(calls) == n and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if len(calls) == n:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, function, wrapper)

{setup}
convert(sys.argv[1], sys.argv[2], overwrite=True, dtype=sys.argv[3], progress=False)
"""

MOMENTS = {
    "before the first leaf": "kill_at(writer, '_build', 1)",
    "between two leaves": "kill_at(writer, '_build', 9)",
    "all leaves built, the last one not written": "kill_at(writer, '_build', 15, after=True)",
    "before the report": "kill_at(writer, 'write_object', 3)",
    "report written, nothing flushed": "kill_at(atomic, '_flush', 1)",
    "before the rename": "kill_at(atomic, '_publish', 1)",
}


def run(code: str, *arguments: object) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def embedding(path: Path) -> np.ndarray:
    return np.asarray(load(path).params["embedding"])


@pytest.mark.parametrize(
    ("moment", "existing"),
    [*((moment, True) for moment in MOMENTS), ("between two leaves", False), ("before the rename", False)],
)
def test_killed_conversion(moment, existing, tiny, tmp_path):
    directory, _ = tiny("llama")
    dst = tmp_path / "out"
    before = None
    if existing:
        convert(directory, dst, dtype="bfloat16", progress=False)
        before = {p.relative_to(dst): p.read_bytes() for p in dst.rglob("*") if p.is_file()}
    killed = run(KILL.format(setup=MOMENTS[moment]), directory, dst, "float32")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    if existing:
        assert {p.relative_to(dst): p.read_bytes() for p in dst.rglob("*") if p.is_file()} == before
        assert embedding(dst).dtype == "bfloat16"
    else:
        assert not dst.exists()
    leftovers = [path for path in tmp_path.iterdir() if path != dst]
    assert any(is_staging(path) for path in leftovers)
    for path in (*leftovers, *(p / "params" for p in leftovers)):
        with pytest.raises(ConversionError):
            load(path)
    convert(directory, dst, overwrite=True, progress=False)
    assert embedding(dst).dtype == "float32"
    assert list(tmp_path.iterdir()) == [dst]


def test_killed_between_the_swap_and_the_removal_of_the_old_one(tiny, tmp_path):
    directory, _ = tiny("llama")
    dst = tmp_path / "out"
    convert(directory, dst, dtype="bfloat16", progress=False)
    killed = run(KILL.format(setup="kill_at(atomic, '_exchange', 1, after=True)"), directory, dst, "float32")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert embedding(dst).dtype == "float32"
    (old,) = (path for path in tmp_path.iterdir() if is_staging(path))
    with pytest.raises(ConversionError, match="unfinished"):
        load(old)
    convert(directory, dst, overwrite=True, progress=False)
    assert list(tmp_path.iterdir()) == [dst]


def test_without_an_atomic_swap_the_old_one_is_brought_back(tiny, tmp_path):
    directory, _ = tiny("llama")
    dst = tmp_path / "out"
    convert(directory, dst, dtype="bfloat16", progress=False)
    setup = "atomic._exchange = lambda *paths: False; kill_at(atomic.Path, 'rename', 2)"
    killed = run(KILL.format(setup=setup), directory, dst, "float32")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not dst.exists()
    with pytest.raises(ConversionError, match="exists; give --overwrite"):
        convert(directory, dst, progress=False)
    assert embedding(dst).dtype == "bfloat16"


def test_swap_without_system_support(tiny, tmp_path, monkeypatch):
    directory, _ = tiny("llama")
    convert(directory, tmp_path / "out", dtype="bfloat16", progress=False)
    monkeypatch.setattr("convert.atomic._exchange", lambda *paths: False)
    convert(directory, tmp_path / "out", overwrite=True, progress=False)
    assert embedding(tmp_path / "out").dtype == "float32"
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_exception_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), staged(tmp_path / "out", overwrite=False) as directory:  # noqa: PT012
        (directory / "file").write_text("half")
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_existing_destinations(tiny, tmp_path):
    directory, _ = tiny("llama")
    convert(directory, tmp_path / "out", progress=False)
    with pytest.raises(ConversionError, match="exists; give --overwrite"):
        convert(directory, tmp_path / "out", progress=False)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(ConversionError, match="is not a converted checkpoint; it will not be replaced"):
            convert(directory, tmp_path / "thesis", overwrite=overwrite, progress=False)
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    convert(directory, tmp_path / "empty", overwrite=True, progress=False)
    assert is_checkpoint(tmp_path / "empty")


def test_failed_conversion_keeps_the_old_one(tiny, tmp_path):
    directory, _ = tiny("llama")
    convert(directory, tmp_path / "out", progress=False)
    with pytest.raises(ConversionError):
        convert(tmp_path / "nothing", tmp_path / "out", overwrite=True, progress=False)
    assert is_checkpoint(tmp_path / "out")


def test_two_writers_of_one_destination(tmp_path):
    with locked(tmp_path / "out", wait=False):
        with pytest.raises(ConversionError, match="another process is writing"), locked(tmp_path / "out", wait=False):
            pass
        with locked(tmp_path / "other", wait=False):
            pass
    with locked(tmp_path / "out", wait=False):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("part", ["report.json", "config.json", "params/_METADATA", "params/manifest.ocdbt"])
@pytest.mark.parametrize("damage", ["missing", "empty", "half"])
def test_damaged_checkpoints_do_not_load(part, damage, tiny, tmp_path):
    directory, _ = tiny("llama")
    convert(directory, tmp_path / "out", progress=False)
    path = tmp_path / "out" / part
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(data[: len(data) // 2 if damage == "half" else 0])
    with pytest.raises(ConversionError, match="out"):
        load(tmp_path / "out")


def test_missing_weights_do_not_load(tiny, tmp_path):
    directory, _ = tiny("llama")
    convert(directory, tmp_path / "out", progress=False)
    files = [p for p in (tmp_path / "out" / "params").rglob("d/*") if p.is_file()]
    assert files
    for file in files:
        file.unlink()
    with pytest.raises(ConversionError, match="damaged checkpoint"):
        load(tmp_path / "out")


def test_a_flipped_bit_does_not_load(tiny, tmp_path):
    directory, _ = tiny("llama")
    convert(directory, tmp_path / "out", progress=False)
    file = max((tmp_path / "out" / "params").rglob("d/*"), key=lambda path: path.stat().st_size)
    data = file.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    file.write_bytes(flipped)
    with pytest.raises(ConversionError, match=f"changed files: .*{file.name}"):
        load(tmp_path / "out")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    del report["crc32"]
    (tmp_path / "out" / "report.json").write_text(json.dumps(report))
    load(tmp_path / "out")
    (tmp_path / "out" / "report.json").write_text(json.dumps({**report, "crc32": 3}))
    with pytest.raises(ConversionError, match="crc32 must be an object, got int"):
        load(tmp_path / "out")


def test_config_that_no_longer_matches(tiny, tmp_path):
    directory, _ = tiny("llama")
    convert(directory, tmp_path / "out", progress=False)
    record = json.loads((tmp_path / "out" / "config.json").read_text())
    report = json.loads((tmp_path / "out" / "report.json").read_text())

    def rewrite(content):
        (tmp_path / "out" / "config.json").write_text(json.dumps(content))
        report["files"]["config.json"] = (tmp_path / "out" / "config.json").stat().st_size
        (tmp_path / "out" / "report.json").write_text(json.dumps(report))

    rewrite(record | {"format_version": 99})
    with pytest.raises(ConversionError, match="format version 99"):
        load(tmp_path / "out")
    record["hf_config"]["rms_norm_eps"] = 0.1
    rewrite(record)
    with pytest.raises(ConversionError, match="read the model's config differently"):
        load(tmp_path / "out")


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    replace_file(tmp_path / "link.json", "new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "new"


def test_a_pipe_stays_one(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    replace_file(pipe, "new")
    assert os.read(reader, 10) == b"new"
    assert pipe.is_fifo()
    os.close(reader)
