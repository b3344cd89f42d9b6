"""Prompts of given lengths from the user's texts, or from what every Python brings along."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.text import read_text


def token_ids(paths: Sequence[Path], tokenizer: Any, needed: int) -> list[int]:
    """The texts' token ids one after another, at least `needed` of them.

    Args:
        paths: UTF-8 files; none: the sources of Python's standard library, in alphabetical order.
        tokenizer: the model's.
        needed: how many tokens the longest prompt has.

    Raises:
        ValueError: the texts are too short, or cannot be read.
    """
    built_in = not paths
    ids: list[int] = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")) if built_in else paths:
        ids += tokenizer(read_text(path, errors="replace"), verbose=False)["input_ids"]
        if built_in and len(ids) >= 4 * needed:
            break
    if len(ids) < needed:
        raise ValueError(f"the texts have {len(ids)} tokens; a prompt needs {needed}. Give longer ones with --text")
    return ids


def stretches(ids: list[int], length: int, count: int) -> list[list[int]]:
    """`count` prompts of `length` tokens each, from evenly spaced places of the text."""
    room = len(ids) - length
    starts = [room * i // max(count - 1, 1) for i in range(count)]
    return [ids[start : start + length] for start in starts]
