"""Prompts for acceptance.py: stretches of real text, as they are or wrapped in a request."""

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxspec.benchmarking.texts import stretches
from jaxspec.checkpoint import Loaded
from jaxspec.models import Decoder, ModelConfig, RopeConfig, init_params

REQUESTS = {
    "continue": None,
    "summary": "Summarise the text above in detail, point by point.",
    "question": "According to the text above, what are its most important rules, and why are they there? Quote it.",
}


@dataclass(frozen=True)
class Text:
    """Token ids of a text, and what stands around a stretch of it."""

    ids: list[int]
    before: list[int]
    after: list[int]


def texts_from(arguments: list[str], tokenizer) -> dict[str, Text]:
    """Reads `FILE[:KIND]` arguments."""
    texts = {}
    for argument in arguments:
        path, _, kind = argument.partition(":")
        kind = kind or "continue"
        if kind not in REQUESTS:
            raise SystemExit(f"--text {argument}: KIND must be one of {', '.join(REQUESTS)}")
        ids = tokenizer(Path(path).read_text(encoding="utf-8", errors="replace"), verbose=False)["input_ids"]
        before, after = [], []
        if REQUESTS[kind] is not None:
            marker = "\u241e"
            content = f"{marker}\n\n{REQUESTS[kind]}"
            whole = content
            if tokenizer.chat_template:
                message = [{"role": "user", "content": content}]
                whole = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            before, after = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in whole.split(marker))
        texts[f"{Path(path).name}:{kind}"] = Text(ids, before, after)
    return texts


def rows_of_text(text: Text, context: int, count: int) -> list[list[int]]:
    """`count` prompts of exactly `context` tokens, from evenly spaced stretches of the text."""
    inner = context - len(text.before) - len(text.after)
    if len(text.ids) < inner:
        raise SystemExit(f"a text of {len(text.ids)} tokens is too short for {context} tokens of context")
    return [[*text.before, *stretch, *text.after] for stretch in stretches(text.ids, inner, count)]


def repeated_share(tokens: np.ndarray) -> float:
    """The share of 4-grams that occurred before in the same output: loops make drafting easy."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams)


def tiny_checkpoint() -> tuple[Loaded, dict[str, Text]]:
    """A random model and texts of random ids, to try the script out."""
    config = ModelConfig("llama", 97, 32, 64, 2, 4, 2, 8, 4096, RopeConfig())
    params = init_params(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    texts = {f"random {i}:continue": Text(rng.integers(0, 97, 3000).tolist(), [], []) for i in range(2)}
    return Loaded(Decoder(config), params, None, config, {}, (), {}), texts
