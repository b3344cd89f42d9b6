"""Needle-in-a-haystack prompts: a fact hidden at some depth of a long text, and a question about it at the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.text import read_text

Encode = Callable[[str], list[int]]

_WORDS = (
    "amber anchor apricot badger bamboo basket beacon beaver blanket bramble bucket butter cabin candle canyon carpet "
    "castle cedar chimney cinnamon clover cobalt copper cotton cradle crystal dagger daisy dolphin dragon eagle ember "
    "falcon feather ferry fiddle forest fossil garden garnet ginger glacier goblet granite hammer harbor harvest hazel "
    "hedge helmet heron hollow honey island ivory jacket jasmine jungle kettle ladder lantern lavender lemon lilac "
    "magnet maple marble meadow mirror monkey mosaic mustard needle nickel nutmeg ocean olive orchid otter oyster "
    "paddle panther parrot pebble pepper pigeon pillow piston planet plum pocket potato prairie pumpkin puppet quartz "
    "rabbit raven ribbon river rocket saddle saffron salmon sandal satin scarf shadow silver spider spruce squirrel "
    "sunset table teapot temple thistle thunder tiger timber tomato trumpet tulip tunnel turtle valley velvet violet "
    "walnut whale willow window winter wolf zebra"
)
PLACES = ("Oslo", "Lima", "Cairo", "Kyoto", "Quito", "Dublin", "Hanoi", "Tunis", "Sofia", "Perth", "Turin", "Accra")
SUBJECTS = "the miller|a clerk|the old ferryman|a traveller|my neighbour|the schoolmaster|a gardener|the night watch"
VERBS = "counted|repaired|carried|described|painted|forgot|weighed|sold|borrowed|polished|mended|measured"
OBJECTS = "two barrels|the long fence|a stack of letters|the broken clock|a wooden bench|some ripe pears|the north wall"
TIMES = "before noon|in late autumn|after the rain|on market day|without a word|by candle light|as usual|once more"


@dataclass(frozen=True)
class Needle:
    """A prompt that asks for a fact it holds."""

    ids: tuple[int, ...]  # the whole prompt
    span: tuple[int, int]  # where the fact stands: first token and end
    payload: tuple[int, ...]  # the tokens of the answer
    depth: float  # 0 at the start of the text, 1 at its end

    def recall(self, emitted: Sequence[int]) -> float:
        """The share of the payload's tokens that were emitted."""
        left, found = list(emitted), 0
        for token in self.payload:
            if token in left:
                left.remove(token)
                found += 1
        return found / len(self.payload)


def filler(num_words: int, seed: int = 0) -> str:
    """Plain made-up prose of at least so many words, for haystacks where the user has no text."""
    rng = np.random.default_rng(seed)
    parts = [words.split("|") for words in (SUBJECTS, VERBS, OBJECTS, TIMES)]
    sentences, count = [], 0
    while count < num_words:
        sentence = " ".join(part[rng.integers(len(part))] for part in parts)
        count += len(sentence.split())
        sentences.append(sentence[0].upper() + sentence[1:] + ".")
        if len(sentences) % 7 == 0:
            sentences[-1] += "\n\n"
    return " ".join(sentences)


def read_texts(paths: Sequence[str | Path], encode: Encode) -> list[list[int]]:
    """Token ids of UTF-8 files.

    Raises:
        ValueError: a file cannot be read, is not UTF-8, or holds no text.
    """
    texts = []
    for path in paths:
        ids = encode(read_text(path))
        if not ids:
            raise ValueError(f"{path} holds no text")
        texts.append(ids)
    return texts


def chat_ends(tokenizer: Any) -> tuple[str, str]:
    """What a chat template puts before and after a user's message.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError("--chat needs a model whose tokenizer has a chat template")
    marker = "\u241e"
    message = [{"role": "user", "content": marker}]
    before, _, after = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False).partition(
        marker
    )
    return before, after


def make_needle(
    encode: Encode, text: Sequence[int], length: int, depth: float, seed: int, wrap: tuple[str, str] = ("", "")
) -> Needle:
    """A prompt of at most `length` tokens, one or two short of it.

    Args:
        encode: text to token ids, without special tokens.
        text: the haystack's token ids; repeated where it is too short.
        length: tokens of the prompt.
        depth: where in the haystack the fact goes, 0 to 1.
        seed: chooses the fact and where the haystack begins.
        wrap: what stands before and after the prompt, a chat template's two ends.

    Raises:
        ValueError: `length` leaves no room for a haystack, or `depth` lies outside 0..1.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth must lie in 0..1, got {depth}")
    rng = np.random.default_rng(seed)
    place, words = PLACES[rng.integers(len(PLACES))], rng.choice(_WORDS.split(), 4, replace=False)
    # spaces belong to the words that follow, so that the payload has the same tokens in fact and answer
    payload = encode("".join(f" {word}" for word in words))
    fact = [*encode(f"\n\nThe secret password of {place} is:"), *payload, *encode(".\n\n")]
    before, after = encode(wrap[0]), encode(wrap[1])
    question = encode(f"\n\nWhat is the secret password of {place}? Answer with its four words only.")
    lead = encode(f"The secret password of {place} is:")
    room = length - len(before) - len(fact) - len(question) - len(after) - len(lead)
    if room < 16:
        raise ValueError(f"needle prompts need at least {length - room + 16} tokens, got {length}")
    start = int(rng.integers(max(len(text) - room, 0) + 1))
    hay = list(text[start : start + room])
    while len(hay) < room:
        hay += text[: room - len(hay)]
    at = round(depth * room)
    head = [*before, *hay[:at]]
    ids = [*head, *fact, *hay[at:], *question, *after, *lead]
    return Needle(tuple(ids), (len(head), len(head) + len(fact)), tuple(payload), depth)
