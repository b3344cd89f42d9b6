"""The version where the package is installed, in a source tree, and in neither."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

import jaxspec

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_installed(monkeypatch):
    monkeypatch.setattr(jaxspec, "version", lambda name: f"the version of {name}")
    assert jaxspec._version() == "the version of jaxspec"


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        (PROJECT.read_text(encoding="utf-8"), tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["version"]),
        (None, "0+unknown"),
        ("[project]\nname = 'another'\nversion = '7'\n", "0+unknown"),
        ("[tool.ruff]\n", "0+unknown"),
        ("not toml", "0+unknown"),
    ],
    ids=["ours", "none", "another", "no project", "damaged"],
)
def test_a_source_tree(monkeypatch, tmp_path, beside, expected):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(jaxspec, "version", missing)
    monkeypatch.setattr(jaxspec, "__file__", str(tmp_path / "jaxspec" / "__init__.py"))
    if beside is not None:
        (tmp_path / "pyproject.toml").write_text(beside, encoding="utf-8")
    assert jaxspec._version() == expected
