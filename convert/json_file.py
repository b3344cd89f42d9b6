"""Reading JSON that other people wrote."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convert.errors import ConversionError, cannot_read

MAX_JSON_BYTES = 64 << 20  # the largest tokenizer.json in common use is below 40 MB


def parse_object(text: bytes | str, where: str) -> dict[str, Any]:
    """Parses a JSON object strictly.

    Raises:
        ConversionError: not JSON, not an object, a key stated twice, or nesting too deep for the parser.
    """

    def without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            keys = [key for key, _ in pairs]
            raise ConversionError(f"{where}: stated twice: {sorted({k for k in keys if keys.count(k) > 1})[:5]}")
        return result

    try:
        parsed = json.loads(text, object_pairs_hook=without_duplicates)
    except ConversionError:
        raise
    except RecursionError as error:
        raise ConversionError(f"{where}: nested too deeply") from error
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, integers of thousands of digits
        raise ConversionError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise ConversionError(f"{where}: expected a JSON object, got {type(parsed).__name__}")
    return parsed


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file of at most `MAX_JSON_BYTES`.

    Raises:
        ConversionError: as `parse_object`, or the file cannot be read or is too large.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ConversionError(f"{path}: {path.stat().st_size} bytes is too large for a JSON file of a checkpoint")
        return parse_object(path.read_bytes(), str(path))
    except OSError as error:
        raise cannot_read(path, error) from error


def write_object(path: Path, value: dict[str, Any]) -> None:
    """Writes `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
