"""Running prompts through a model in chunks."""

import jax
import jax.numpy as jnp

from jaxspec.models.decoder import Decoder
from jaxspec.types import Array, KVCache, Params
from pallas_kernels.dispatch import prefill_rows


def fill_cache(model: Decoder, params: Params, prompt: Array, prompt_length: Array, cache: KVCache) -> KVCache:
    """Writes the K/V of every prompt token before each row's last one.

    The last token is left to a forward of its own, which gives logits, scores and queries at each row's own end
    however ragged the prompts are.

    Args:
        model: the model.
        params: its parameters.
        prompt: int32 [B, P].
        prompt_length: int32 [B], at least 1.
        cache: [B, S, K, H] per layer, S >= P. Rows from prompt_length - 1 on are scratch afterwards.
    """
    batch, width = prompt.shape
    limit = max(prefill_rows(model.backend) // batch, 1)
    num_chunks = next(n for n in range(-(-width // limit), width + 1) if width % n == 0)
    chunk = width // num_chunks

    def run_chunk(i: Array, cache: KVCache) -> KVCache:
        tokens = jax.lax.dynamic_slice_in_dim(prompt, i * chunk, chunk, axis=1)
        return model.apply({"params": params}, tokens, cache, i * chunk).cache

    needed = (jnp.max(prompt_length) - 1 + chunk - 1) // chunk
    return jax.lax.fori_loop(0, needed, run_chunk, cache)
