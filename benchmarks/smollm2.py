"""A real checkpoint, greedy: jaxspec and transformers with the same weights, prompts and lengths, in turn.

    python benchmarks/smollm2.py checkpoints/smollm2.gguf --json smollm2.json

On a CPU both compute in float32 with all cores, on a GPU in bfloat16; transformers runs its default cache, and on a GPU
also its static cache under torch.compile.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np
import torch
import transformers

import jaxspec
from convert.sources import open_source


def main() -> None:
    """Times each contestant in turn, several times over, and prints medians and spreads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf")
    parser.add_argument("--prompt-tokens", type=int, nargs="*", default=[128, 2048])
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    dtype = "bfloat16" if on_gpu else "float32"
    loaded = jaxspec.load(args.gguf, dtype=dtype)
    reference = torch_model(args.gguf, getattr(torch, dtype)).to("cuda" if on_gpu else "cpu")
    rows = []
    for batch in args.batch:
        for length in args.prompt_tokens:
            prompt = np.random.default_rng(0).integers(10, loaded.config.vocab_size, (batch, length))
            contestants = {
                "jaxspec": functools.partial(run_jaxspec, loaded, prompt),
                "transformers": functools.partial(run_transformers, reference, prompt, {}),
            }
            if on_gpu:
                static = {"cache_implementation": "static"}
                contestants["transformers, compiled"] = functools.partial(run_transformers, reference, prompt, static)
            rows += measure(contestants, batch, length, args.new_tokens, args.repeats)
    if args.json:
        record = {
            "command": " ".join(["python", *sys.argv]),
            "device": jax.devices()[0].device_kind,
            "cores": os.cpu_count(),
            "jax": jax.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "dtype": dtype,
            "rows": rows,
        }
        args.json.write_text(json.dumps(record, indent=1))


def torch_model(gguf: str, dtype: torch.dtype) -> torch.nn.Module:
    """The transformers model of a GGUF file, from the weights that the converter dequantises."""
    source = open_source(gguf)
    config = transformers.AutoConfig.for_model(**source.config)
    weights = {name: torch.tensor(source.read(name, np.dtype("float32"))).to(dtype) for name in source.tensors}
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(weights, strict=not config.tie_word_embeddings)
    model.tie_weights()
    return model.eval()


def run_jaxspec(loaded: jaxspec.checkpoint.Loaded, prompt: np.ndarray, new_tokens: int) -> None:
    """One call of `generate`, waited for."""
    lengths = np.full(len(prompt), prompt.shape[1])
    output = jaxspec.generate(
        loaded.model, loaded.params, prompt, lengths, jax.random.key(0), max_new_tokens=new_tokens
    )
    jax.block_until_ready(output.tokens)


def run_transformers(model: torch.nn.Module, prompt: np.ndarray, options: dict, new_tokens: int) -> None:
    """One call of transformers' `generate`, waited for."""
    ids = torch.tensor(prompt, device=model.device)
    mask = torch.ones_like(ids)
    with torch.inference_mode():
        tokens = model.generate(
            ids, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, **options
        )
    tokens.cpu()


def measure(contestants: dict, batch: int, length: int, new_tokens: int, repeats: int) -> list[dict]:
    """Medians over `repeats` of the time per step, from the difference of a short and a long generation."""
    short = 4
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats + 1):
        for name, run in contestants.items():
            marks = []
            for count in (short, short + new_tokens):
                started = time.perf_counter()
                run(new_tokens=count)
                marks.append(time.perf_counter() - started)
            if repeat:  # the first round compiles and warms up
                times[name].append((marks[1] - marks[0]) / new_tokens)
    rows = []
    for name, values in times.items():
        median = statistics.median(values)
        row = {"contestant": name, "batch": batch, "prompt_tokens": length, "seconds_per_step": median}
        rows.append(row | {"all": values})
        print(
            f"batch {batch:<3} prompt {length:<6} {name:24} {median * 1e3:8.2f} ms a step "
            f"({min(values) * 1e3:.2f}-{max(values) * 1e3:.2f})  {batch / median:8.1f} tokens/s",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    main()
