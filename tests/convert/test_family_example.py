"""The examples' family, put where families are found: its checkpoints convert, and compute what transformers does."""

import shutil
import sys
from pathlib import Path

import pytest

from convert import convert
from jaxspec import models
from jaxspec.checkpoint import load
from tests.convert.test_parity import assert_equal_logits

EXAMPLE = Path(__file__).parents[2] / "examples" / "add_a_family.py"


@pytest.fixture
def phi3(monkeypatch, tmp_path):
    folder = tmp_path / "families"
    folder.mkdir()
    shutil.copy(EXAMPLE, folder / "phi3.py")
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(folder)])
    models._families.cache_clear()
    yield
    models._families.cache_clear()
    sys.modules.pop("jaxspec.models.phi3", None)


@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": True, "num_key_value_heads": 6}])
def test_equals_transformers(overrides, phi3, tiny, tmp_path):
    directory, model = tiny("phi3", **overrides)
    report = convert(directory, tmp_path / "out", progress=False)
    assert report.model_type == "phi3"
    assert_equal_logits(load(tmp_path / "out"), model)


def test_a_window_in_use_raises(phi3, tiny, tmp_path):
    directory, _ = tiny("phi3", sliding_window=64)
    with pytest.raises(ValueError, match="sliding_window = 64 is in use and not supported"):
        convert(directory, tmp_path / "out", progress=False)
