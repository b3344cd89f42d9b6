"""benchmarks/everything.py: which jobs there are, and how they are run."""

import argparse
import json
import re
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from everything import Job, jobs_of, run_jobs  # noqa: E402


def given(tmp_path, **changes):
    known = {"model": "m", "draft": "d", "text": ["a.txt", "b.txt:summary"], "calibrate_text": ["c.txt"], "only": None}
    return argparse.Namespace(**known | {"context": 100, "folder": tmp_path} | changes)


def test_what_needs_a_model_is_left_out_without_one(tmp_path):
    names = {job.name for job in jobs_of(given(tmp_path))}
    without_draft = {job.name for job in jobs_of(given(tmp_path, draft=None))}
    assert names - without_draft == {"dustin", "dustin_arr"}
    bare = jobs_of(given(tmp_path, model=None, draft=None, text=[], calibrate_text=[]))
    assert {job.name for job in bare} == {"kernels", "rounds_7b", "decode_7b", "knapspec_7b", "dustin_7b"}
    assert [job.name for job in jobs_of(given(tmp_path, only=["kernels", "bench_1"]))] == ["bench_1", "kernels"]


def test_every_flag_is_known_to_its_command(tmp_path):
    """A flag that a command has given up would fail the job hours later."""
    cli = [BENCHMARKS.parent / "jaxspec" / "cli" / name for name in ("bench.py", "measuring.py")]
    for job in jobs_of(given(tmp_path)):
        sources = cli if job.command[1] == "-m" else [Path(job.command[1])]
        text = "".join(source.read_text() for source in sources)
        for flag in {part for part in job.command[2:] if part.startswith("--")}:
            assert re.search(rf"""(add|add_argument)\(\s*"{flag}\"""", text), (job.name, flag)


@pytest.mark.parametrize("gpus", [0, 2])
def test_jobs_run_fail_and_end(tmp_path, gpus, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)

    def job(name, code, seconds=20.0):
        return Job(name, [sys.executable, "-c", code], seconds)

    names = "JAX_COMPILATION_CACHE_DIR", "CUDA_VISIBLE_DEVICES"
    show = f"import os; print(*map(os.environ.get, {names}))"
    jobs = [
        job("good", show),
        job("bad", "import sys; sys.exit(3)"),
        job("slow", "import time; print('begun', flush=True); time.sleep(60)", 1.5),
        job("too_late", "print()", 1000.0),
    ]
    outcomes = run_jobs(jobs, gpus, time.monotonic() + 60, tmp_path)
    assert {outcome["name"]: outcome["outcome"] for outcome in outcomes} == {
        "good": "done",
        "bad": "failed with status 3",
        "slow": "stopped, out of time",
        "too_late": "not started, out of time",
    }
    assert json.loads((tmp_path / "jobs.json").read_text())["jobs"] == outcomes
    assert (tmp_path / "slow.log").read_text() == "begun\n"
    programs, gpu = (tmp_path / "good.log").read_text().split()
    assert programs == str(tmp_path / "programs")
    if gpus:
        assert gpu in ("0", "1")
