"""The one error type of conversion and loading."""

from pathlib import Path


class ConversionError(ValueError):
    """A checkpoint that cannot be converted or loaded; the message says what is wrong and, where known, what to do."""


def cannot_read(path: Path, error: OSError) -> ConversionError:
    """The error to raise for a file that the system refuses to read."""
    return ConversionError(f"cannot read {path}: {error.strerror or error}")
