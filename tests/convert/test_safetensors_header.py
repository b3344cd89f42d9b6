"""safetensors: what the library writes is read alike, and damage is refused in bounded memory."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from convert import ConversionError
from convert.dtypes import DTYPES
from convert.safetensors_file import SafetensorsFile
from tests.convert.damage import ROUNDS, bounded, mutated

FLOAT32 = DTYPES["float32"]


@pytest.fixture
def weights():
    rng = np.random.default_rng(0)
    return {
        "b": rng.normal(size=(3, 5)).astype(ml_dtypes.bfloat16),
        "a": rng.normal(size=(7,)).astype(np.float32),
        "c": rng.normal(size=(2, 2, 3)).astype(np.float16),
        "d": rng.normal(size=(4, 1)),
    }


@pytest.fixture
def safetensors(weights, tmp_path):
    save_file(weights, tmp_path / "a.safetensors", metadata={"format": "pt"})
    return tmp_path / "a.safetensors"


def with_header(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_safetensors_values(weights, safetensors):
    file = SafetensorsFile(safetensors)
    assert file.entries.keys() == weights.keys()
    for name, values in weights.items():
        np.testing.assert_array_equal(file.read(name, FLOAT32), values.astype(np.float32))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry(offsets=(0, 4))}, "needs 8 bytes, data_offsets span 4"),
        ({"a": entry(offsets=(8, 0))}, "bad data_offsets"),
        ({"a": entry(offsets=(-8, 0))}, "bad data_offsets"),
        ({"a": entry(offsets=(0.0, 8))}, "bad data_offsets"),
        ({"a": entry(offsets=(0, 8, 8))}, "bad data_offsets"),
        ({"a": entry(shape=(-2,))}, "bad shape"),
        ({"a": entry(shape=(True, 2))}, "bad shape"),
        ({"a": entry(shape=(1,) * 9)}, "bad shape"),
        ({"a": entry(shape=(2**62, 4), offsets=(0, 0))}, "needs"),
        ({"a": entry(dtype="F31")}, "unknown dtype 'F31'"),
        ({"a": entry(dtype=None)}, "unknown dtype"),
        ({"a": entry() | {"more": 1}}, "expected dtype, shape and data_offsets"),
        ({"a": [1]}, "expected dtype, shape and data_offsets"),
        ({"a": entry(offsets=(8, 16))}, "'a' follows a hole"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, "'b' overlaps the one before it"),
        ({"a": entry(), "b": entry(offsets=(0, 8))}, "'b' overlaps the one before it"),
        ({"a": entry(), "b": entry(offsets=(8, 16)), "c": entry(offsets=(16, 24))}, "truncated"),
        ({"a": entry()}, "8 bytes follow the last tensor"),
        (b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2), "stated twice: ['a']"),
        (b"[]", "expected a JSON object"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 50_000, "nested too deeply"),
    ],
)
def test_safetensors_headers_that_are_refused(header, message, tmp_path):
    path = with_header(tmp_path / "a.safetensors", header, b"\0" * 16)
    with bounded(), pytest.raises(ConversionError) as caught:
        SafetensorsFile(path)
    assert message in str(caught.value)
    assert "a.safetensors" in str(caught.value)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, 1000])
def test_safetensors_header_length_is_not_believed(length, tmp_path):
    path = with_header(tmp_path / "a.safetensors", {"a": entry()}, b"\0" * 8, length)
    with bounded(), pytest.raises(ConversionError, match="truncated: header of"):
        SafetensorsFile(path)


def test_safetensors_huge_header_in_a_huge_file(tmp_path):
    path = with_header(tmp_path / "a.safetensors", b"{", length=1 << 40)
    with path.open("r+b") as file:
        file.truncate(1 << 41)  # sparse
    with bounded(), pytest.raises(ConversionError, match="over the limit"):
        SafetensorsFile(path)


def test_safetensors_fuzz(safetensors):
    """Whatever we accept, the safetensors library accepts as well and reads alike; whatever we refuse, we name."""
    original, rng = safetensors.read_bytes(), np.random.default_rng(1)
    (length,) = struct.unpack("<Q", original[:8])
    accepted = 0
    with bounded():
        for _ in range(ROUNDS):
            safetensors.write_bytes(mutated(original, 8 + length, rng))
            try:
                file = SafetensorsFile(safetensors)
                values = {n: file.read(n, FLOAT32) for n in file.entries if file.entries[n].info.dtype[0] in "FB"}
            except ConversionError:
                continue
            accepted += 1
            with safe_open(safetensors, "np") as other:
                assert set(other.keys()) == file.entries.keys()
                for name, array in values.items():
                    np.testing.assert_array_equal(array, np.asarray(other.get_tensor(name), np.float32))
    assert 0 < accepted < ROUNDS / 2


def test_the_safetensors_library_refuses_no_more_than_we_do(safetensors):
    original, rng = safetensors.read_bytes(), np.random.default_rng(2)
    refused = 0
    for _ in range(ROUNDS // 3):
        safetensors.write_bytes(mutated(original, 40, rng))
        try:
            with safe_open(safetensors, "np"):
                continue
        except SafetensorError:
            refused += 1
            with pytest.raises(ConversionError):
                SafetensorsFile(safetensors)
    assert refused > 50
