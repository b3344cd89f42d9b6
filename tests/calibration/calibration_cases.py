"""A model with planted retrieval heads, and a small random pair."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import Decoder, ModelConfig
from jaxspec.methods import Models
from jaxspec.models import RopeConfig, init_params, param_shapes

VOCAB = 64
PLANTED = ((0, 1), (1, 4), (1, 5))  # (layer, head)


@cache
def planted_model():
    """Two layers of eight heads, four kv heads; the planted heads look for the token whose id is one higher.

    Token t has the embedding e_t. A kv head of a planted head has the key code(t - 1) and the value e_t, and the
    planted head's query is code(t): it attends to t + 1 wherever that stands, and writes e_(t+1) into the residual
    stream, which wins the softmax. All other heads have small random queries and keys, and write nothing. So the answer
    to a question that ends with t is what stands in the text, t + 1, and only planted heads can have found it.
    """
    dim, heads, kv_heads = VOCAB, 8, 4
    # at this base only the first pairs of channels turn; codes leave them at zero
    config = ModelConfig("llama", VOCAB, dim, 8, 2, heads, kv_heads, dim, 512, RopeConfig(1e12))
    rng = np.random.default_rng(0)
    code = rng.choice([-1.0, 1.0], (VOCAB, dim))
    code[:, :12] = code[:, dim // 2 : dim // 2 + 12] = 0
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), param_shapes(config))
    params["embedding"] = np.eye(VOCAB, dim, dtype=np.float32)
    params["lm_head"] = 10 * np.eye(VOCAB, dim, dtype=np.float32)
    params["final_norm"]["scale"] = np.ones(dim, np.float32)
    for layer in range(2):
        block = params[f"layers_{layer}"]
        for norm in ("attention_norm", "mlp_norm"):
            block[norm]["scale"] = np.ones(dim, np.float32)
        qkv = rng.normal(0, 0.05, block["attention"]["qkv"]["kernel"].shape)  # [D, K, G + 2, H]
        out = np.zeros(block["attention"]["out"]["kernel"].shape)  # [N, H, D]
        for head in [head for at, head in PLANTED if at == layer]:
            group, member = divmod(head, heads // kv_heads)
            qkv[:, group, member] = 0.3 * code
            qkv[1:, group, -2] = 0.3 * code[:-1]
            qkv[:, group, -1] = np.eye(dim)
            # layer 0's part stays below the token itself, so that layer 1 still looks for the same next one
            out[head] = np.eye(dim) * (0.02 if layer == 0 else 2)
        block["attention"]["qkv"]["kernel"], block["attention"]["out"]["kernel"] = (
            x.astype(np.float32) for x in (qkv, out)
        )
    return Models(Decoder(config), jax.tree.map(jnp.asarray, params))


def random_model(layers, seed, heads=4, kv_heads=2):
    config = ModelConfig("llama", 19, 16, 32, layers, heads, kv_heads, 8, 512, RopeConfig())
    return Decoder(config), init_params(config, jax.random.key(seed))


@cache
def random_pair():
    """Models(target of two layers, with a draft model's parameters) and the draft model."""
    (target, params), (draft, draft_params) = random_model(2, 0), random_model(1, 1)
    return Models(target, params, draft_params), draft
