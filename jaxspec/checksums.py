"""Checksums of a checkpoint's files: TensorStore checks its indices only, a flipped bit of a weight would pass."""

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from convert.errors import ConversionError


def checksums(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """CRC-32 of files in a directory, 8 hex digits, by name."""
    names = list(names)
    with _threads() as threads:
        return dict(zip(names, threads.map(lambda name: _checksum(directory / name), names), strict=True))


@contextmanager
def checked(directory: Path, expected: Mapping[str, str]) -> Iterator[None]:
    """Compares files with their checksums while the block reads them: their bytes come from the disk once.

    Args:
        directory: where they are.
        expected: what `checksums` returned.

    Raises:
        ConversionError: a file was changed.
    """
    threads = _threads()
    try:
        found = {name: threads.submit(_checksum, directory / name) for name in expected}
        yield
        damaged = sorted(name for name, checksum in expected.items() if found[name].result() != checksum)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    if damaged:
        raise ConversionError(f"{directory}: damaged checkpoint: changed files: {damaged[:8]}; convert it again")


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(os.cpu_count() or 1, 8), thread_name_prefix="jaxspec-checksum")


def _checksum(path: Path) -> str:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"
