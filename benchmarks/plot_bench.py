"""Draws what `jaxspec bench --json` wrote, as its `--plot` does.

python benchmarks/plot_bench.py benchmarks/results/bench_qwen2.5-coder-1.5b_h200.json speed.png
"""

import argparse
import json
from pathlib import Path

from jaxspec.cli.measuring import write_speed_plot

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path, help="the JSON file")
    parser.add_argument("plot", type=Path, help="the file to write; the suffix chooses the format")
    args = parser.parse_args()
    write_speed_plot(args.plot, json.loads(args.record.read_text(encoding="utf-8")))
