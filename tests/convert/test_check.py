"""The comparison with transformers: it passes on sound conversions and fails on every kind of wrong one."""

import json
import shutil

import numpy as np
import pytest

from convert import ConversionError, convert
from convert.check import NUM_TOKENS, CheckFailed, CheckRow, print_table
from convert.check_text import CHECK_TEXT
from jaxspec.checkpoint import is_checkpoint
from tests.convert.gguf_writing import write_gguf

LONG = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG["original_max_position_embeddings"] = 8192


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("qwen2", "bfloat16"), ("qwen3", "float16")])
def test_sound_conversions_pass(family, dtype, tiny, tmp_path):
    report = convert(tiny(family)[0], tmp_path / "out", dtype=dtype, check=True, progress=False)
    rows = {row.name: row for row in report.check}
    assert all(row.passed for row in rows.values())
    full = rows[f"full forward, {NUM_TOKENS} tokens"]
    assert NUM_TOKENS >= 500
    assert 0 <= full.max_abs <= full.limit
    assert full.top1 == 1
    assert {"cached decoding, last 32 tokens", "EOS ids", "rope table at position 1000"} <= rows.keys()
    stored = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [row["name"] for row in stored["check"]] == list(rows)
    assert any("transformers" in line for line in stored["checks"])


@pytest.mark.parametrize(
    "scaling",
    [
        LONG,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {"rope_type": "linear", "factor": 4.0},
    ],
)
def test_long_positions(scaling, tiny, tmp_path):
    directory, _ = tiny("llama", max_position_embeddings=131072, rope_scaling=scaling, rope_theta=500000.0, head_dim=64)
    report = convert(directory, tmp_path / "out", check=True, progress=False)
    positions = [row.name for row in report.check if row.name.startswith("rope table")]
    assert positions == [f"rope table at position {p}" for p in (0, 1000, 8000, 60000, 130000, 131071)]


def test_gguf(tiny, tmp_path):
    directory, _ = tiny("llama", hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16)
    write_gguf(tmp_path / "model.gguf", directory, "Q8_0")
    report = convert(tmp_path / "model.gguf", tmp_path / "out", check=True, progress=False)
    assert report.dtype == "bfloat16"
    assert all(row.passed for row in report.check)


def test_model_without_tokenizer(tiny, tmp_path):
    directory = shutil.copytree(tiny("llama")[0], tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    report = convert(directory, tmp_path / "out", check=True, progress=False)
    assert report.check[0].note.startswith("none")


def swap_gate_and_up(leaf):
    return leaf[:, ::-1] if leaf.ndim == 3 and leaf.shape[1] == 2 and leaf.shape[2] == 80 else leaf


def forget_rope_order(leaf):
    return leaf.swapaxes(-1, -1).reshape(leaf.shape) if leaf.ndim != 4 else np.roll(leaf, 1, axis=-1)


def drop_bias(leaf):
    return leaf * 0 if leaf.shape == (2, 5, 8) else leaf


def scale_norm(leaf):
    return leaf * 1.001 if leaf.ndim == 1 else leaf


@pytest.mark.parametrize("damage", [swap_gate_and_up, forget_rope_order, drop_bias, scale_norm])
def test_wrong_weights_fail(damage, tiny, tmp_path, monkeypatch):
    from convert import writer

    original = writer._build
    monkeypatch.setattr(writer, "_build", lambda *args: np.ascontiguousarray(damage(original(*args)), args[2]))
    with pytest.raises(CheckFailed, match="differs from transformers: full forward") as caught:
        convert(tiny("qwen2")[0], tmp_path / "out", check=True, progress=False)
    failed = [row.name for row in caught.value.rows if not row.passed]
    assert len(failed) == 2  # logits with and without cache; rope tables and tokens are sound
    assert not list(tmp_path.iterdir())


def test_wrong_rope_fails(tiny, tmp_path, monkeypatch):
    """Scaling that is off by a tenth in the slow frequencies."""
    import jaxspec.models.rope as rope

    original = rope._llama3
    directory, _ = tiny("llama", max_position_embeddings=131072, rope_scaling=LONG, rope_theta=500000.0, head_dim=64)

    def slightly_wrong(inv_freq, config):
        scaled = original(inv_freq, config)
        return np.where(inv_freq < 1e-4, scaled * 1.1, scaled)

    monkeypatch.setattr(rope, "_llama3", slightly_wrong)
    with pytest.raises(CheckFailed) as caught:
        convert(directory, tmp_path / "out", check=True, progress=False)
    failed = [row.name for row in caught.value.rows if not row.passed]
    assert "rope frequencies, relative" in failed
    assert "rope table at position 130000" in failed


def test_wrong_eos_ids_fail(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxspec.checkpoint.token_ids", lambda *args: {7})
    with pytest.raises(CheckFailed, match="EOS ids"):
        convert(tiny("llama")[0], tmp_path / "out", check=True, progress=False)


def test_wrong_tokenizer_fails(tiny, tmp_path, monkeypatch):
    from convert.hf_directory import HFDirectory

    original = HFDirectory.write_tokenizer

    def without_first_merges(self, directory):
        names = original(self, directory)
        content = json.loads((directory / "tokenizer.json").read_text())
        content["model"]["merges"] = content["model"]["merges"][20:]
        (directory / "tokenizer.json").write_text(json.dumps(content))
        return names

    monkeypatch.setattr(HFDirectory, "write_tokenizer", without_first_merges)
    with pytest.raises(CheckFailed, match="tokenizer: ids of the text"):
        convert(tiny("llama")[0], tmp_path / "out", check=True, progress=False)


def test_failed_check_keeps_the_old_checkpoint(tiny, tmp_path, monkeypatch):
    directory, _ = tiny("llama")
    convert(directory, tmp_path / "out", progress=False)
    monkeypatch.setattr("convert.check.LOGIT_TOLERANCE", 0.0)
    monkeypatch.setattr("convert.check.KL_TOLERANCE", -1.0)
    with pytest.raises(ConversionError):
        convert(directory, tmp_path / "out", dtype="bfloat16", overwrite=True, check=True, progress=False)
    assert is_checkpoint(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "report.json").read_text())["dtype"] == "float32"


def test_table(capsys):
    rows = [CheckRow("full forward", True, 1.25e-5, 1e-3, 3e-9, 1.0), CheckRow("EOS ids", False, note="[1] and [2]")]
    print_table(rows)
    printed = capsys.readouterr().out
    for part in ("max abs", "KL", "top-1", "1.25e-05", "1.00e-03", "3.00e-09", "100.00%", "FAILED: [1] and [2]"):
        assert part in printed


@pytest.mark.weights
def test_text_has_at_least_500_tokens(gguf_weights):
    from convert.gguf_file import GGUFFile
    from convert.gguf_tokenizer import build_tokenizer

    for name in ("smollm2.gguf", "qwen-0.5b.gguf"):
        assert len(build_tokenizer(GGUFFile(gguf_weights(name))).encode(CHECK_TEXT).ids) >= NUM_TOKENS


@pytest.mark.weights
def test_smollm2(gguf_weights, tmp_path):
    report = convert(gguf_weights("smollm2.gguf"), tmp_path / "out", check=True, progress=False)
    assert all(row.passed and (row.top1 is None or row.top1 == 1) for row in report.check)
