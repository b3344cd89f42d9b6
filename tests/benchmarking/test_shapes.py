"""Known sizes: their parameter counts, what a step reads, and what does not fit."""

import jax
import pytest

from jaxspec.benchmarking.shapes import (
    SHAPES,
    cache_bytes,
    check_memory,
    random_cache,
    random_params,
    step_bytes,
    weight_bytes,
)

# billions of parameters as the models' cards state them, embeddings included
BILLIONS = {
    "qwen2.5-0.5b": 0.49,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-7b": 7.61,
    "qwen2.5-32b": 32.5,
    "qwen2.5-72b": 72.7,
    "llama3.1-8b": 8.03,
    "llama3.1-70b": 70.6,
    "qwen3-4b": 4.0,
    "qwen3-8b": 8.2,
    "qwen3-32b": 32.8,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_parameter_counts(name):
    assert weight_bytes(SHAPES[name], 1) / 1e9 == pytest.approx(BILLIONS[name], rel=0.015)


def test_bytes_are_those_of_the_arrays():
    config = SHAPES["tiny"]
    params, cache = random_params(config), random_cache(config, 3, 128)
    assert weight_bytes(config, 2) == sum(x.nbytes for x in jax.tree.leaves(params))
    assert cache_bytes(config, 3, 128, 2) == sum(x.nbytes for x in jax.tree.leaves(cache))
    # the table is tied: it is read as the head
    assert step_bytes(config, 3, 128, 2) == weight_bytes(config, 2) + cache_bytes(config, 3, 128, 2)
    untied = SHAPES["llama3.1-8b"]
    assert step_bytes(untied, 1, 0, 2) == weight_bytes(untied, 2) - 2 * 128256 * 4096


def test_what_does_not_fit_is_refused_with_its_sum():
    with pytest.raises(ValueError, match=r"GiB of weights \+ .* GiB of cache = .* GiB; the device has"):
        check_memory("qwen2.5-72b", SHAPES["qwen2.5-72b"], 1024, 131072, 2)
    check_memory("tiny", SHAPES["tiny"], 1, 128, 2)
