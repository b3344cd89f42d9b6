"""Reads registers and stack of compiled kernels out of a `jax.stages.Compiled`, without any CUDA tool.

A serialised executable is a Riegeli file of Snappy-compressed chunks, nested, with ELF images of machine code inside.
Riegeli: github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md. Snappy: its format_description.txt.
"""

import struct
from itertools import pairwise
from typing import NamedTuple

RIEGELI_SIGNATURE = bytes.fromhex("83af70d10d884a3f")
BLOCK, BLOCK_HEADER = 1 << 16, 24
ELF, CUDA_MACHINE = b"\x7fELF\x02\x01\x01", 190
FRAME_SIZE, REGISTER_COUNT = 0x11, 0x2F


class Usage(NamedTuple):
    registers: int
    # Per thread, in bytes; a spilled register lives here.
    stack: int
    code: bytes


def images(executable: bytes) -> list[bytes]:
    """The CUDA ELF images of a serialised executable."""
    found, pending = [], [executable]
    while pending:
        data = pending.pop()
        # The first signature is the outermost file's; compressed data may contain the look of others, and of images.
        start = data.find(RIEGELI_SIGNATURE)
        if start >= 0:
            pending += _chunks(data[start:])
            continue
        starts = [i for i in _find(data, ELF) if struct.unpack_from("<H", data, i + 18)[0] == CUDA_MACHINE]
        found += [data[a:b] for a, b in pairwise([*starts, len(data)])]
    return found


def usage(compiled) -> dict[str, Usage]:
    """Kernel name -> what it uses."""
    kernels = {}
    for image in images(compiled.runtime_executable().serialize()):
        kernels |= _kernels(image)
    return kernels


def _find(data: bytes, what: bytes) -> list[int]:
    at, found = -1, []
    while (at := data.find(what, at + 1)) >= 0:
        found.append(at)
    return found


def _chunks(data: bytes) -> list[bytes]:
    # Block headers interrupt the chunks; without them the file is one run of chunks, the first after the first header.
    data = b"".join(data[i + BLOCK_HEADER : i + BLOCK] for i in range(0, len(data), BLOCK))
    chunks, at = [], 0
    while at + 40 <= len(data):
        # hash, size of the data, its hash, type and number of records, size once decoded
        size, kind_and_records = struct.unpack_from("<8xQ8xQ", data, at)
        body = data[at + 40 : at + 40 + size]
        if len(body) < size:
            break
        if kind_and_records & 0xFF == ord("r") and body[:1] == b"s":
            # compression, size of the compressed record sizes, those, the records: each with its decoded size in front
            sizes, at_sizes = _varint(body, 1)
            _, at_stream = _varint(body, at_sizes + sizes)
            chunks.append(_unsnappy(body, at_stream))
        at += 40 + size
    return chunks


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def _unsnappy(data: bytes, at: int) -> bytes:
    size, at = _varint(data, at)
    out = bytearray()
    while len(out) < size:
        tag, at = data[at], at + 1
        kind, length = tag & 3, tag >> 2
        if kind == 0:
            if length >= 60:
                extra = length - 59
                length, at = int.from_bytes(data[at : at + extra], "little"), at + extra
            out += data[at : at + length + 1]
            at += length + 1
            continue
        if kind == 1:
            offset, length, at = (tag >> 5) << 8 | data[at], (length & 7) + 4, at + 1
        else:
            width = 2 if kind == 2 else 4
            offset, length, at = int.from_bytes(data[at : at + width], "little"), length + 1, at + width
        for _ in range(length):
            out.append(out[-offset])
    return bytes(out)


def _kernels(image: bytes) -> dict[str, Usage]:
    table, count, names_index = *struct.unpack_from("<40xQ", image), *struct.unpack_from("<60xHH", image)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, table + 64 * i) for i in range(count)]
    content = [image[s[4] : s[4] + s[5]] if s[1] != 8 else b"" for s in sections]
    text = lambda strings, at: strings[at : strings.index(b"\0", at)].decode()  # noqa: E731
    names = [text(content[names_index], s[0]) for s in sections]
    symbols = content[names.index(".symtab")]
    strings = content[names.index(".strtab")]
    numbers = {FRAME_SIZE: {}, REGISTER_COUNT: {}}
    info = content[names.index(".nv.info")]
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if attribute in numbers:
            symbol, number = struct.unpack_from("<II", info, at + 4)
            kernel = text(strings, struct.unpack_from("<I", symbols, 24 * symbol)[0])
            numbers[attribute][kernel] = number
        # Only the last form has a payload of its own; in the others the size field is the value.
        at += 4 + (size if form == 4 else 0)
    return {
        name: Usage(
            numbers[REGISTER_COUNT][name], numbers[FRAME_SIZE].get(name, 0), content[names.index(f".text.{name}")]
        )
        for name in (n.removeprefix(".text.") for n in names if n.startswith(".text."))
    }
