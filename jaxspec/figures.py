"""Plots as files."""

import io
from pathlib import Path
from typing import Any

from convert.atomic import replace_file


def save_figure(figure: Any, path: Path) -> None:
    """Writes a matplotlib figure, whole or not at all; the suffix chooses the format, PNG without one.

    Raises:
        ValueError: matplotlib knows no such format.
        OSError: the file cannot be written.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.removeprefix(".") or "png")
    replace_file(path, buffer.getvalue())
