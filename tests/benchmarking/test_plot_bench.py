"""`benchmarks/plot_bench.py` over the records in `benchmarks/results`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORDS = sorted(map(str, (ROOT / "benchmarks" / "results").glob("bench_qwen2.5-coder-1.5b_b*_h200.json")))


def plot(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "plot_bench.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_records_of_one_model_share_a_picture(tmp_path):
    assert len(RECORDS) > 1
    plot(*RECORDS, "--out", tmp_path / "all.svg", "--leave-out", "streaming").check_returncode()
    drawn = (tmp_path / "all.svg").read_text()
    assert all(f"batch {batch}, 32,000 tokens" in drawn for batch in (1, 8, 32, 64))
    assert "vegas" in drawn
    assert "streaming" not in drawn


def test_other_records_are_refused(tmp_path):
    other = tmp_path / "other.json"
    other.write_text(Path(RECORDS[0]).read_text().replace("NVIDIA H200", "another"))
    result = plot(RECORDS[0], other, "--out", tmp_path / "both.svg")
    assert result.returncode == 2
    assert "one model and one device" in result.stderr
    assert not (tmp_path / "both.svg").exists()
