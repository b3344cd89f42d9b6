"""GGUF files as a `Source`: names and layouts brought back to Hugging Face's."""

import re
from pathlib import Path

import numpy as np

from convert.gguf_config import ROPE_FACTORS, hf_config
from convert.gguf_file import BLOCK_TYPES, GGUFFile
from convert.source import Source, TensorInfo

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(0|[1-9]\d*)\.(\w+)\.(weight|bias)")


class GGUFSource(Source):
    """One GGUF file of a llama, qwen2 or qwen3 model."""

    kind = "gguf"

    def __init__(self, path: Path, origin: str | None = None) -> None:
        """Reads the header and rebuilds the configs.

        Raises:
            ConversionError: a malformed file, or something in it that is not supported.
        """
        from convert.gguf_tokenizer import eos_token_ids

        self.origin = origin or str(path)
        self.problems = []
        self.file = GGUFFile(path)
        self.config = hf_config(self.file)
        eos = eos_token_ids(self.file)
        self.generation_config = {"bos_token_id": self.config["bos_token_id"], "eos_token_id": eos} if eos else None
        self._names = {hf_name(name): name for name in self.file.tensors if name != ROPE_FACTORS}
        self.tensors = {}
        for hf, name in self._names.items():
            shape, dtype, _, _ = self.file.tensors[name]
            self.tensors[hf] = TensorInfo(shape, dtype)
        self.default_dtype = self._default_dtype()

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """See `Source.read`."""
        values = self.file.read(self._names[name], dtype)
        heads = self._interleaved_heads(name)
        if heads is None or values.shape[0] != heads * self.config["head_dim"]:
            return values
        # llama.cpp rotates neighbouring rows of a head, Hugging Face row i with row i + H / 2
        pairs = values.reshape(heads, self.config["head_dim"] // 2, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)

    def write_tokenizer(self, directory: Path) -> list[str]:
        """See `Source.write_tokenizer`."""
        from convert.gguf_tokenizer import write_tokenizer

        return write_tokenizer(self.file, directory)

    def files(self) -> list[Path]:
        """See `Source.files`."""
        return [self.file.path]

    def _interleaved_heads(self, name: str) -> int | None:
        if self.config["model_type"] != "llama":
            return None
        if ".self_attn.q_proj." in name:
            return self.config["num_attention_heads"]
        return self.config["num_key_value_heads"] if ".self_attn.k_proj." in name else None

    def _default_dtype(self) -> str:
        kinds = {info.dtype for info in self.tensors.values()}
        if kinds & {"BF16", *BLOCK_TYPES}:
            return "bfloat16"
        return "float16" if "F16" in kinds else "float32"


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a tensor without one keeps its name and is reported as unused."""
    if name in _TOP:
        return _TOP[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _IN_BLOCK:
        return name
    return f"model.layers.{match[1]}.{_IN_BLOCK[match[2]]}.{match[3]}"
