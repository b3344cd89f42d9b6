"""What the converter needs from a checkpoint, whatever its format."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class TensorInfo(NamedTuple):
    """One stored tensor: its Hugging Face shape and the name of its storage type ('BF16', 'F32', 'Q4_K', ...)."""

    shape: tuple[int, ...]
    dtype: str


class Source(ABC):
    """A readable checkpoint. Tensors carry Hugging Face names and layouts and are read one at a time.

    Attributes:
        kind: 'safetensors' or 'gguf'.
        origin: what the user named (a path or a hub id).
        config: the Hugging Face config, as stored or rebuilt.
        generation_config: the Hugging Face generation config, or None.
        tensors: every tensor by Hugging Face name; a tensor without one keeps the name that its format gives it.
        problems: faults of the files themselves (missing shards, stale index entries, duplicate tensors), to be
            reported together with those of the tensors.
        default_dtype: the parameter dtype to use unless told otherwise.
    """

    kind: str
    origin: str
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tensors: dict[str, TensorInfo]
    problems: list[str]
    default_dtype: str

    @abstractmethod
    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Reads one tensor of `tensors`, in its Hugging Face layout, cast to `dtype`.

        Raises:
            ConversionError: unreadable data, non-finite values, values that overflow `dtype`.
        """

    @abstractmethod
    def write_tokenizer(self, directory: Path) -> list[str]:
        """Writes the tokenizer's files to an existing directory and returns their names (none: no tokenizer).

        Raises:
            ConversionError: a malformed tokenizer, or one that cannot be rebuilt faithfully.
        """

    @abstractmethod
    def files(self) -> list[Path]:
        """Every file that the conversion depends on."""

    def sha256(self) -> Iterator[tuple[str, str]]:
        """Names and SHA-256 digests of `files`."""
        for path in self.files():
            with path.open("rb") as file:
                yield path.name, hashlib.file_digest(file, "sha256").hexdigest()

    def fingerprint(self) -> str:
        """A digest that changes with the files' paths, sizes, times or edges, without reading all of their bytes."""
        digest = hashlib.sha256()
        for path in self.files():
            status = path.stat()
            digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
            with path.open("rb") as file:
                digest.update(file.read(1 << 16))
                file.seek(max(0, status.st_size - (1 << 16)))
                digest.update(file.read(1 << 16))
        return digest.hexdigest()
