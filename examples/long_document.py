"""Asks a question about a long document with every lossless method: the answer, and what each method costs.

python examples/long_document.py checkpoints/smollm2 docs/methods.md "How does Vegas choose the rows it reads?"

On a CPU it is done in about a minute: it reads only the document's beginning, and leaves out KnapSpec, which would
first measure the device for minutes.
"""

import sys
import time
from pathlib import Path

import jax

import jaxspec
from jaxspec.metrics import measure

METHODS = {
    "plain": jaxspec.Plain(),
    "streaming": jaxspec.Streaming(),
    "quest": jaxspec.Quest(),
    "vegas": jaxspec.Vegas(),
    "knapspec": jaxspec.KnapSpec(),
    "knapspec + vegas": jaxspec.KnapSpec(selection=jaxspec.Vegas()),
}


def main(path: str, document: str, question: str, new_tokens: int = 128) -> None:
    """Prints the answer of plain decoding, then a line per method; the others give the same answer."""
    text, methods, dtype = Path(document).read_text(encoding="utf-8"), METHODS, None
    if jax.default_backend() == "cpu":
        text, methods, dtype = text[:2000], {n: m for n, m in METHODS.items() if "knapspec" not in n}, "float32"
        new_tokens = min(new_tokens, 24)
        print(f"on a CPU: the document's first {len(text)} characters, {new_tokens} new tokens, no KnapSpec")
    model, params, tokenizer = loaded = jaxspec.load(path, dtype=dtype)
    message = [{"role": "user", "content": f"{text}\n\n{question}"}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    print(f"{len(ids)} tokens of prompt")

    for name, method in methods.items():
        for _ in range(2):  # the first run compiles
            options = {"method": method, "max_new_tokens": new_tokens, "eos_ids": loaded.eos_ids}
            tokens, started = [], None
            for chunk in jaxspec.stream(model, params, [ids], [len(ids)], jax.random.key(0), **options):
                started = started or time.perf_counter()  # the first chunk comes with the end of the prefill
                tokens += chunk.tokens[0]
            seconds = time.perf_counter() - started
        if name == "plain":
            print(tokenizer.decode(tokens, skip_special_tokens=True), end="\n\n")
        rounds = measure(chunk.stats).tokens_per_round.token_weighted
        print(f"{name:18}{(len(tokens) - 1) / seconds:8.1f} tokens/s {rounds:6.2f} tokens per round", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
