"""One form of results for both sides of peers.py, and their table."""

import statistics

from jaxspec.benchmarking.shapes import step_bytes
from jaxspec.models import ModelConfig


def failure(library: str, method: str, case: str, reason: str) -> dict:
    """The result of what did not run."""
    return {"library": library, "method": method, "case": case, "failure": reason}


def success(
    library: str, method: str, case: str, seconds: list[float], tokens: int, prefill_seconds: float | None
) -> dict:
    """The result of runs that took `seconds` for `tokens` tokens of each row."""
    speed = sizes(case)[0] * tokens / statistics.median(seconds)
    result = {"library": library, "method": method, "case": case, "tokens_per_second": speed}
    return result | {"share_of_ceiling": None, "prefill_seconds": prefill_seconds, "tokens": tokens, "seconds": seconds}


def share_of_ceiling(
    result: dict, config: ModelConfig, itemsize: int, new_tokens: int, ceiling: float | None
) -> float | None:
    """Of a method that gives each row one token a step."""
    batch, context = sizes(result["case"])
    needed = step_bytes(config, batch, context + new_tokens // 2, itemsize)
    return needed * result["tokens_per_second"] / batch / ceiling if ceiling else None


def sizes(case: str) -> tuple[int, int]:
    """Batch and context of a case."""
    batch, context = map(int, case.split("x"))
    return batch, context


def line(result: dict) -> str:
    """What is told as soon as it is known."""
    told = result.get("failure") or f"{result['tokens_per_second']:.1f} tokens/s"
    return f"{result['case']}: {result['library']} {result['method']}: {told}"


def print_table(record: dict, case: str) -> None:
    """Prints what was measured of one case."""
    results = [result for result in record["results"] if result["case"] == case]
    plain = next((r["tokens_per_second"] for r in results if r["method"] == "plain" and "failure" not in r), None)
    weights = " (random weights)" if record["synthetic"] else ""
    print(f"\n{record['model']}{weights}, {record['dtype']}, {case}, {record['new_tokens']} new tokens")
    print(f"{record['device']}; {', '.join(f'{name} {version}' for name, version in record['versions'].items())}")
    rows = [("", "tokens/s", "x jaxspec plain", "share of ceiling", "prefill s")]
    for r in results:
        row = f"{r['library']} {r['method']}", r.get("failure")
        if "failure" not in r:
            times = plain and r["tokens_per_second"] / plain
            row = row[0], f"{r['tokens_per_second']:.1f}", _cell(times, ".2f"), _cell(r["share_of_ceiling"], ".0%")
            row += (_cell(r["prefill_seconds"], ".2f"),)
        rows.append(row)
    widths = [max(len(row[i]) for row in rows if len(row) > 2) for i in range(5)]
    widths[0] = max(len(row[0]) for row in rows)
    for name, *cells in rows:
        aligned = cells if len(cells) == 1 else [f"{cell:>{w}}" for cell, w in zip(cells, widths[1:], strict=True)]
        print("  ".join([f"{name:{widths[0]}}", *aligned]))


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
