"""Results of a benchmark, in a file that is written after each of them."""

import json
import sys
import time
import traceback
from pathlib import Path

import jax


class OutOfTime(Exception):
    """The time limit is used up."""


class Report:
    """Results by part, what failed, and the clock that ends the run."""

    def __init__(self, path: Path | None, limit: float, **head) -> None:
        self._path, self._deadline = path, time.monotonic() + limit
        self.results: dict = {"schema_version": 1, **environment(), **head, "failures": []}

    def add(self, part: str, result: dict) -> None:
        """Records a result of a part."""
        self.results.setdefault(part, []).append(result)
        self.save()

    def attempt(self, label: str, function, *arguments):
        """Calls a function; a failure is recorded and gives None. Raises OutOfTime once the limit is over."""
        if time.monotonic() > self._deadline:
            raise OutOfTime
        try:
            return function(*arguments)
        except OutOfTime:
            raise
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            print(f"  {label} failed: {reason_of(error)}", flush=True)
            self.failed(self.failure(label, arguments, error))
            return None

    def failure(self, label: str, arguments: tuple, error: BaseException):
        """How a failure is recorded."""
        return {"part": label, "arguments": repr(arguments)[-200:], "error": reason_of(error, 600)}

    def failed(self, failure) -> None:
        """Records a failure."""
        self.results["failures"].append(failure)
        self.save()

    def save(self) -> None:
        """Writes what there is."""
        save(self.results, self._path)


def environment() -> dict:
    """What was run, and on what."""
    command = " ".join(["python", *sys.argv])
    return {"command": command, "device": jax.devices()[0].device_kind, "jax": jax.__version__}


def reason_of(error: BaseException, length: int = 300) -> str:
    """An error on one line."""
    return " ".join("".join(traceback.format_exception_only(error)).split())[:length]


def save(results: dict, path: Path | None) -> None:
    """Writes the results so far, if they are wanted."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1, default=float) + "\n")
