"""How often XLA compiles, and that `stream` donates its cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import Decoder, Plain, Sampling, generate, stream
from jaxspec.methods import Models
from jaxspec.profiling import fused_step
from jaxspec.requests import bucket, check_request
from jaxspec.stream import _prefill

KEY = jax.random.key(0)


def prompts(lengths, width=None):
    width = width or max(lengths)
    return np.random.default_rng(0).integers(0, 61, (len(lengths), width)).astype(np.int32), np.array(lengths)


def test_prompt_lengths_share_programs(tiny, compiles):
    """One program per padded width, however the prompt arrives and however often; none per length or per call."""
    lengths = [*range(1, 20), 100, 127, 128, 129, 140, 159, 160]
    on_host = [prompts([n, 1]) for n in lengths] + [prompts([9, 4], width=50)]
    on_device = [tuple(jnp.asarray(x) for x in request) for request in on_host]
    with compiles() as names:
        for prompt, length in on_host + on_device + on_host:
            generate(tiny.model, tiny.params, prompt, length, KEY, max_new_tokens=3)
    assert len({bucket(n) for n in lengths}) == 2
    assert sum("_generate" in name for name in names) == 2
    # what remains makes the row keys, once per batch size and process
    assert len(names) <= 6, names
    with compiles() as names:
        for prompt, length in on_host + on_device:
            generate(tiny.model, tiny.params, prompt, length, KEY, max_new_tokens=3)
    assert names == []


def test_values_do_not_compile(tiny, compiles):
    """Temperatures, top_p, keys, EOS and pad ids, an equal model, an equal method: none of them is static."""
    prompt, length = prompts([5, 2])

    def call(**changes):
        values = {"sampling": Sampling(temperature=0.7, top_p=0.9), "eos_ids": (3,), "key": KEY, **changes}
        key, model = values.pop("key"), values.pop("model", tiny.model)
        return generate(model, tiny.params, prompt, length, key, max_new_tokens=3, **values)

    call()
    jax.random.key(1)
    with compiles() as names:
        for temperature in (0.8, 1, 2.5, np.float32(0.3), np.float64(0.3)):
            call(sampling=Sampling(temperature=temperature, top_p=0.5))
        call(sampling=Sampling(temperature=1.0, top_p=1))
        call(key=jax.random.key(1), eos_ids=[7], pad_id=5)
        call(model=Decoder(tiny.model.config), method=Plain())
    assert names == []
    greedy = generate(tiny.model, tiny.params, prompt, length, KEY, max_new_tokens=3, eos_ids=(3,))
    with compiles() as names:
        for temperature in (0, 1e-6, np.zeros(2)):
            output = call(sampling=Sampling(temperature=temperature, top_p=0.5))
            np.testing.assert_array_equal(output.tokens, greedy.tokens)
    assert names == []


def consume(tiny, n, **options):
    prompt, length = prompts([n, 1])
    return list(stream(tiny.model, tiny.params, prompt, length, KEY, max_new_tokens=6, **options))


def test_stream_compiles_once(tiny, compiles):
    with compiles() as names:
        consume(tiny, 5)
    assert sum("_prefill" in name for name in names) == 1
    assert sum("fused_step" in name for name in names) == 1
    with compiles() as names:
        for n in range(1, 12):
            consume(tiny, n)
    assert names == []


def test_stream_donates_its_cache(tiny):
    """Each step takes the buffers of the one before; without donation every step would copy every layer's cache."""
    request = check_request(tiny.model, *prompts([5, 2]), KEY, Plain(), Sampling(), 6, (), 0, None)
    models = Models(tiny.model, tiny.params)
    state, _ = _prefill(models, request, Plain(), 6)
    addresses = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.cache)]
    after, _ = fused_step(models, state, request, np.zeros(2, bool), Plain(), 6)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.cache))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after.cache)] == addresses


@pytest.mark.parametrize("per_row", [False, True])
def test_stream_leaves_the_callers_arrays_alone(tiny, per_row):
    key = jax.random.split(KEY, 2) if per_row else KEY
    prompt, length = (jnp.asarray(x) for x in prompts([5, 2]))
    temperature = jnp.full(2, 0.5)
    list(stream(tiny.model, tiny.params, prompt, length, key, max_new_tokens=6,
                sampling=Sampling(temperature=temperature)))  # fmt: skip
    assert not any(x.is_deleted() for x in (key, prompt, length, temperature, *jax.tree.leaves(tiny.params)))
