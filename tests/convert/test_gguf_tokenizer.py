"""Tokenizers rebuilt from GGUF metadata: the pieces of every pre-tokenizer, special tokens, and what is refused."""

import json

import gguf
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from convert import ConversionError
from convert.check_text import CHECK_TEXT
from convert.gguf_file import GGUFFile
from convert.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer, eos_token_ids, write_tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

# the expressions that the tokenizers' authors published, for another engine than the one that runs them here
PUBLISHED = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}

# special tokens have their own tests
text = st.text(
    st.one_of(
        st.sampled_from(" \t\n\r'0123456789sStTdDaAzZ.,/é漢ß٣½"),
        st.characters(exclude_categories=["Cs", "Cn", "Co"]),
    ),
    max_size=40,
).filter(lambda value: "<|" not in value)


@pytest.fixture(scope="module")
def trained():
    """Tokens and merges of a byte-level BPE with 500 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([CHECK_TEXT, "don't DON'T you'll 2024 12 1987"], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [" ".join(m) for m in model["merges"]]


@pytest.fixture
def make(trained, tmp_path):
    """Writes a GGUF file with nothing but a tokenizer. Values of None leave a key out."""

    def write(pre="gpt-2", model="gpt2", extra=(), merges=None, **values):
        tokens, trained_merges = trained
        tokens = [*tokens, *SPECIAL, *(token for token, _ in extra)]
        types = [NORMAL] * len(trained[0]) + [CONTROL] * len(SPECIAL) + [kind for _, kind in extra]
        writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
        if model is not None:
            writer.add_tokenizer_model(model)
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(values.pop("tokens", tokens))
        writer.add_token_types(values.pop("types", types))
        writer.add_token_merges(trained_merges if merges is None else merges)
        ids = {"bos": len(trained[0]) + 1, "eos": len(trained[0]) + 2, "padding": len(trained[0])}
        for name, index in (ids | {k: v for k, v in values.items() if k in ("bos", "eos", "padding", "eot")}).items():
            if index is not None:
                writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)
        for name in ("add_bos_token", "add_eos_token", "add_space_prefix"):
            if name in values:
                writer.add_bool(f"tokenizer.ggml.{name}", values[name])
        if "chat_template" in values:
            writer.add_chat_template(values["chat_template"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return GGUFFile(tmp_path / "t.gguf")

    return write


def pieces(tokenizer, value):
    """The pieces of `value` before BPE, as text."""
    if tokenizer.normalizer is not None:
        value = tokenizer.normalizer.normalize_str(value)
    decode = {c: b for b, c in bytes_to_characters().items()}
    found = tokenizer.pre_tokenizer.pre_tokenize_str(value)
    return [bytes(decode[c] for c in piece).decode() for piece, _ in found]


def bytes_to_characters():
    """GPT-2's printable stand-ins: printable Latin-1 bytes for themselves, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["a", "12345", " b", " ", " 67", "."]),
        ("smollm", ["a", "1", "2", "3", "4", "5", " b", "  ", "6", "7", "."]),
        # a space before a digit is a piece of its own
        ("qwen2", ["a", "1", "2", "3", "4", "5", " b", " ", " ", "6", "7", "."]),
        ("llama-bpe", ["a", "123", "45", " b", " ", " ", "67", "."]),
        ("tekken", ["a", "1", "2", "3", "4", "5", " b", " ", " ", "6", "7", "."]),
    ],
)
def test_digits(pre, expected, make):
    assert pieces(build_tokenizer(make(pre)), "a12345 b  67.") == expected


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        # GPT-2's words take a leading space, not a tab
        ("gpt-2", ["x", "  ", " y", "\n\n ", " z", "\t", "\t", "w", " \r\n"]),
        ("smollm", ["x", "  ", " y", "\n\n ", " z", "\t", "\t", "w", " \r\n"]),
        ("qwen2", ["x", "  ", " y", "\n\n", " ", " z", "\t", "\tw", " \r\n"]),
        ("llama-bpe", ["x", "  ", " y", "\n\n", " ", " z", "\t", "\tw", " \r\n"]),
        ("tekken", ["x", "  ", " y", "\n\n", " ", " z", "\t", "\tw", " \r\n"]),
    ],
)
def test_whitespace(pre, expected, make):
    assert pieces(build_tokenizer(make(pre)), "x   y\n\n  z\t\tw \r\n") == expected


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["DON", "'", "T", " don", "'t"]),
        ("smollm", ["DON", "'", "T", " don", "'t"]),
        ("qwen2", ["DON", "'T", " don", "'t"]),
        ("llama-bpe", ["DON", "'T", " don", "'t"]),
        ("tekken", ["DON", "'T", " don", "'t"]),
    ],
)
def test_contractions(pre, expected, make):
    assert pieces(build_tokenizer(make(pre)), "DON'T don't") == expected


def test_case_changes_cut_words_of_tekken(make):
    assert pieces(build_tokenizer(make("tekken")), "helloWorld HTTPServer") == ["hello", "World", " HTTPServer"]


@pytest.mark.parametrize("pre", PUBLISHED)
def test_pieces_are_those_of_the_published_expression(pre, make):
    tokenizer = build_tokenizer(make(pre))

    @settings(max_examples=300, deadline=None)
    @given(text)
    def check(value):
        expected = tokenizer.normalizer.normalize_str(value) if tokenizer.normalizer else value
        assert pieces(tokenizer, value) == regex.findall(PUBLISHED[pre], expected)

    check()


def test_ids_equal_transformers_qwen2(make, trained):
    """transformers builds this tokenizer from a vocabulary and merges itself."""
    from transformers import Qwen2Tokenizer

    tokens, merges = trained
    tokenizer = build_tokenizer(make("qwen2"))
    reference = Qwen2Tokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[tuple(m.split()) for m in merges])

    @settings(max_examples=200, deadline=None)
    @given(text)
    def check(value):
        assert tokenizer.encode(value).ids == reference(value).input_ids

    check()
    assert tokenizer.encode(CHECK_TEXT).ids == reference(CHECK_TEXT).input_ids


@pytest.mark.parametrize("pre", ["gpt-2", "smollm"])
def test_ids_equal_transformers_gpt2(pre, make, trained):
    from transformers import GPT2Tokenizer

    tokens, merges = trained
    tokenizer = build_tokenizer(make(pre))
    reference = GPT2Tokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[tuple(m.split()) for m in merges])

    @settings(max_examples=200, deadline=None)
    @given(text)
    def check(value):
        parts = regex.findall(r"\p{N}|\P{N}+", value) if pre == "smollm" else [value]
        assert tokenizer.encode(value).ids == [i for part in parts for i in reference(part).input_ids]

    check()


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_text_survives(pre, make):
    tokenizer = build_tokenizer(make(pre, add_bos_token=False))
    value = CHECK_TEXT + "\t \x00\x7f\r\n\n  0123456789 \u200d🙂"
    assert tokenizer.decode(tokenizer.encode(value).ids) == value


def test_ignore_merges_takes_whole_pieces(make):
    """A token that no merge makes: only tokenizers that look pieces up first can emit it."""
    extra = [("Ġqzqzqz", NORMAL)]
    ids = {pre: build_tokenizer(make(pre, extra=extra, add_bos_token=False)).encode(" qzqzqz").ids for pre in PUBLISHED}
    assert len(ids["llama-bpe"]) == len(ids["tekken"]) == 1
    assert len(ids["gpt-2"]) > 1
    assert len(ids["qwen2"]) > 1


def test_special_tokens_are_single_ids(make, trained):
    tokenizer = build_tokenizer(make("smollm", extra=[("<tool>", USER_DEFINED)]))
    first = len(trained[0])
    ids = tokenizer.encode("<|im_start|><tool>1<|im_end|>").ids
    assert ids == [first + 1, first + 4, tokenizer.token_to_id("1"), first + 2]
    assert tokenizer.decode(ids) == "<tool>1"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|><tool>1<|im_end|>"


def test_unused_tokens_keep_the_ids_of_the_others(make, trained):
    tokenizer = build_tokenizer(make("smollm", extra=[("[PAD0]", UNUSED), ("<tool>", USER_DEFINED)]))
    first = len(trained[0])
    assert tokenizer.token_to_id("[PAD0]") is None
    assert tokenizer.token_to_id("<tool>") == first + 5
    assert first + 4 not in tokenizer.encode("[PAD0]").ids


@pytest.mark.parametrize(
    ("pre", "values", "expected"),
    [
        ("llama-bpe", {}, True),
        ("tekken", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("gpt-2", {}, False),
        ("qwen2", {"add_bos_token": True}, True),
    ],
)
def test_bos(pre, values, expected, make, trained):
    ids = build_tokenizer(make(pre, **values)).encode("a").ids
    assert (ids[0] == len(trained[0]) + 1) == expected


def test_files_load_with_transformers(make, tmp_path, trained):
    from transformers import AutoTokenizer

    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    names = write_tokenizer(make("smollm", chat_template=template), directory)
    assert sorted(names) == sorted(path.name for path in directory.iterdir())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|im_start|>", "<|im_end|>", SPECIAL[0])
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "12"}], tokenize=False)
    assert chat == "<|im_start|>12<|im_end|>"
    one, two = (tokenizer.convert_tokens_to_ids(c) for c in "12")
    assert tokenizer("12").input_ids == [one, two]
    assert tokenizer.decode(tokenizer(CHECK_TEXT).input_ids) == CHECK_TEXT


def test_eos_ids(make, trained):
    first = len(trained[0])
    assert eos_token_ids(make(eos=3)) == [3, first, first + 2, first + 3]
    assert eos_token_ids(make(eos=None, eot=7)) == [7, first, first + 2, first + 3]
    plain = [NORMAL] * (first + len(SPECIAL))
    assert eos_token_ids(make(eos=None, types=plain)) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pre": "deepseek-coder"}, "pre-tokenizer 'deepseek-coder'"),
        ({"pre": "default"}, "pre-tokenizer 'default'"),
        ({"pre": None}, "pre-tokenizer 'None'"),
        ({"model": "llama"}, "tokenizer model 'llama' is not supported"),
        ({"model": "bert"}, "tokenizer model 'bert' is not supported"),
        ({"merges": ["qz qz"]}, "merge 'qz qz' does not join two tokens into a third"),
        ({"merges": ["ab"]}, "merge 'ab'"),
        ({"types": [NORMAL]}, "token_type does not match"),
        ({"extra": [("a", NORMAL)]}, "a token twice"),
        ({"eos": 10_000}, "eos_token_id = 10000 is not a token"),
        ({"add_eos_token": True}, "add_eos_token"),
        ({"bos": None, "add_bos_token": True}, "bos_token_id is missing"),
    ],
)
def test_what_is_refused(values, message, make, tmp_path):
    with pytest.raises(ConversionError) as caught:
        write_tokenizer(make(**values), tmp_path)
    assert message in str(caught.value)


@pytest.mark.weights
def test_smollm2(gguf_weights):
    tokenizer = build_tokenizer(GGUFFile(gguf_weights("smollm2.gguf")))
    assert tokenizer.encode("2024  x\n\n y").tokens == ["2", "0", "2", "4", "Ġ", "Ġx", "ĊĊ", "Ġy"]
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1
    assert tokenizer.encode(" the").tokens == ["Ġthe"]
    assert tokenizer.decode(tokenizer.encode(CHECK_TEXT).ids) == CHECK_TEXT


@pytest.mark.weights
def test_qwen(gguf_weights):
    from transformers import Qwen2Tokenizer

    file = GGUFFile(gguf_weights("qwen-0.5b.gguf"))
    tokenizer = build_tokenizer(file)
    # ids that Qwen's own documents show
    assert tokenizer.encode("Hello, how are you?").ids == [9707, 11, 1246, 525, 498, 30]
    assert tokenizer.encode("<|im_start|>").ids == [151644]
    kinds = file.metadata["tokenizer.ggml.token_type"]
    plain = {t: i for i, t in enumerate(file.metadata["tokenizer.ggml.tokens"]) if kinds[i] == NORMAL}
    merges = [tuple(m.split(" ")) for m in file.metadata["tokenizer.ggml.merges"]]
    reference = Qwen2Tokenizer(vocab=plain, merges=merges)
    for value in (CHECK_TEXT, "1234567890 \t\n\n  x\r\n", "e\u0301\u00e9 ½ ٣"):
        assert tokenizer.encode(value).ids == reference(value).input_ids
