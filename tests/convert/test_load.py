"""Loading: device counts, dtypes, EOS ids, and the cache of what `load` converts by itself."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from convert import ConversionError, convert
from jaxspec.checkpoint import load
from tests.convert.gguf_writing import write_gguf

ROOT = Path(__file__).parents[2]

MESH_SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
from convert import convert
from jaxspec.checkpoint import load
from jaxspec.models import init_cache

source, saved_on_one, saved_on_four, results = sys.argv[1:]
assert jax.device_count() == 4
convert(source, saved_on_four, progress=False)
meshes = {
    "model 2": jax.make_mesh((2, 2), ("data", "model")),
    "model 4": jax.make_mesh((4,), ("model",)),
    "last axis 2": jax.make_mesh((2, 2), ("x", "y")),
    "one": jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",)),
}
outputs = {}
for name, mesh in meshes.items():
    model, params, _ = load(saved_on_one, mesh=mesh)
    assert all(len(leaf.sharding.device_set) == mesh.size for leaf in jax.tree.leaves(params))
    shards = {
        "qkv": params["layers_1"]["attention"]["qkv"]["kernel"],
        "bias": params["layers_1"]["attention"]["qkv"]["bias"],
        "out": params["layers_1"]["attention"]["out"]["kernel"],
        "gate_up": params["layers_1"]["mlp"]["gate_up"]["kernel"],
        "down": params["layers_1"]["mlp"]["down"]["kernel"],
        "embedding": params["embedding"],
    }
    for leaf, array in shards.items():
        outputs[f"{name}/{leaf}"] = np.array(array.addressable_shards[0].data.shape)
    cache = init_cache(model.config, 2, 32, jnp.float32)
    tokens = jnp.arange(20, dtype=jnp.int32).reshape(2, 10)
    out = jax.jit(model.apply)({"params": params}, tokens, cache, jnp.zeros(2, jnp.int32))
    outputs[f"{name}/logits"] = np.asarray(out.logits)
np.savez(results, **outputs)
"""


@pytest.fixture
def converted(tiny, tmp_path):
    directory, _ = tiny("qwen2")
    convert(directory, tmp_path / "converted", progress=False)
    return tmp_path / "converted"


def test_other_device_counts(converted, tiny, tmp_path):
    """Saved on one device, restored on one to four, and the other way round: equal logits, split as documented."""
    import jax.numpy as jnp

    from jaxspec.models import init_cache

    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    arguments = [tiny("qwen2")[0], converted, tmp_path / "four", tmp_path / "results.npz"]
    command = [sys.executable, "-c", textwrap.dedent(MESH_SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    results = np.load(tmp_path / "results.npz")
    expected_params = load(converted).params
    model, params, _ = load(tmp_path / "four")
    jax.tree.map(np.testing.assert_array_equal, params, expected_params)
    cache = init_cache(model.config, 2, 32, jnp.float32)
    tokens = jnp.arange(20, dtype=jnp.int32).reshape(2, 10)
    logits = model.apply({"params": params}, tokens, cache, jnp.zeros(2, jnp.int32)).logits
    for name in ("model 2", "model 4", "last axis 2", "one"):
        np.testing.assert_allclose(results[f"{name}/logits"], logits, atol=1e-4, rtol=0)
    # D 48, K 2, G + 2 = 5, H 8, N 6, F 80
    whole = {"qkv": (48, 2, 5, 8), "bias": (2, 5, 8), "out": (6, 8, 48), "gate_up": (48, 2, 80), "down": (80, 48)}
    halves = {"qkv": (48, 1, 5, 8), "bias": (1, 5, 8), "out": (3, 8, 48), "gate_up": (48, 2, 40), "down": (40, 48)}
    # two kv heads do not split into four, the 80 columns do
    quarters = whole | {"gate_up": (48, 2, 20), "down": (20, 48)}
    for name, shapes in (("model 2", halves), ("last axis 2", halves), ("model 4", quarters), ("one", whole)):
        for leaf, shape in (shapes | {"embedding": (384, 48)}).items():
            assert tuple(results[f"{name}/{leaf}"]) == shape, (name, leaf)


def test_mesh_of_one_device(converted):
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    jax.tree.map(np.testing.assert_array_equal, load(converted, mesh=mesh).params, load(converted).params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype(dtype, converted):
    stored = load(converted).params
    params = load(converted, dtype=dtype).params
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {dtype}
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(dtype)), params, stored)


@pytest.mark.parametrize("dtype", ["int8", "float64", "half-float", 3])
def test_unsupported_dtype(dtype, converted):
    with pytest.raises(ConversionError, match="is not supported; supported: float32, bfloat16, float16"):
        load(converted, dtype=dtype)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (1, None, (1,)),
        (5, {"eos_token_id": 7}, (1, 5, 7)),
        ([5, 6], {"eos_token_id": [7, 8]}, (1, 5, 6, 7, 8)),
        (None, {"eos_token_id": [9]}, (1, 9)),
        (None, None, (1,)),
        (None, {}, (1,)),
        ([5, -1, 384, 10**6], None, (1, 5)),  # ids that the model cannot emit
    ],
)
def test_eos_ids_are_the_union(config, generation, expected, tiny, tmp_path):
    """The tokenizer's own is 1."""
    directory = shutil.copytree(tiny("qwen2")[0], tmp_path / "model")
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(content | {"eos_token_id": config}))
    (directory / "generation_config.json").unlink()
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    convert(directory, tmp_path / "out", progress=False)
    loaded = load(tmp_path / "out")
    assert loaded.eos_ids == expected
    assert loaded.generation_config == (generation or {})


def test_model_without_any_eos(tiny, tmp_path):
    directory = shutil.copytree(tiny("qwen2")[0], tmp_path / "model")
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(content | {"eos_token_id": None}))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    convert(directory, tmp_path / "out", progress=False)
    assert load(tmp_path / "out").eos_ids == ()


def test_report(converted, tiny):
    import hashlib

    directory, _ = tiny("qwen2")
    report = json.loads((converted / "report.json").read_text())
    weights = (directory / "model.safetensors").read_bytes()
    assert report["sha256"]["model.safetensors"] == hashlib.sha256(weights).hexdigest()
    assert report["sha256"].keys() >= {"config.json", "tokenizer.json"}
    assert report["source"] == {"kind": "safetensors", "origin": str(directory)}
    assert (report["num_tensors"], report["num_leaves"], report["dtype"]) == (27, 17, "float32")
    assert report["num_parameters"] == sum(x.size for x in jax.tree.leaves(load(converted).params))


def test_tokenizer_is_the_sources(converted, tiny):
    from transformers import AutoTokenizer

    text = "Measured on 12 March, 14:07.\n\n  Wind: 121 km/h"
    expected = AutoTokenizer.from_pretrained(tiny("qwen2")[0])
    _, _, tokenizer = load(converted)
    assert tokenizer(text).input_ids == expected(text).input_ids
    assert tokenizer.eos_token_id == expected.eos_token_id


def test_damaged_tokenizer_of_a_checkpoint(converted):
    path = converted / "tokenizer" / "tokenizer.json"
    path.write_bytes(b" " * path.stat().st_size)
    with pytest.raises(ConversionError, match="tokenizer cannot be loaded"):
        load(converted)


class TestCache:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path, monkeypatch):
        self.root = tmp_path / "cache"
        monkeypatch.setenv("JAXSPEC_CACHE", str(self.root))

    def entries(self):
        return sorted(path.name for path in self.root.iterdir())

    @pytest.mark.parametrize("kind", ["directory", "gguf"])
    def test_sources_are_converted_once(self, kind, tiny, tmp_path, monkeypatch):
        source, _ = tiny("llama")
        if kind == "gguf":
            write_gguf(tmp_path / "m.gguf", source)
            source = tmp_path / "m.gguf"
        first = load(source)
        (entry,) = self.entries()
        assert entry.startswith(f"{source.name}-float32-")
        monkeypatch.setattr("convert.writer._convert", None)  # a second conversion would raise
        second = load(str(source))
        jax.tree.map(np.testing.assert_array_equal, first.params, second.params)
        assert second.tokenizer("a b").input_ids == first.tokenizer("a b").input_ids

    def test_each_dtype_is_converted_from_the_source(self, tiny):
        source, _ = tiny("llama")
        load(source, dtype="bfloat16")
        exact = load(source).params["embedding"]
        assert exact.dtype == "float32"
        assert (exact != exact.astype("bfloat16").astype("float32")).any()
        assert len(self.entries()) == 2

    def test_changed_files_are_converted_again(self, tiny, tmp_path):
        source = shutil.copytree(tiny("llama")[0], tmp_path / "model")
        assert load(source).config.rms_norm_eps != 0.01
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.01}))
        assert load(source).config.rms_norm_eps == 0.01
        assert len(self.entries()) == 2

    def test_interrupted_conversions_are_made_good(self, tiny):
        source, _ = tiny("llama")
        load(source)
        (entry,) = self.entries()
        (self.root / entry / "report.json").unlink()
        load(source)
        assert self.entries() == [entry]

    def test_two_at_once_convert_once(self, tiny, monkeypatch):
        from convert import writer

        source, _ = tiny("llama")
        original, calls = writer._convert, []

        def counted(*args, **kwargs):
            calls.append(1)
            return original(*args, **kwargs)

        monkeypatch.setattr(writer, "_convert", counted)
        embeddings = []
        threads = [threading.Thread(target=lambda: embeddings.append(load(source).params["embedding"])) for _ in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(calls) == 1
        np.testing.assert_array_equal(*embeddings)
        assert len(self.entries()) == 1

    def test_default_places(self, monkeypatch):
        from jaxspec.checkpoint import cache_directory

        assert cache_directory() == self.root
        monkeypatch.delenv("JAXSPEC_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
        assert cache_directory() == Path("/somewhere/jaxspec")
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert cache_directory() == Path.home() / ".cache" / "jaxspec"

    def test_what_cannot_be_converted_leaves_nothing(self, tiny, tmp_path):
        source = shutil.copytree(tiny("llama")[0], tmp_path / "model")
        (source / "model.safetensors").write_bytes(b"")
        with pytest.raises(ConversionError, match="truncated"):
            load(source)
        assert not self.root.exists() or not self.entries()
