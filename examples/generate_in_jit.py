"""Best of n samples, all inside your own jit: generate, score by log-probability, choose.

python examples/generate_in_jit.py [CHECKPOINT]     # without one, a tiny random model shows how it goes together
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp

import jaxspec
from jaxspec.models import RopeConfig, init_params

PROMPT = "The sea was calm that morning, and"


@partial(jax.jit, static_argnames=("model", "eos_ids", "num_samples", "max_new_tokens"))
def best_of(
    model, params, prompt, key, temperature, *, eos_ids, num_samples, max_new_tokens
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sample with the highest mean log-probability, its length, and the scores of all: one program."""
    output = jaxspec.generate(
        model,
        params,
        jnp.tile(prompt, (num_samples, 1)),
        jnp.full(num_samples, prompt.shape[0]),
        key,
        sampling=jaxspec.Sampling(temperature=temperature, top_p=0.95),
        max_new_tokens=max_new_tokens,
        eos_ids=eos_ids,
        logprobs=True,
    )
    scores = jnp.sum(output.logprobs, axis=1) / output.lengths
    best = jnp.argmax(scores)
    return output.tokens[best], output.lengths[best], scores


def main(path: str | None = None) -> None:
    """Runs the pipeline on a checkpoint, or on a tiny random model."""
    if path is None:
        config = jaxspec.ModelConfig("llama", 64, 32, 64, 2, 4, 2, 8, 512, RopeConfig())
        model, params, tokenizer, eos_ids = jaxspec.Decoder(config), init_params(config, jax.random.key(1)), None, ()
    else:
        loaded = jaxspec.load(path)
        model, params, tokenizer, eos_ids = *loaded, loaded.eos_ids
    prompt = jnp.array(tokenizer(PROMPT)["input_ids"] if tokenizer else [1, 2, 3])
    options = {"eos_ids": eos_ids, "num_samples": 4, "max_new_tokens": 32}
    for temperature in (0.5, 1.0):  # a new temperature is a new value, not a new program
        tokens, length, scores = best_of(model, params, prompt, jax.random.key(0), temperature, **options)
        ids = tokens[:length].tolist()
        print(f"temperature {temperature}: scores {scores.round(2).tolist()}")
        print(tokenizer.decode(ids, skip_special_tokens=True) if tokenizer else ids)


if __name__ == "__main__":
    main(*sys.argv[1:])
