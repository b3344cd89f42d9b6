"""A tiny checkpoint on disk, as Hugging Face saves it and converted; no PyTorch needed."""

import json
from typing import NamedTuple

import numpy as np
import pytest

from tests.reference import jax_model, random_weights, tiny_config

CHAT = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
CHAT += "{% if add_generation_prompt %}[a] {% endif %}"
TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps. 0123456789 again and again and again.\n"


class Checkpoint(NamedTuple):
    source: str  # Hugging Face directory
    converted: str
    hf: dict
    tokenizer: object


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.numpy")
    from convert import convert

    source = tmp_path_factory.mktemp("source")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(source)
    hf = tiny_config("llama", vocab_size=320, num_hidden_layers=1, max_position_embeddings=256, eos_token_id=1)
    (source / "config.json").write_text(json.dumps(hf))
    safetensors.save_file(random_weights(hf, seed=5), source / "model.safetensors")
    converted = tmp_path_factory.mktemp("converted") / "model"
    convert(source, converted, progress=False)
    return Checkpoint(str(source), str(converted), hf, tokenizer)


@pytest.fixture(scope="session")
def expected(checkpoint):
    """`expected(prompt ids, new tokens) -> (tokens, text)`: greedy, by `generate` on the weights themselves."""
    import jax

    from jaxspec import generate

    model, params = jax_model(checkpoint.hf, random_weights(checkpoint.hf, seed=5))

    def run(ids, new_tokens):
        key = jax.random.key(0)
        output = generate(model, params, np.array([ids]), [len(ids)], key, max_new_tokens=new_tokens, eos_ids=(1,))
        tokens = output.tokens[0, : output.lengths[0]].tolist()
        return tokens, checkpoint.tokenizer.decode(tokens, skip_special_tokens=True)

    return run
