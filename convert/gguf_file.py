"""The GGUF format (versions 2 and 3, little-endian), read with every count, length and offset checked.

Only the header is parsed here, in one pass whose memory is bounded by the file's own size; block formats are decoded by
the `gguf` package. That package's own reader trusts counts and offsets, which a damaged file turns into endless loops.
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from convert.dtypes import CHUNK_ELEMENTS, cast_into
from convert.errors import ConversionError, cannot_read

MAX_ENTRIES = 100_000  # metadata keys, and tensors
MAX_ARRAY = 2_000_000
MAX_HEADER_BYTES = 64 << 20  # vocabularies of 256,000 tokens with their merges need about 12 MB
MAX_STRING = 16 << 20
MAX_NAME = 1024

PLAIN_TYPES = ("F32", "F16", "BF16")
BLOCK_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}


class GGUFTensor(NamedTuple):
    """One tensor: `shape` in numpy order (rows first), `offset` from the file's first byte."""

    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int


class GGUFFile:
    """One GGUF file: `metadata` (float32 values kept as np.float32) and `tensors` by the file's own names."""

    def __init__(self, path: Path) -> None:
        """Reads and checks the header.

        Raises:
            ConversionError: unreadable, truncated or inconsistent file, or a version or tensor type that is not
                supported.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                reader = _Reader(file, path)
                self.metadata, self.tensors = _parse(reader)
        except OSError as error:
            raise cannot_read(path, error) from error

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Decodes one tensor to `dtype`, a few rows at a time.

        Raises:
            ConversionError: unreadable data, non-finite values, values that overflow `dtype`.
        """
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        kind = GGMLQuantizationType[tensor.dtype]
        row_length = tensor.shape[-1]
        out = np.empty(tensor.shape, dtype)
        rows = out.reshape(-1, row_length)
        row_bytes = tensor.num_bytes // len(rows)
        step = max(1, CHUNK_ELEMENTS // row_length)
        try:
            with self.path.open("rb") as file:
                file.seek(tensor.offset)
                for start in range(0, len(rows), step):
                    target = rows[start : start + step]
                    raw = np.fromfile(file, np.uint8, len(target) * row_bytes)
                    if raw.size < len(target) * row_bytes:
                        raise ConversionError(f"{self.path}: truncated inside {name}")
                    values = dequantize(raw.reshape(len(target), row_bytes), kind)
                    cast_into(target, values, name)
        except OSError as error:
            raise cannot_read(self.path, error) from error
        return out


class _Reader:
    """A cursor that refuses to run past the end of its file, before it allocates."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self.size = path.stat().st_size
        self.position = 0

    def fail(self, message: str) -> ConversionError:
        return ConversionError(f"{self.path}: {message} (at byte {self.position})")

    def take(self, count: int) -> bytes:
        if count > self.size - self.position:
            raise self.fail(f"truncated or damaged: {count} more bytes expected, {self.size - self.position} left")
        if count > MAX_HEADER_BYTES - self.position:
            raise self.fail(f"header is over the limit of {MAX_HEADER_BYTES} bytes")
        data = self.file.read(count)
        if len(data) != count:
            raise self.fail("truncated while reading")
        self.position += count
        return data

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def string(self, limit: int = MAX_STRING) -> str:
        length = self.scalar("Q")
        if length > limit:
            raise self.fail(f"string of {length} bytes is over the limit of {limit}")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise self.fail("string is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _BOOL:
            return self._bool(self.scalar("B"))
        if kind in _SCALARS:
            value = self.scalar(_SCALARS[kind])
            return np.float32(value) if _SCALARS[kind] == "f" else value
        if kind == _ARRAY:
            return self._array()
        raise self.fail(f"unknown value type {kind}")

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > MAX_ARRAY:
            raise self.fail(f"array of {count} values is over the limit of {MAX_ARRAY}")
        if kind == _STRING:
            if count * 8 > self.size - self.position:
                raise self.fail(f"truncated or damaged: array of {count} strings")
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise self.fail(f"arrays of value type {kind} are not supported")
        code = _SCALARS[kind]
        values = np.frombuffer(self.take(count * struct.calcsize(code)), f"<{'u1' if code == 'B' else code}").tolist()
        return [self._bool(value) for value in values] if kind == _BOOL else values

    def _bool(self, value: int) -> bool:
        if value > 1:
            raise self.fail(f"boolean with value {value}")
        return bool(value)


def _parse(reader: _Reader) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    if reader.size < 4 or (magic := reader.take(4)) != b"GGUF":
        raise ConversionError(
            f"{reader.path}: not a GGUF file; supported: a Hugging Face directory, a hub id, a GGUF file"
            if reader.size < 4 or magic != b"FUGG"
            else f"{reader.path}: big-endian GGUF is not supported"
        )
    version = reader.scalar("I")
    if version not in (2, 3):
        raise reader.fail(f"GGUF version {version} is not supported; supported: 2 and 3, little-endian")
    num_tensors, num_values = reader.scalar("Q"), reader.scalar("Q")
    if num_tensors > MAX_ENTRIES or num_values > MAX_ENTRIES:
        raise reader.fail(f"{num_tensors} tensors and {num_values} metadata keys are over the limit of {MAX_ENTRIES}")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = reader.string(MAX_NAME)
        if key in metadata:
            raise reader.fail(f"metadata key {key!r} is stated twice")
        metadata[key] = reader.value(reader.scalar("I"))
    entries = [_tensor_entry(reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise reader.fail(f"bad general.alignment {str(alignment)[:40]}")
    return metadata, _place(reader, entries, -(-reader.position // alignment) * alignment, alignment)


def _tensor_entry(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.string(MAX_NAME)
    num_dimensions = reader.scalar("I")
    if not 1 <= num_dimensions <= 4:
        raise reader.fail(f"tensor {name!r} has {num_dimensions} dimensions")
    dimensions = struct.unpack(f"<{num_dimensions}Q", reader.take(8 * num_dimensions))
    if not all(0 < d < 1 << 40 for d in dimensions):
        raise reader.fail(f"tensor {name!r} has dimensions {dimensions}")
    return name, dimensions[::-1], reader.scalar("I"), reader.scalar("Q")


def _place(
    reader: _Reader, entries: list[tuple[str, tuple[int, ...], int, int]], data_start: int, alignment: int
) -> dict[str, GGUFTensor]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    known = {int(kind): kind.name for kind in GGMLQuantizationType}
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in entries:
        where = f"{reader.path}: tensor {name!r}"
        type_name = known.get(kind, f"number {kind}")
        if type_name not in PLAIN_TYPES + BLOCK_TYPES:
            raise ConversionError(f"{where} has type {type_name}; supported: {', '.join(PLAIN_TYPES + BLOCK_TYPES)}")
        if name in tensors:
            raise ConversionError(f"{reader.path}: duplicate tensor {name}")
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
        if shape[-1] % block:
            raise ConversionError(f"{where}: rows of {shape[-1]} do not divide into {type_name} blocks of {block}")
        num_bytes = block_bytes
        for dimension in (*shape[:-1], shape[-1] // block):
            num_bytes *= dimension
        if offset % alignment:
            raise ConversionError(f"{where}: offset {offset} is not a multiple of {alignment}")
        if data_start + offset + num_bytes > reader.size:
            raise ConversionError(
                f"{where}: truncated: it ends at byte {data_start + offset + num_bytes}, the file at {reader.size}"
            )
        tensors[name] = GGUFTensor(shape, type_name, data_start + offset, num_bytes)
    end, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise ConversionError(f"{reader.path}: tensors {before!r} and {name!r} overlap")
        end, before = tensor.offset + tensor.num_bytes, name
    return tensors
