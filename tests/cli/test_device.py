"""Where commands keep compiled programs, and when they start JAX's backend."""

import os

import jax
import pytest

import jaxspec
from jaxspec.cli import main
from jaxspec.cli.device import default_dtype, keep_programs

SETTING = "jax_compilation_cache_dir"


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch, tmp_path):
    before = jax.config.values[SETTING]
    jax.config.update(SETTING, None)
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    yield
    jax.config.update(SETTING, before)


@pytest.fixture
def backend(monkeypatch):
    return lambda name: monkeypatch.setattr(jax, "default_backend", lambda: name)


def test_programs_are_kept_on_a_gpu(backend, tmp_path):
    backend("gpu")
    keep_programs()
    assert jax.config.values[SETTING] == str(tmp_path / "cache" / "programs")
    assert (tmp_path / "cache" / "programs").is_dir()


@pytest.mark.parametrize("name", ["cpu", "gpu"])
@pytest.mark.parametrize("chosen", ["/elsewhere", ""])
def test_a_setting_of_the_user_stays(backend, tmp_path, name, chosen):
    backend(name)
    jax.config.update(SETTING, chosen)
    keep_programs()
    assert jax.config.values[SETTING] == chosen
    assert not (tmp_path / "cache").exists()


def test_nothing_is_kept_on_a_cpu(backend, tmp_path):
    backend("cpu")
    keep_programs()
    assert jax.config.values[SETTING] is None
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_written_is_left_alone(backend, tmp_path, monkeypatch):
    backend("gpu")
    monkeypatch.setattr(os, "access", lambda *_: False)
    keep_programs()
    assert jax.config.values[SETTING] is None
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    keep_programs()
    assert jax.config.values[SETTING] is None


def test_default_dtype(backend):
    backend("cpu")
    assert default_dtype(None) == "float32"
    assert default_dtype("bfloat16") == "bfloat16"
    backend("gpu")
    assert default_dtype(None) is None


COMMANDS = [
    ["generate", "--prompt", "x"],
    ["verify", "--method", "vegas"],
    ["profile"],
    ["calibrate", "heads", "--out", "heads.json"],
    ["bench"],
    ["tune", "--out", "tuned.json"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_every_command_keeps_programs(backend, capsys, tmp_path, monkeypatch, command):
    def load(*_, **__):
        raise ValueError(f"programs in {jax.config.values[SETTING]}")

    if command[0] in ("bench", "tune"):
        pytest.importorskip("rich")
    backend("gpu")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jaxspec, "load", load)
    monkeypatch.setattr(jaxspec.checkpoint, "load", load)
    for module in ("bench", "tune"):
        monkeypatch.setattr(f"jaxspec.cli.{module}.environment", lambda _: {"ceiling_bytes_per_second": None})
    assert main([*command, "--model", "x"]) == 2
    assert f"programs in {tmp_path / 'cache' / 'programs'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["generate", "--help"],
        ["generate", "--prompt", "x"],
        ["generate", "--model", "x", "--prompt", "x", "--rho", "1"],
        ["generate", "--model", "x", "--prompt", "x", "--max-new-tokens", "0"],
        ["generate", "--model", "x", "--prompt", "x", "--stop", ""],
        ["generate", "--model", "x", "--prompt", "x", "--temperature", "-1"],
        ["generate", "--model", "x", "--prompt", "x", "--method", "vegas", "--rho", "2"],
        ["generate", "--model", "x", "--prompt", "x", "--method", "knapspec", "--max-draft", "0"],
        ["generate", "--model", "x", "--prompt", "x", "--method", "knapspec", "--profile", "/nope.json"],
        ["generate", "--model", "x", "--prompt", "x", "--method", "knapspec", "--selection", "foo"],
        ["generate", "--model", "x", "--prompt", "x", "--plot", "/proc/x.png"],
        ["generate", "--model", "x", "--prompt", ""],
        ["generate", "--model", "x", "--prompt", "x", "--method", "draft-model", "--draft", "y", "--num-draft", "99"],
        ["generate", "--model", "x", "--prompt", "x", "--method", "dustin", "--draft", "y", "--budget", "0"],
        ["verify", "--model", "x", "--method", "draft-model", "--draft", "y", "--num-draft", "99"],
        ["verify", "--model", "x", "--method", "plain"],
        ["profile", "--model", "x", "--batch", "0"],
        ["calibrate", "heads", "--model", "x", "--out", "/no/such/place/x.json"],
        ["bench", "--model", "x", "--repeats", "0"],
        ["bench", "--model", "x", "--batch", "1", "0"],
        ["bench", "--model", "x", "--methods", "vegas:rho=2"],
        ["bench", "--model", "x", "--draft", "y", "--methods", "draft-model:num_draft=99"],
        ["tune", "--model", "x", "--out", "x.json", "--context", "1"],
        ["tune", "--model", "x", "--out", "x.json", "--repeats", "1"],
        ["tune", "--model", "x", "--out", "x.json", "--draft", "y", "--only", "dustin", "--allow-lossy"],
    ],
    ids=" ".join,
)
def test_arguments_are_checked_before_the_backend_starts(capsys, monkeypatch, args):
    def start():
        raise AssertionError

    monkeypatch.setattr(jax, "default_backend", start)
    try:
        code = main(args)
    except SystemExit as exit_:
        code = exit_.code
    assert code == (0 if "--help" in args else 2)
