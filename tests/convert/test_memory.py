"""Peak memory of a conversion: a few leaves, not the model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[2]

# prints the peak resident megabytes before and after; the imports' own share belongs to neither side
MEASURE = """
import sys
import jax, orbax.checkpoint, tensorstore
from convert import convert

def peak():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024

before = peak()
report = convert(sys.argv[1], sys.argv[2], progress=False)
print(before, peak(), report.num_parameters * 2 / 2**20)
"""


def measure(source, destination):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", MEASURE, str(source), str(destination)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return map(float, done.stdout.split())


@pytest.fixture
def wide(tmp_path):
    """A Llama of 24 layers and more than 600 MB in bfloat16, whose largest leaf has 12 MB."""
    import ml_dtypes

    hidden, inner, layers, vocab = 1024, 3072, 24, 512
    shapes = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    shapes |= {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    one = np.random.default_rng(0).normal(size=inner * hidden).astype(ml_dtypes.bfloat16)
    tensors = {
        f"model.layers.{i}.{n}.weight": one[: np.prod(s)].reshape(s) for i in range(layers) for n, s in shapes.items()
    }
    for name, shape in (
        ("model.embed_tokens", (vocab, hidden)),
        ("lm_head", (vocab, hidden)),
        ("model.norm", (hidden,)),
    ):
        tensors[f"{name}.weight"] = one[: np.prod(shape)].reshape(shape)
    directory = tmp_path / "wide"
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    config = {"model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    config |= {"num_attention_heads": 16, "vocab_size": vocab, "max_position_embeddings": 512}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_leaves_are_written_one_by_one(wide, tmp_path):
    before, after, size = measure(wide, tmp_path / "out")
    assert size > 600
    assert after - before < size / 2


@pytest.mark.weights
def test_real_model(gguf_weights, tmp_path):
    """At most the model's size in the target dtype plus 1 GB; in fact far less than the model."""
    before, after, size = measure(gguf_weights("qwen-1.5b.gguf"), tmp_path / "out")
    assert after < size + 1024
    assert after - before < 1024 < size
