"""The safetensors format, read with every header field checked.

The layout is the published one: a little-endian u64 header size, a JSON header, then the tensors' bytes without holes.
Reading goes through plain reads instead of a memory map, so that pages of the source never count as resident memory.
"""

import struct
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from convert.dtypes import CHUNK_ELEMENTS, cast_into
from convert.errors import ConversionError, cannot_read
from convert.json_file import parse_object
from convert.source import TensorInfo

MAX_HEADER_BYTES = 25 << 20  # 100,000 tensors need about 12 MB
MAX_DIMENSIONS = 8

FLOAT_TYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
# Types that are legal in a file but hold no plain weights; their sizes are needed to check the offsets of the others.
OTHER_TYPES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
OTHER_TYPES |= {"U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8, "C64": 8}


class Entry(NamedTuple):
    """One tensor of a file: `offset` counts from the file's first byte."""

    info: TensorInfo
    offset: int


class SafetensorsFile:
    """One safetensors file. `entries` maps tensor names to their types, shapes and places."""

    def __init__(self, path: Path) -> None:
        """Reads and checks the header.

        Raises:
            ConversionError: unreadable, truncated or inconsistent file.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                prefix = file.read(8)
                if len(prefix) < 8:
                    raise ConversionError(f"{path}: truncated: {size} bytes, no header")
                (length,) = struct.unpack("<Q", prefix)
                if length > size - 8:
                    raise ConversionError(f"{path}: truncated: header of {length} bytes in a file of {size} bytes")
                if length > MAX_HEADER_BYTES:
                    raise ConversionError(f"{path}: header of {length} bytes is over the limit of {MAX_HEADER_BYTES}")
                header = parse_object(file.read(length), f"{path} (header)")
        except OSError as error:
            raise cannot_read(path, error) from error
        header.pop("__metadata__", None)
        self.entries = {name: self._entry(name, value, 8 + length) for name, value in header.items()}
        self._check_layout(8 + length, size)

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Reads one tensor, cast to `dtype`.

        Raises:
            ConversionError: not a floating-point tensor, unreadable, non-finite or overflowing values.
        """
        info, offset = self.entries[name]
        stored = FLOAT_TYPES.get(info.dtype)
        if stored is None:
            raise ConversionError(f"{name}: stored as {info.dtype}; supported: {', '.join(FLOAT_TYPES)}")
        out = np.empty(info.shape, dtype)
        flat = out.reshape(-1)
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                for start in range(0, flat.size, CHUNK_ELEMENTS):
                    count = min(CHUNK_ELEMENTS, flat.size - start)
                    values = np.fromfile(file, stored, count)
                    if values.size < count:
                        raise ConversionError(f"{self.path}: truncated inside {name}")
                    cast_into(flat[start : start + count], values, name)
        except OSError as error:
            raise cannot_read(self.path, error) from error
        return out

    def _entry(self, name: str, value: object, data_start: int) -> Entry:
        where = f"{self.path}: tensor {name!r}"
        if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
            raise ConversionError(f"{where}: expected dtype, shape and data_offsets")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or (dtype not in FLOAT_TYPES and dtype not in OTHER_TYPES):
            raise ConversionError(f"{where}: unknown dtype {str(dtype)[:40]!r}")
        if not _naturals(shape) or len(shape) > MAX_DIMENSIONS:
            raise ConversionError(f"{where}: bad shape {str(shape)[:80]}")
        if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise ConversionError(f"{where}: bad data_offsets {str(offsets)[:80]}")
        itemsize = FLOAT_TYPES[dtype].itemsize if dtype in FLOAT_TYPES else OTHER_TYPES[dtype]
        expected = itemsize
        for dimension in shape:
            expected *= dimension
        if offsets[1] - offsets[0] != expected:
            raise ConversionError(
                f"{where}: {dtype} {shape} needs {expected} bytes, data_offsets span {offsets[1] - offsets[0]}"
            )
        return Entry(TensorInfo(tuple(shape), dtype), data_start + offsets[0])

    def _check_layout(self, data_start: int, size: int) -> None:
        end = data_start
        spans = []
        for name, (info, offset) in self.entries.items():
            itemsize = FLOAT_TYPES[info.dtype].itemsize if info.dtype in FLOAT_TYPES else OTHER_TYPES[info.dtype]
            count = 1
            for dimension in info.shape:
                count *= dimension
            spans.append((offset, offset + count * itemsize, name))
        for begin, stop, name in sorted(spans):
            if begin != end:
                raise ConversionError(
                    f"{self.path}: tensor {name!r} {'overlaps the one before it' if begin < end else 'follows a hole'}"
                )
            end = stop
        if end > size:
            raise ConversionError(f"{self.path}: truncated: the header describes {end} bytes, the file has {size}")
        if end < size:
            raise ConversionError(f"{self.path}: {size - end} bytes follow the last tensor")


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
