"""Draws records that `jaxspec bench --json` wrote, without measuring again; several of one model share a picture.

python benchmarks/plot_bench.py benchmarks/results/bench_qwen2.5-coder-1.5b_b*_h200.json --out speed.png
"""

import argparse
import json
from pathlib import Path

from jaxspec.cli.speed_plot import write_speed_plot

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", help="the JSON files")
    parser.add_argument("--out", type=Path, required=True, help="the picture; its suffix chooses the format")
    parser.add_argument("--leave-out", nargs="*", default=[], metavar="METHOD", help="as the records name it")
    args = parser.parse_args()
    records = [json.loads(path.read_text(encoding="utf-8")) for path in args.records]
    if len({(record["model"], record["shape"], record["device"]) for record in records}) > 1:
        parser.error("the records must be of one model and one device")
    shown = [r for record in records for r in record["results"] if r["method"] not in args.leave_out]
    results = sorted(shown, key=lambda result: (result["batch"], result["context"]))
    write_speed_plot(args.out, {**records[0], "results": results})
