"""A family of one's own: Phi-4, whose checkpoints hold q, k and v in one tensor, and gate and up in another.

Copied into jaxspec/models, this file is all that `jaxspec-convert microsoft/phi-4 checkpoints/phi4` and `jaxspec.load`
need. As it stands it decodes with random weights: python examples/add_a_family.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec.models.config import read_config
from jaxspec.models.families import LeafSource, llama_leaf_sources

MODEL_TYPES = ("phi3",)  # as Phi-4 calls itself in config.json
FUSED = {("qkv", "kernel"): ("q_proj", "qkv_proj"), ("gate_up", "kernel"): ("gate_proj", "gate_up_proj")}


def config_from_hf(hf):
    # what transformers assumes where the config is silent
    return read_config({"rms_norm_eps": 1e-5, **hf})


def leaf_sources(config):
    leaves = llama_leaf_sources(config)
    for path in [path for path in leaves if path[-2:] in FUSED]:
        leaves[path] = fused(leaves[path], *FUSED[path[-2:]])
    return leaves


def fused(source, first, name):
    """The same leaf from one tensor, which is cut into those that Llama has."""
    rows, columns = [shape[0] for shape in source.shapes], source.shapes[0][1]
    cuts = np.cumsum(rows)[:-1]
    return LeafSource(
        names=(source.names[0].replace(first, name),),
        shapes=((sum(rows), columns),),
        assemble=lambda tensors: source.assemble(np.split(tensors[0], cuts)),
    )


def main():
    """Assembles a tiny model as `jaxspec-convert` does, and decodes with it."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    hf = {"model_type": "phi3", **sizes, "num_attention_heads": 4, "max_position_embeddings": 512}
    config, rng, params = config_from_hf(hf), np.random.default_rng(0), {}
    for path, source in leaf_sources(config).items():
        node = params
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = jnp.asarray(source.assemble([rng.normal(0, 0.3, shape) for shape in source.shapes]), "float32")
    model = jaxspec.Decoder(config)
    output = jaxspec.generate(model, params, [[1, 2, 3]], [3], jax.random.key(0), max_new_tokens=16)
    print(output.tokens[0].tolist())


if __name__ == "__main__":
    main()
