"""`stream` against `generate`, text as it comes, and stop strings against a search in the whole text."""

import itertools

import jax
import numpy as np
import pytest

from jaxspec import Chunk, Finish, Sampling, generate, stream
from jaxspec.text import TextStream
from tests.decode.conftest import NEW_TOKENS
from tests.decode.scripted import Scripted, script

KEY = jax.random.key(0)
SPECIAL = "<|end|>"


def byte_symbols():
    """The printable character that stands for each byte in byte-level vocabularies (as in GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


WORDS = ["a", "b", "ab", " a", " b", "ba ", "\n", "\n\n", " ", "  ", "stop", " stop", "top", "st", "op"]
WORDS += ["END", "EN", "D", "é", "日"]
PIECES = [bytes([x]) for x in "é日".encode()] + [b"\xf0", b"\x9f"]  # the last two begin a character that never ends
FILLER = [f"w{i}" for i in range(60 - len(WORDS) - len(PIECES))]


def byte_level(tokenizers):
    """As in GPT-2, Llama 3 and Qwen."""
    symbols = byte_symbols()
    data = [word.encode() for word in WORDS] + PIECES + [word.encode() for word in FILLER]
    return ["".join(symbols[byte] for byte in token) for token in data], tokenizers.decoders.ByteLevel()


def sentencepiece(tokenizers):
    """As in Llama 2 and Mistral: a mark for spaces, bytes by number, and no space at the beginning of a text."""
    tokens = [word.replace(" ", "\u2581") for word in WORDS]
    tokens += [f"<0x{piece[0]:02X}>" for piece in PIECES] + FILLER
    parts = tokenizers.decoders
    steps = [parts.Replace("\u2581", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)]
    return tokens, parts.Sequence(steps)


@pytest.fixture(scope="module", params=[byte_level, sentencepiece])
def tokenizer(request):
    """61 tokens: a special one, words with and without spaces, bytes of characters, and filler."""
    tokenizers = pytest.importorskip("tokenizers")
    tokens, decoder = request.param(tokenizers)
    vocab = {token: i for i, token in enumerate([SPECIAL, *tokens])}
    assert len(vocab) == 61
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    made.decoder = decoder
    made.add_special_tokens([SPECIAL])
    return made


def run(tiny, **options):
    values = {"max_new_tokens": NEW_TOKENS, "eos_ids": tiny.unused[:1], "key": KEY, **options}
    return list(stream(tiny.model, tiny.params, tiny.prompts, tiny.lengths, values.pop("key"), **values))


def test_under_jit_raises(tiny):
    with pytest.raises(ValueError, match="use generate under jit"):
        jax.jit(lambda params: stream(tiny.model, params, [[1, 2]], [2], KEY, max_new_tokens=2))(tiny.params)


def joined(chunks):
    """Tokens and text of each row over all chunks."""
    tokens = [[token for chunk in chunks for token in chunk.tokens[b]] for b in range(4)]
    text = None if chunks[0].text is None else ["".join(chunk.text[b] for chunk in chunks) for b in range(4)]
    return tokens, text


def assert_equals_generate(chunks, output):
    tokens, _ = joined(chunks)
    for b in range(4):
        assert tokens[b] == output.tokens[b, : output.lengths[b]].tolist()
    assert chunks[-1].finish == [Finish(f) for f in output.finish.tolist()]
    assert all(chunk.stats is None for chunk in chunks[:-1])
    jax.tree.map(np.testing.assert_array_equal, chunks[-1].stats, output.stats)
    for earlier, later in itertools.pairwise(chunks):
        for b in range(4):
            if earlier.finish[b] != Finish.RUNNING:
                assert (later.finish[b], later.tokens[b]) == (earlier.finish[b], [])


CASES = {
    "greedy": {},
    "sampled": {"sampling": Sampling(temperature=1.0, top_p=0.9)},
    "eos": {"eos": 6},
    "one token": {"max_new_tokens": 1},
    "blocks": {"scripted": (3, 3)},
    "ragged blocks with eos": {"scripted": ([0, 1, 2, 3], [3, 2, 3, 3]), "eos": 6},
}


@pytest.mark.parametrize("case", CASES)
def test_equals_generate(case, tiny):
    options = {"eos_ids": tiny.unused[:1], **CASES[case]}
    if "eos" in options:
        options["eos_ids"] = (int(tiny.greedy[0, options.pop("eos")]),)
    if "scripted" in options:
        wrong, count = options.pop("scripted")
        options |= {"method": Scripted(3), "draft_params": script(np.pad(tiny.greedy, ((0, 0), (0, 4))), wrong, count)}
    options = {"max_new_tokens": NEW_TOKENS, **options}
    chunks = run(tiny, **options)
    assert all(isinstance(chunk, Chunk) and chunk.text is None for chunk in chunks)
    assert all(len(chunk.tokens[b]) <= 4 for chunk in chunks for b in range(4))
    assert_equals_generate(chunks, generate(tiny.model, tiny.params, tiny.prompts, tiny.lengths, KEY, **options))


def test_ends_early_when_the_caller_does(tiny):
    chunks = stream(tiny.model, tiny.params, tiny.prompts, tiny.lengths, KEY, max_new_tokens=NEW_TOKENS)
    first = [next(chunks), next(chunks)]
    chunks.close()
    assert [joined(first)[0][b] for b in range(4)] == tiny.greedy[:, :2].tolist()


# --- text ------------------------------------------------------------------------------------------------------------


def whole_text(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True)


def searched(tokenizer, ids, stop):
    """The ids and the text up to the first token that completes a stop string; by decoding every prefix anew."""
    for n in range(1, len(ids) + 1):
        # a character whose bytes are not all there is shown as U+FFFD
        text = whole_text(tokenizer, ids[:n]).rstrip("\ufffd")
        found = [text.find(s) for s in stop if s in text]
        if found:
            return ids[:n], text[: min(found)], True
    return ids, whole_text(tokenizer, ids), False


def streamed(tokenizer, ids, stop, sizes):
    """What a `TextStream` makes of the ids in blocks of these sizes."""
    text_stream, kept, pieces, at = TextStream(tokenizer, tuple(stop)), [], [], 0
    sizes = [*sizes, len(ids)]
    for size in sizes:
        block = ids[at : at + size]
        at += len(block)
        new, text, stopped = text_stream.push(block, last=at >= len(ids))
        kept += new
        pieces.append(text)
        if stopped or at >= len(ids):
            return kept, pieces, stopped
    raise AssertionError


@pytest.mark.parametrize("stop", [(), ("stop",), (" st",), ("a b",), ("END", "stop"), ("p", "to"), ("日",), ("\n\n",)])
def test_random_ids(tokenizer, stop):
    """Words, special tokens and characters in bytes, whole in the sentencepiece vocabulary: there one broken character
    makes the whole run of bytes unreadable."""
    rng = np.random.default_rng(len(stop))
    first_byte, broken = 1 + len(WORDS), type(tokenizer.decoder).__name__ == "ByteLevel"
    parts = [[i] for i in range(first_byte)]
    parts += [[first_byte + i for i in bytes_] for bytes_ in (range(2), range(2, 5))]
    parts += [[first_byte + i] for i in range(7)] if broken else []
    stops = 0
    for _ in range(400):
        ids = [i for part in rng.integers(0, len(parts), 10) for i in parts[part]]
        expected_ids, expected_text, expected_stop = searched(tokenizer, ids, stop)
        for sizes in ([1] * len(ids), [len(ids)], rng.integers(0, 5, len(ids)).tolist()):
            kept, pieces, stopped = streamed(tokenizer, ids, stop, sizes)
            assert ("".join(pieces), kept, stopped) == (expected_text, expected_ids, expected_stop), (ids, sizes)
        stops += expected_stop
    assert (stops > 5) == bool(stop)


def test_bytes_that_are_no_text(tokenizer):
    """Any bytes at all: nothing raises, and the words between them appear."""
    rng = np.random.default_rng(0)
    byte_ids = np.arange(1 + len(WORDS), 1 + len(WORDS) + len(PIECES))
    for _ in range(300):
        ids = rng.choice(byte_ids, 12)
        ids[rng.integers(0, 12, 2)] = ids_of("END")
        _, pieces, _ = streamed(tokenizer, ids.tolist(), (), [1] * 12)
        assert "".join(pieces).count("END") == np.sum(ids == ids_of("END"))


def ids_of(*parts):
    """Token ids of words."""
    return [1 + WORDS.index(part) for part in parts]


STOPS = {
    "inside a token": (["a", " stop", "b"], ("to",), "a s", 2),
    "spanning tokens": (["a", "st", "op", "b"], ("stop",), "a", 3),
    "with a space, over three tokens": (["b", "a", " b", " stop"], ("a b st",), "b", 4),
    "the earliest of several": (["a", "EN", "D", "stop"], ("stop", "END"), "a", 3),
    "two at once, the one that starts first cuts": (["ab", " stop"], ("stop", "b s"), "a", 2),
    "a false start": (["st", "a", "stop", "b"], ("stop",), "sta", 3),
    "a start inside a false start": (["st", "stop", "b"], ("stop",), "st", 2),
    "none": (["st", "a", "b"], ("stop",), "stab", 3),
    "ends as a false start": (["a", "st"], ("stop",), "ast", 2),
}


@pytest.mark.parametrize("case", STOPS)
def test_stop_strings(case, tokenizer):
    parts, stop, text, count = STOPS[case]
    ids = ids_of(*parts)
    for sizes in ([1] * len(ids), [len(ids)], [2] * len(ids)):
        kept, pieces, stopped = streamed(tokenizer, ids, stop, sizes)
        assert ("".join(pieces), kept) == (text, ids[:count])
        assert stopped == (text + "|" != "".join(parts) + "|")


def test_text_is_held_back_only_while_it_may_become_a_stop_string(tokenizer):
    ids = ids_of("a", "st", "op", "b", " a", "st", "a", "b")
    assert streamed(tokenizer, ids, ("stopped",), [1] * 8)[1] == ["a", "", "", "stopb", " a", "", "sta", "b"]
    assert streamed(tokenizer, ids, (), [1] * 8)[1] == ["a", "st", "op", "b", " a", "st", "a", "b"]


def test_characters_split_over_tokens_appear_whole(tokenizer):
    first = 1 + len(WORDS)
    ids = [*ids_of("a"), *range(first, first + 5), *ids_of("b")]
    assert streamed(tokenizer, ids, (), [1] * 7)[1] == ["a", "", "é", "", "", "日", "b"]
    # cut off inside the first character: what the tokenizer shows of it
    assert streamed(tokenizer, ids[:2], (), [1] * 2)[1] == ["a", "\ufffd"]


def test_special_tokens_are_not_shown(tokenizer):
    ids = [*ids_of("a"), 0, *ids_of("b"), 0]
    assert "".join(streamed(tokenizer, ids, (SPECIAL,), [1] * 4)[1]) == "ab"


def test_ids_that_the_tokenizer_does_not_know(tokenizer):
    """Models are often padded to more ids than their tokenizer has."""
    ids = [*ids_of("a"), 500, *ids_of("b"), 501]
    assert "".join(streamed(tokenizer, ids, (), [1] * 4)[1]) == "ab"


# --- stop strings in the loop ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, 0, 1, 3, [0, 1, 2, 3]])
def test_stop_strings_end_rows(wrong, tiny, tokenizer):
    """Plain, and at every place of a block: ids, text, finish and counters of each row are those of its own stop."""
    options = {}
    if wrong is not None:
        options = {"method": Scripted(3), "draft_params": script(np.pad(tiny.greedy, ((0, 0), (0, 4))), wrong, 3)}
    reached = set()
    for row, place in ((0, 3), (1, 9), (2, 6), (3, 0)):
        stop = whole_text(tokenizer, tiny.greedy[row, place : place + 2].tolist()).strip("\ufffd")[:3]
        assert stop
        chunks = run(tiny, tokenizer=tokenizer, stop=(stop,), **options)
        tokens, text = joined(chunks)
        for b in range(4):
            ids, expected_text, stopped = searched(tokenizer, tiny.greedy[b].tolist(), (stop,))
            assert (tokens[b], text[b]) == (ids, expected_text)
            assert chunks[-1].finish[b] == (Finish.STOP if stopped else Finish.LENGTH)
            assert chunks[-1].stats.emitted[b] == len(ids) - 1
            rounds = chunks[-1].stats.rounds[b]
            assert not np.any(chunks[-1].stats.drafted[b, rounds:])
            if wrong is None:
                assert rounds == len(ids) - 1
            elif np.ndim(wrong) == 0:
                assert rounds == -(-(len(ids) - 1) // (wrong + 1))
            reached.add(chunks[-1].finish[b])
    assert reached == {Finish.STOP, Finish.LENGTH}


def test_a_stop_string_in_the_block_of_an_eos(tiny, tokenizer):
    """Whatever comes first ends the row."""
    options = {"method": Scripted(3), "draft_params": script(np.pad(tiny.greedy, ((0, 0), (0, 4))), 3, 3)}
    options |= {"eos_ids": (int(tiny.greedy[0, 3]),), "tokenizer": tokenizer}
    before = whole_text(tokenizer, tiny.greedy[0, 2:3].tolist())
    after = whole_text(tokenizer, tiny.greedy[0, 4:5].tolist())
    assert run(tiny, stop=(before,), **options)[-1].finish[0] == Finish.STOP
    assert run(tiny, stop=(after,), **options)[-1].finish[0] == Finish.EOS


@pytest.mark.parametrize("stop", ["END", ["END"], ("END",)])
def test_one_stop_string_or_several(stop, tiny, tokenizer):
    run(tiny, tokenizer=tokenizer, stop=stop, max_new_tokens=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": ("",)}, "stop strings must be non-empty strings"),
        ({"stop": (b"END",)}, "stop strings must be non-empty strings"),
        ({"stop": 3}, "stop strings must be"),
        ({"stop": ("END",), "tokenizer": None}, "stop strings need a tokenizer"),
        ({"tokenizer": object()}, "a fast tokenizer is needed"),
    ],
)
def test_wrong_text_options_raise_at_the_call(options, message, tiny, tokenizer):
    values = {"tokenizer": tokenizer, "max_new_tokens": 2, **options}
    with pytest.raises(ValueError, match=message):
        stream(tiny.model, tiny.params, tiny.prompts, tiny.lengths, KEY, **values)
