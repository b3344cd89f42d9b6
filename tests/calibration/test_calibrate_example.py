"""The example runs with the pair that it makes."""

import importlib.util
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "calibrate_dustin.py"


def test_it_says_that_it_is_lossy(capsys):
    spec = importlib.util.spec_from_file_location("calibrate_dustin", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    heads, figures = capsys.readouterr().out.splitlines()
    assert heads.startswith("heads ((")
    assert "of 40 rows by the draft" in heads
    assert figures.startswith("lossy: ")
