"""GGUF files made of Hugging Face directories the way llama.cpp's converter makes them."""

import json
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize
from safetensors import safe_open

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def interleave(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + H / 2 of a head become neighbours."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(path: Path, directory: Path, kind: str = "F32", pre: str = "gpt-2", **metadata) -> None:
    """Writes the model of `directory`; matrices get the type `kind`. `metadata` adds keys (`__` for `.`)."""
    config = json.loads((directory / "config.json").read_text())
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") in ("yarn", "linear"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(directory))
    write_tokenizer(writer, directory, pre)
    for key, value in metadata.items():
        writer.add_key_value(key.replace("__", "."), *value)
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                add_tensor(writer, config, name, tensors.get_tensor(name), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer: gguf.GGUFWriter, config: dict, name: str, values: np.ndarray, kind: str) -> None:
    if config["model_type"] == "llama" and ".q_proj" in name:
        values = interleave(values, config["num_attention_heads"])
    if config["model_type"] == "llama" and ".k_proj" in name:
        values = interleave(values, config["num_key_value_heads"])
    if values.ndim == 1:
        kind = "F32"
    quantization = gguf.GGMLQuantizationType[kind]
    raw = quantize(np.ascontiguousarray(values, np.float32), quantization)
    writer.add_tensor(gguf_name(name), raw, raw_dtype=None if kind in ("F32", "F16") else quantization)


def llama3_factors(directory: Path) -> np.ndarray:
    """What divides the default frequencies to give transformers' own llama3 frequencies."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = AutoConfig.from_pretrained(directory)
    scaled = LlamaRotaryEmbedding(config).inv_freq
    theta = config.rope_parameters["rope_theta"]
    plain = theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    return (plain / scaled.numpy()).astype(np.float32)


def write_tokenizer(writer: gguf.GGUFWriter, directory: Path, pre: str) -> None:
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in ("<s>", "</s>") else 1 for t in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
