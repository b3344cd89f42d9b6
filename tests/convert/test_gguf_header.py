"""GGUF: what the library writes is read alike, and damage is refused in bounded memory."""

import struct

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from convert import ConversionError
from convert.dtypes import DTYPES
from convert.gguf_file import BLOCK_TYPES, GGUFFile
from tests.convert.damage import ROUNDS, bounded, mutated

FLOAT32 = DTYPES["float32"]


def gguf_file(path, tensors, **values):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b", "é"])
    writer.add_token_types([1, 1, 3])
    writer.add_key_value("flag", True, gguf.GGUFValueType.BOOL)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def small_gguf(tmp_path):
    rng = np.random.default_rng(0)
    plain = rng.normal(size=(3, 32)).astype(np.float32)
    blocks = quantize(plain, gguf.GGMLQuantizationType.Q8_0)
    tensors = {"a": (plain, None), "b": (blocks, gguf.GGMLQuantizationType.Q8_0), "c": (plain[0], None)}
    return gguf_file(tmp_path / "a.gguf", tensors)


def test_gguf_metadata_equals_the_librarys(small_gguf):
    ours, theirs = GGUFFile(small_gguf), gguf.GGUFReader(small_gguf)
    expected = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == expected
    assert {n: (t.dtype, t.offset, t.num_bytes) for n, t in ours.tensors.items()} == {
        t.name: (t.tensor_type.name, t.data_offset, t.n_bytes) for t in theirs.tensors
    }


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *BLOCK_TYPES])
def test_gguf_values_of_every_type(kind, tmp_path, monkeypatch):
    quantization = gguf.GGMLQuantizationType[kind]
    rng = np.random.default_rng(0)
    if kind.endswith("_K"):  # the library decodes them only: random blocks whose scales are finite
        _, size = gguf.GGML_QUANT_SIZES[quantization]
        raw = rng.integers(0, 256, (13, 3, size), dtype=np.uint8)
        at = {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}[kind]
        for position in at:
            raw[..., position : position + 2] = np.float16(0.01).tobytes()[0], np.float16(0.01).tobytes()[1]
        raw = raw.reshape(13, -1)
    else:
        raw = quantize(rng.normal(size=(13, 768)).astype(np.float32), quantization)
    path = gguf_file(tmp_path / "a.gguf", {"w": (raw, None if kind in ("F32", "F16") else quantization)})
    # chunks of two rows and a rest of one
    monkeypatch.setattr("convert.gguf_file.CHUNK_ELEMENTS", 1700)
    values = GGUFFile(path).read("w", FLOAT32)
    assert values.shape == (13, 768)
    assert values.std() > 0
    (tensor,) = gguf.GGUFReader(path).tensors
    np.testing.assert_array_equal(values, dequantize(tensor.data, quantization))


@pytest.mark.parametrize("kind", ["IQ4_XS", "IQ2_XXS", "TQ1_0", "MXFP4", "I8", "F64"])
def test_gguf_types_that_are_refused_are_named(kind, tmp_path):
    quantization = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quantization]
    raw = np.zeros((2, 256 // block * size), np.uint8)
    path = tmp_path / "a.gguf"
    if kind in ("I8", "F64"):
        gguf_file(path, {"w": (np.zeros((2, 256), kind[0].lower() + str(int(kind[1:]) // 8)), None)})
    else:
        gguf_file(path, {"w": (raw, quantization)})
    with pytest.raises(ConversionError, match=f"tensor 'w' has type {kind}; supported: F32, F16"):
        GGUFFile(path)


def header(version=3, tensors=0, values=0, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + rest


def text(value: bytes):
    return struct.pack("<Q", len(value)) + value


def tensor(name=b"w", dims=(32,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a GGUF file"),
        (b"GGU", "not a GGUF file"),
        (b"FUGG" + header()[4:], "big-endian"),
        (header(version=1), "version 1 is not supported"),
        (header(version=0x03000000), "version"),
        (header(tensors=2**63), "over the limit"),
        (header(values=2**40), "over the limit"),
        (header(values=90_000), "truncated"),
        (header(values=1, rest=struct.pack("<Q", 2**63)), "string of"),
        (header(values=1, rest=struct.pack("<Q", 600) + b"a"), "600 more bytes expected, 1 left"),
        (header(values=1, rest=text(b"\xff") + struct.pack("<IB", 0, 0)), "not UTF-8"),
        (header(values=1, rest=text(b"a") + struct.pack("<IQ", 13, 0)), "unknown value type 13"),
        (header(values=1, rest=text(b"a") + struct.pack("<IB", 7, 2)), "boolean with value 2"),
        (header(values=1, rest=text(b"a") + struct.pack("<IIQ", 9, 8, 2**60)), "array of"),
        (header(values=1, rest=text(b"a") + struct.pack("<IIQ", 9, 8, 10**6)), "array of 1000000 strings"),
        (header(values=1, rest=text(b"a") + struct.pack("<IIQ", 9, 12, 10**6)), "8000000 more bytes expected"),
        (header(values=1, rest=text(b"a") + struct.pack("<IIQIQ", 9, 9, 1, 9, 1)), "arrays of value type 9"),
        (header(values=2, rest=(text(b"a") + struct.pack("<IB", 0, 0)) * 2), "'a' is stated twice"),
        (header(values=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 24)), "bad general.alignment"),
        (header(values=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 0)), "bad general.alignment"),
        (header(tensors=1, rest=tensor(dims=())), "0 dimensions"),
        (header(tensors=1, rest=tensor(dims=(1,) * 5)), "5 dimensions"),
        (header(tensors=1, rest=tensor(dims=(0, 2))), "has dimensions"),
        (header(tensors=1, rest=tensor(dims=(2**63, 2))), "has dimensions"),
        (header(tensors=1, rest=tensor(dims=(2**39, 2**39, 2**39))), "truncated"),
        (header(tensors=1, rest=tensor(kind=99)), "type number 99"),
        (header(tensors=1, rest=tensor(kind=2, dims=(33,))), "rows of 33 do not divide into Q4_0 blocks of 32"),
        (header(tensors=1, rest=tensor(offset=8)), "offset 8 is not a multiple of 32"),
        (header(tensors=1, rest=tensor(offset=2**63)), "truncated"),
        (header(tensors=1, rest=tensor()), "truncated"),
        (header(tensors=2, rest=tensor() * 2 + bytes(200)), "duplicate tensor w"),
        (header(tensors=2, rest=tensor() + tensor(b"v", offset=128) + bytes(300)), None),
        (header(tensors=2, rest=tensor() + tensor(b"v", offset=128) + bytes(200)), "truncated"),
        (header(tensors=2, rest=tensor() + tensor(b"v", offset=64) + bytes(300)), "tensors 'w' and 'v' overlap"),
    ],
)
def test_gguf_headers_that_are_refused(data, message, tmp_path):
    (tmp_path / "a.gguf").write_bytes(data)
    if message is None:  # the sound sibling of the lines after it, with a hole that alignment allows
        assert GGUFFile(tmp_path / "a.gguf").tensors.keys() == {"w", "v"}
        return
    with bounded(), pytest.raises(ConversionError) as caught:
        GGUFFile(tmp_path / "a.gguf")
    assert message in str(caught.value)
    assert "a.gguf" in str(caught.value)


def test_gguf_fuzz(small_gguf):
    """A damaged header is refused, or read as the library reads it."""
    original, rng = small_gguf.read_bytes(), np.random.default_rng(3)
    header_size = min(t.offset for t in GGUFFile(small_gguf).tensors.values())
    accepted = 0
    with bounded():
        for _ in range(ROUNDS):
            small_gguf.write_bytes(mutated(original, header_size, rng))
            try:
                file = GGUFFile(small_gguf)
                values = {name: file.read(name, FLOAT32) for name in file.tensors}
            except ConversionError:
                continue
            accepted += 1
            others = {t.name: t for t in gguf.GGUFReader(small_gguf).tensors}
            assert others.keys() == file.tensors.keys()
            for name, array in values.items():
                expected = dequantize(others[name].data, others[name].tensor_type)
                np.testing.assert_array_equal(array, expected.reshape(array.shape))
    assert 0 < accepted < ROUNDS / 2


@pytest.mark.parametrize("cut", [1, 40, 600])
def test_gguf_truncated_data(cut, small_gguf):
    last = max(t.offset + t.num_bytes for t in GGUFFile(small_gguf).tensors.values())
    small_gguf.write_bytes(small_gguf.read_bytes()[: last - cut])
    with pytest.raises(ConversionError, match=r"truncated"):
        GGUFFile(small_gguf)
