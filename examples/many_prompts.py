"""Continues every file in a folder, eight at a time: a file that is done makes room for the next.

python examples/many_prompts.py checkpoints/smollm2 docs
"""

import sys
from pathlib import Path

import jax

import jaxspec


def main(path: str, folder: str, batch: int = 8, max_tokens: int = 1000, new_tokens: int = 64) -> None:
    """Prints each file's continuation as it ends."""
    model, params, tokenizer = loaded = jaxspec.load(path)
    files = sorted(file for file in Path(folder).iterdir() if file.is_file())
    prompts = [
        tokenizer(file.read_text(encoding="utf-8", errors="replace"))["input_ids"][:max_tokens] for file in files
    ]
    options = {"batch": batch, "method": jaxspec.Vegas(), "max_new_tokens": new_tokens, "eos_ids": loaded.eos_ids}
    for completion in jaxspec.generate_many(model, params, prompts, jax.random.key(0), **options):
        print(f"{files[completion.index].name}: {tokenizer.decode(completion.tokens, skip_special_tokens=True)!r}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
