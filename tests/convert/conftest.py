"""Tiny random checkpoints of every family, made by transformers, and GGUF files made of them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

VOCAB = 384


def _weights_dir() -> Path | None:
    root = os.environ.get("JAXSPEC_WEIGHTS")
    return Path(root) if root else None


@pytest.fixture(scope="session")
def gguf_weights() -> Callable[[str], Path]:
    """Finds a GGUF file in $JAXSPEC_WEIGHTS, or skips."""

    def find(name: str) -> Path:
        root = _weights_dir()
        if root is None or not (root / name).is_file():
            pytest.skip(f"{name} is not in $JAXSPEC_WEIGHTS")
        return root / name

    return find


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory):
    """A directory with a byte-level BPE tokenizer of `VOCAB` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from convert.check_text import CHECK_TEXT

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator([CHECK_TEXT], trainer)
    directory = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, tiny_tokenizer):
    """`tiny(family, **overrides) -> (directory, torch model)`: saved by transformers, made once per set of overrides.

    Every parameter is random, biases and norms included: with their initial zeros and ones a dropped bias or norm would
    not show.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made: dict[str, tuple[Path, torch.nn.Module]] = {}

    def make(family: str, save: dict | None = None, dtype: str = "float32", **overrides):
        key = repr((family, save, dtype, sorted(overrides.items(), key=str)))
        if key not in made:
            values = {
                "vocab_size": VOCAB,
                "hidden_size": 48,
                "intermediate_size": 80,
                "num_hidden_layers": 2,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "max_position_embeddings": 1024,
                "eos_token_id": 1,
                "bos_token_id": 0,
                "pad_token_id": None,
                **overrides,
            }
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values)).eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
            model = model.to(getattr(torch, dtype))
            directory = tmp_path_factory.mktemp(family)
            model.save_pretrained(directory, **(save or {}))
            for file in tiny_tokenizer.iterdir():
                shutil.copy(file, directory)
            # read back, because casting a module also rounds its rope frequencies
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
            made[key] = directory, model.eval()
        return made[key]

    return make
