"""SmolLM2 as GGUF against transformers on the same dequantised weights: greedy tokens and perplexity."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.models import init_cache
from tests.reference import assert_same_greedy

pytestmark = pytest.mark.weights

PROMPTS = ["The history of the lighthouse begins", "def fibonacci(n):\n"]
NEW_TOKENS = 200
PERPLEXITY_TOKENS = 2000


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    os.environ["JAXSPEC_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    return jaxspec.load(Path(os.environ["JAXSPEC_WEIGHTS"]) / "smollm2.gguf", dtype="float32")


@pytest.fixture(scope="module")
def theirs():
    """transformers' model with the tensors of the GGUF file, dequantised by the `gguf` package itself."""
    torch = pytest.importorskip("torch")
    gguf = pytest.importorskip("gguf")
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(Path(os.environ["JAXSPEC_WEIGHTS"]) / "smollm2.gguf")
    field = {name: part.contents() for name, part in reader.fields.items() if name.startswith("llama.")}
    heads, kv_heads = field["llama.attention.head_count"], field["llama.attention.head_count_kv"]
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
    config = LlamaConfig(
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=field["llama.embedding_length"],
        intermediate_size=field["llama.feed_forward_length"],
        num_hidden_layers=field["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field["llama.context_length"],
        rms_norm_eps=field["llama.attention.layer_norm_rms_epsilon"],
        rope_theta=field["llama.rope.freq_base"],
        tie_word_embeddings="output.weight" not in tensors,
        eos_token_id=None,
        bos_token_id=None,
    )
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    names |= {"attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"}
    names |= {"ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    outer = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    state = {}
    for name, tensor in tensors.items():
        if name.startswith("blk."):
            _, layer, kind, _ = name.split(".")
            if kind in ("attn_q", "attn_k"):
                # llama.cpp stores the two halves of each head interleaved
                n = heads if kind == "attn_q" else kv_heads
                tensor = tensor.reshape(n, -1, 2, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
            name = f"model.layers.{layer}.{names[kind]}.weight"
        else:
            name = f"{outer[name.removesuffix('.weight')]}.weight"
        state[name] = torch.from_numpy(np.ascontiguousarray(tensor))
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model.eval()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens(prompt, loaded, theirs):
    import torch

    ids = loaded.tokenizer(prompt)["input_ids"]
    model, params, _ = loaded
    output = jaxspec.generate(model, params, [ids], [len(ids)], jax.random.key(0), max_new_tokens=NEW_TOKENS)
    options = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    with torch.inference_mode():
        expected = theirs.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, **options)
    logits = torch.stack(expected.logits)[:, 0].numpy()
    assert_same_greedy(output.tokens[0], expected.sequences[0, len(ids) :].numpy(), logits)


def test_perplexity(loaded, theirs):
    """To three digits, on the text of a module of the standard library."""
    import torch

    text = Path(os.__file__).with_name("textwrap.py").read_text(encoding="utf-8")
    ids = loaded.tokenizer(text)["input_ids"][:PERPLEXITY_TOKENS]
    assert len(ids) == PERPLEXITY_TOKENS
    model, params, _ = loaded

    @jax.jit
    def logits_of(params, tokens):
        cache = init_cache(model.config, 1, PERPLEXITY_TOKENS, jnp.float32)
        return model.apply({"params": params}, tokens, cache, jnp.zeros(1, jnp.int32)).logits[0]

    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0].double().numpy()

    def perplexity(logits):
        logits = np.asarray(logits, np.float64)[:-1]
        top = logits.max(-1, keepdims=True)
        chosen = np.take_along_axis(logits, np.array(ids[1:])[:, None], 1)
        return float(np.exp(np.mean(np.log(np.exp(logits - top).sum(-1)) + top[:, 0] - chosen[:, 0])))

    ours, reference = perplexity(logits_of(params, np.array([ids]))), perplexity(expected)
    print(f"perplexity {ours:.5f}, transformers {reference:.5f}")
    assert abs(ours / reference - 1) < 5e-4
    assert 1 < reference < 20
