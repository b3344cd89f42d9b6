"""A fast tokenizer rebuilt from GGUF metadata.

The metadata holds the vocabulary and the merges, but only the *name* of the pre-tokenizer (`tokenizer.ggml.pre`).
`PRE_TOKENIZERS` maps those names to what the original tokenizer.json files do; a name that is not in it raises, because
any guess splits some text differently and still decodes to readable output.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.errors import ConversionError
from convert.gguf_file import GGUFFile
from convert.json_file import write_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

# token types of the format
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5

# control tokens that end a text whatever the metadata's single eos id is, as llama.cpp treats them
_END_TEXTS = {"<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>"}


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before byte-level BPE.

    Attributes:
        split: regular expression whose matches are the pieces; None: GPT-2's own expression.
        digits: every digit is a piece of its own, before anything else.
        nfc: text is normalised to NFC first.
        ignore_merges: a piece that is in the vocabulary is taken whole.
        add_bos: whether texts start with BOS where the metadata does not say.
    """

    split: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA3 = PreTokenizer(
    split="|".join((_CONTRACTIONS, _WORDS, r"\p{N}{1,3}", _SYMBOLS, _TAIL)), ignore_merges=True, add_bos=True
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(digits=True),
    "qwen2": PreTokenizer(split="|".join((_CONTRACTIONS, _WORDS, r"\p{N}", _SYMBOLS, _TAIL)), nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    # Mistral Nemo: words are also cut where lower case turns into upper case
    "tekken": PreTokenizer(
        split="|".join(
            (
                rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
                rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
                r"\p{N}",
                r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
                _TAIL,
            )
        ),
        ignore_merges=True,
        add_bos=True,
    ),
}


def build_tokenizer(file: GGUFFile) -> "Tokenizer":
    """The tokenizer that the metadata of `file` describes.

    Raises:
        ConversionError: a tokenizer model or pre-tokenizer that is not supported, or inconsistent metadata.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    pre = _pre_tokenizer(file)
    tokens, types = _vocabulary(file)
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    merges = []
    for merge in _strings(file, "merges"):
        left, space, right = merge.partition(" ")
        # a token of control type may be spelled like a merge's result but is never the result of merging
        if not space or " " in right or not {left, right, left + right} <= vocab.keys():
            raise ConversionError(f"{file.path}: merge {merge[:60]!r} does not join two tokens into a third")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre.ignore_merges, fuse_unk=False))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits else []
    if pre.split is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, types, strict=True) if kind in (_UNKNOWN, _CONTROL)]
    plain = [t for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if _flag(file, "add_bos_token", pre.add_bos):
        bos = token_id(file, "bos")
        if bos is None:
            raise ConversionError(f"{file.path}: texts start with BOS, but tokenizer.ggml.bos_token_id is missing")
        first = tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[first, "$A"], pair=[first, "$A", f"{first}:1", "$B:1"], special_tokens=[(first, bos)]
        )
    if _flag(file, "add_eos_token", False) or _flag(file, "add_space_prefix", False):
        raise ConversionError(f"{file.path}: add_eos_token and add_space_prefix are not supported for byte-level BPE")
    return tokenizer


def write_tokenizer(file: GGUFFile, directory: Path) -> list[str]:
    """Writes tokenizer.json and tokenizer_config.json to `directory` and returns their names.

    Raises:
        ConversionError: as `build_tokenizer`.
    """
    tokenizer = build_tokenizer(file)
    tokens = _strings(file, "tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    for name in ("bos", "eos", "unknown", "padding"):
        if (index := token_id(file, name)) is not None:
            config[{"unknown": "unk_token", "padding": "pad_token"}.get(name, f"{name}_token")] = tokens[index]
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise ConversionError(f"{file.path}: tokenizer.chat_template is not a string")
        config["chat_template"] = template
    tokenizer.save(str(directory / "tokenizer.json"))
    write_object(directory / "tokenizer_config.json", config)
    return ["tokenizer.json", "tokenizer_config.json"]


def token_id(file: GGUFFile, name: str) -> int | None:
    """`tokenizer.ggml.<name>_token_id`, or None when absent.

    Raises:
        ConversionError: not an index into the vocabulary.
    """
    index = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if index is not None and (type(index) is not int or not 0 <= index < len(_strings(file, "tokens"))):
        raise ConversionError(f"{file.path}: tokenizer.ggml.{name}_token_id = {str(index)[:40]} is not a token")
    return index


def eos_token_ids(file: GGUFFile) -> list[int]:
    """Every id that ends a text: the eos, eot and eom ids, and control tokens named like an end of text."""
    if "tokenizer.ggml.tokens" not in file.metadata:
        raise ConversionError(f"{file.path}: no tokenizer in the metadata (tokenizer.ggml.tokens)")
    named = (token_id(file, name) for name in ("eos", "eot", "eom"))
    ids = {i for i in named if i is not None}
    tokens, types = _vocabulary(file)
    ids |= {i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind == _CONTROL and t in _END_TEXTS}
    return sorted(ids)


def _pre_tokenizer(file: GGUFFile) -> PreTokenizer:
    model, name = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise ConversionError(
            f"{file.path}: tokenizer model {str(model)[:40]!r} is not supported in GGUF files; supported: gpt2 "
            "(byte-level BPE); convert the Hugging Face checkpoint instead"
        )
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise ConversionError(
            f"{file.path}: pre-tokenizer {str(name)[:40]!r} (tokenizer.ggml.pre) is not known; known: "
            f"{', '.join(PRE_TOKENIZERS)}; convert the Hugging Face checkpoint instead"
        )
    return PRE_TOKENIZERS[name]


def _vocabulary(file: GGUFFile) -> tuple[list[str], list[int]]:
    tokens = _strings(file, "tokens")
    if len(set(tokens)) != len(tokens):
        raise ConversionError(f"{file.path}: the vocabulary holds a token twice")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and len(tokens) > embedding.shape[0]:
        raise ConversionError(f"{file.path}: {len(tokens)} tokens for {embedding.shape[0]} embedding rows")
    types = file.metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens) or not all(type(t) is int for t in types):
        raise ConversionError(f"{file.path}: tokenizer.ggml.token_type does not match the {len(tokens)} tokens")
    return tokens, types


def _strings(file: GGUFFile, name: str) -> list[str]:
    values = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise ConversionError(f"{file.path}: tokenizer.ggml.{name} is missing or no list of strings")
    return values


def _flag(file: GGUFFile, name: str, default: bool) -> bool:
    value = file.metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ConversionError(f"{file.path}: tokenizer.ggml.{name} is not a boolean")
    return value
