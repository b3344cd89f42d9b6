"""Directories that appear complete or not at all, also when the writer is killed."""

import ctypes
import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from convert.errors import ConversionError

_STAGING, _BACKUP, _LOCK = ".jaxspec-tmp-", ".jaxspec-old", ".jaxspec-lock"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def staged(dst: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yields a new directory beside `dst`; it becomes `dst` when the block ends without an exception.

    Until then an existing `dst` stays as it is, and afterwards it is gone. Every file is flushed to disk before the
    rename. No thread may go on writing when the block ends. What a killed writer left behind is removed by the next
    writer of the same `dst`. The caller holds `locked(dst)`.

    Raises:
        ConversionError: `dst` exists and `overwrite` is False.
    """
    _recover(dst)
    if os.path.lexists(dst) and not overwrite:
        raise ConversionError(f"{dst} exists; give --overwrite (overwrite=True) to replace it")
    staging = dst.parent / f".{dst.name}{_STAGING}{secrets.token_hex(6)}"
    try:
        staging.mkdir()
        yield staging
        _flush(staging)
        _publish(staging, dst)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


@contextmanager
def locked(dst: Path, *, wait: bool) -> Iterator[None]:
    """Holds the only right to write `dst`. The operating system releases it when the process dies.

    Raises:
        ConversionError: another process holds it and `wait` is False.
    """
    dst.parent.mkdir(parents=True, exist_ok=True)
    path = dst.parent / f".{dst.name}{_LOCK}"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # its last holder may have removed the file between our open and our lock
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        except BlockingIOError:
            os.close(descriptor)
            raise ConversionError(f"another process is writing {dst}") from None
        os.close(descriptor)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def is_staging(path: Path) -> bool:
    """Whether `path` is named like an unfinished directory of `staged`."""
    return path.name.startswith(".") and _STAGING in path.name


def _recover(dst: Path) -> None:
    backup = dst.parent / f".{dst.name}{_BACKUP}"
    if backup.exists():
        if dst.exists():
            shutil.rmtree(backup)
        else:
            backup.rename(dst)
    for leftover in dst.parent.glob(f".{glob.escape(dst.name)}{_STAGING}*"):
        shutil.rmtree(leftover)


def _publish(staging: Path, dst: Path) -> None:
    if not dst.exists():
        staging.rename(dst)
        _flush_directory(dst.parent)
        return
    if _exchange(staging, dst):
        _flush_directory(dst.parent)
        shutil.rmtree(staging)
        return
    # two renames: killed between them, the backup is brought back by the next writer
    backup = dst.parent / f".{dst.name}{_BACKUP}"
    dst.rename(backup)
    staging.rename(dst)
    _flush_directory(dst.parent)
    shutil.rmtree(backup)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two directories in one step where the system can (Linux), else returns False."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(error, os.strerror(error), str(second))


def _flush(directory: Path) -> None:
    for root, _, files in os.walk(directory):
        for name in files:
            with open(os.path.join(root, name), "rb") as file:
                os.fsync(file.fileno())
        _flush_directory(Path(root))


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(dst: Path, content: str | bytes) -> None:
    """Writes a file, text as UTF-8, that appears complete or not at all; an existing `dst` stays until then.

    A link is followed. What is no file, such as a pipe or /dev/stdout, is written to as it is.

    Raises:
        OSError: its folder does not exist or cannot be written; the message names `dst`.
    """
    dst, data = dst.resolve(), content.encode() if isinstance(content, str) else content
    staging = dst.parent / f".{dst.name}{_STAGING}{secrets.token_hex(6)}"
    try:
        if dst.exists() and not dst.is_file():
            dst.write_bytes(data)
            return
        with staging.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        staging.replace(dst)
    except OSError as error:
        staging.unlink(missing_ok=True)
        raise OSError(f"cannot write {dst}: {error.strerror or error}") from error
    except BaseException:
        staging.unlink(missing_ok=True)
        raise
    _flush_directory(dst.parent)
