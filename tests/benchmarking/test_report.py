"""benchmarks/report.py, and what Dustin's benchmark makes of it: results are written as they come, with what failed."""

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import report

    return report


def fail(message):
    raise RuntimeError(message)


def test_results_are_written_as_they_come(report, tmp_path):
    path = tmp_path / "report.json"
    written = report.Report(path, 60, model="m")
    written.add("speed", {"rate": 1})
    assert written.attempt("speed", fail, "two\nlines") is None
    written.add("speed", {"rate": 2})
    record = json.loads(path.read_text())
    assert list(record) == ["schema_version", "command", "device", "jax", "model", "failures", "speed"]
    assert record["speed"] == [{"rate": 1}, {"rate": 2}]
    assert record["failures"] == [
        {"part": "speed", "arguments": "('two\\nlines',)", "error": "RuntimeError: two lines"}
    ]


def test_the_end_of_time_ends_a_run(report):
    late = report.Report(None, -1)
    with pytest.raises(report.OutOfTime):
        late.attempt("speed", fail, "not called")
    # nor is it a failure of the part around what did not begin
    early = report.Report(None, 60)
    with pytest.raises(report.OutOfTime):
        early.attempt("all", late.attempt, "speed", fail)
    assert not early.results["failures"]


def test_dustin_names_what_it_skips(report, tmp_path):
    import dustin

    path = tmp_path / "report.json"
    late = dustin.DustinReport(path, -1, started=0)
    assert late.attempt("speed", fail, "not called") is None
    early = dustin.DustinReport(path, 60, started=0)
    assert early.attempt("speed", lambda: fail("why")) is None
    assert late.results["failures"] == ["speed: skipped, out of time"]
    (failure,) = json.loads(path.read_text())["failures"]
    assert failure.startswith("speed: RuntimeError: why (fail, line ")
