"""The method in the documentation is found, offered as a flag, and passes what every method must."""

import re
import sys
from pathlib import Path

import pytest
import test_conformance as conformance

from jaxspec import methods
from jaxspec.cli import main
from jaxspec.methods import find_methods

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding_a_method.md"
NAME = "prompt-lookup"


@pytest.fixture
def documented(monkeypatch, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "prompt_lookup.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    yield code
    sys.modules.pop("jaxspec.methods.prompt_lookup", None)


def test_the_documented_method(documented, capsys):
    body = documented[documented.index("class ") :]
    assert len([line for line in body.splitlines() if line.strip()]) <= 30
    assert body in (ROOT / "examples" / "add_a_method.py").read_text(encoding="utf-8")
    assert find_methods()[NAME].__name__ == "PromptLookup"
    conformance.test_greedy_output_is_that_of_plain_decoding(NAME)
    conformance.test_an_equal_method_does_not_recompile(NAME)
    conformance.test_the_committed_cache_is_that_of_plain_decoding(NAME)
    conformance.test_the_trace_adds_up(NAME, conformance.greedy_run)
    conformance.test_every_path_enumerated(NAME)
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert NAME in capsys.readouterr().out
