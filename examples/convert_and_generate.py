"""Convert a checkpoint, load it, generate from a batch of prompts.

python examples/convert_and_generate.py [SOURCE]    # a Hugging Face directory, hub id or GGUF file; else a tiny one
"""

import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

import jaxspec
from convert import convert
from jaxspec.models import config_from_hf, leaf_sources

PROMPTS = ["The capital of France is", "Water boils at"]


def write_tiny_checkpoint(directory: Path) -> None:
    """A Llama with random weights and no tokenizer, as Hugging Face stores it."""
    from safetensors.numpy import save_file

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    hf = {"model_type": "llama", **sizes, "num_attention_heads": 4, "max_position_embeddings": 512}
    (directory / "config.json").write_text(json.dumps(hf))
    rng, tensors = np.random.default_rng(0), {}
    for source in leaf_sources(config_from_hf(hf)).values():
        for name, shape in zip(source.names, source.shapes, strict=True):
            tensors[name] = rng.normal(0, 0.3, shape).astype(np.float32)
    save_file(tensors, directory / "model.safetensors")


def main(source: str | Path | None = None) -> None:
    """Runs the three steps in a temporary directory."""
    with tempfile.TemporaryDirectory() as work:
        if source is None:
            source = Path(work) / "tiny"
            source.mkdir()
            write_tiny_checkpoint(source)
        report = convert(source, Path(work) / "converted", progress=False)
        print(f"{report.num_parameters:,} parameters of a {report.model_type} in {report.dtype}")
        loaded = jaxspec.load(Path(work) / "converted")

    model, params, tokenizer = loaded
    rows = [tokenizer(p)["input_ids"] for p in PROMPTS] if tokenizer else [[1, 2, 3, 4, 5], [6, 7]]
    # ragged prompts are padded on the right; what the padding holds does not matter
    lengths = np.array([len(row) for row in rows])
    prompts = np.stack([np.pad(row, (0, lengths.max() - len(row))) for row in rows])
    output = jaxspec.generate(
        model, params, prompts, lengths, jax.random.key(0), max_new_tokens=24, eos_ids=loaded.eos_ids
    )
    for row, length in zip(output.tokens, output.lengths, strict=True):
        ids = row[:length].tolist()
        print(tokenizer.decode(ids, skip_special_tokens=True) if tokenizer else ids)


if __name__ == "__main__":
    main(*sys.argv[1:])
