"""The whole decode loop compiled for an H200: caches are updated in place, and nothing as large as one is made."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from compile_for_h200 import compile_for_h200
from machine_code import usage

from jaxspec.decode import decode_all, prefill
from jaxspec.methods import Models, Plain, Vegas
from jaxspec.models import Decoder, ModelConfig, RopeConfig, init_cache, param_shapes
from jaxspec.prefill import fill_cache
from jaxspec.requests import check_request
from jaxspec.sampling import Sampling
from pallas_kernels.dispatch import MIN_CUDNN

pytestmark = pytest.mark.gpu_compile

# two layers with the sizes of Qwen2.5-7B
CONFIG = ModelConfig("qwen2", 152064, 3584, 18944, 2, 28, 4, 128, 131072, RopeConfig(1e6), qkv_bias=True)
NEW_TOKENS = 256
# These name an array that exists, or computations that are looked at themselves.
NO_OUTPUT = {"parameter", "get-tuple-element", "bitcast", "tuple", "while", "conditional"}


def large_outputs(hlo, elements):
    """(opcode, line) of every instruction that writes an array of at least `elements`, fused ones aside."""
    fused = set(re.findall(r"calls=%?([\w.-]+)", hlo))
    found, computation = [], ""
    for line in hlo.splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.-]+) \(", line)
        if header:
            computation = header[1]
        instruction = re.match(r"\s+(?:ROOT )?%?[\w.-]+ = (.*?) ([\w-]+)\(", line)
        if not instruction or computation in fused or instruction[2] in NO_OUTPUT:
            continue
        shapes = re.findall(r"\w\d+\[([\d,]*)\]", instruction[1])
        if any(math.prod(map(int, filter(None, shape.split(",")))) >= elements for shape in shapes):
            found.append((instruction[2], line.strip()))
    return found


@pytest.mark.parametrize(
    ("method", "batch", "context"),
    [(Plain(), 1, 32768), (Plain(), 16, 4096), (Vegas(), 1, 32768)],
    ids=["plain-1", "plain-16", "vegas-1"],
)
def test_decode_loop(method, batch, context):
    model = Decoder(CONFIG, "pallas")
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), param_shapes(CONFIG))

    def start(params, prompt, length):
        key, sampling = jax.random.key(0), Sampling(temperature=0.7)
        request = check_request(model, prompt, length, key, method, sampling, NEW_TOKENS, (5,), 0, None)
        return prefill(Models(model, params), request, method, NEW_TOKENS), request

    prompt, length = jax.ShapeDtypeStruct((batch, context), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    state, request = jax.eval_shape(start, params, prompt, length)

    def run(params, state, request):
        return decode_all(Models(model, params), state, request, method, NEW_TOKENS)

    compiled = compile_for_h200(run, params, state, request, donate_argnums=1)
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    keys = state.cache[0].k
    cache_bytes = keys.size * keys.dtype.itemsize

    outputs = large_outputs(hlo, keys.size)
    # The kernel that writes new rows into the caches, once a layer and forward, is all that hands them on. The drafts
    # of a round are a loop around one forward.
    forwards = 1 + (method.max_draft > 0)
    assert [opcode for opcode, _ in outputs] == ["custom-call"] * (CONFIG.num_layers * forwards), outputs
    assert all("output_to_operand_aliasing" in line for _, line in outputs)

    assert memory.alias_size_in_bytes >= 2 * CONFIG.num_layers * cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes
    assert " sort(" not in hlo

    spilled = {name: use.stack for name, use in usage(compiled).items() if use.stack}
    assert not spilled


# cuDNN need not be there to compile calls of it; a chunk is 8,192 rows
def test_prefill_by_cudnn(monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.has_cudnn", lambda: True)
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: MIN_CUDNN)
    model = Decoder(CONFIG, "pallas")
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), param_shapes(CONFIG))
    prompt, length = jax.ShapeDtypeStruct((1, 32768), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    # so many rows that no activation of a chunk is as large
    cache = jax.eval_shape(lambda: init_cache(CONFIG, 1, 2**20, jnp.bfloat16))

    compiled = compile_for_h200(functools.partial(fill_cache, model), params, prompt, length, cache, donate_argnums=3)
    outputs = large_outputs(compiled.as_text(), cache[0].k.size)
    # the kernel that writes new rows, once a layer
    assert [opcode for opcode, _ in outputs] == ["custom-call"] * CONFIG.num_layers, outputs
    # A first chunk takes one call of cuDNN, and later ones take two; of the last layer only the cache is used.
    assert compiled.as_text().count('custom_call_target="__cudnn$fmhaSoftmax"') == 3 * (CONFIG.num_layers - 1)


def test_a_copy_of_a_cache_would_be_found():
    cache = jax.ShapeDtypeStruct((1, 4096, 4, 128), jnp.bfloat16)

    def reversed_rows(cache):
        return jax.lax.while_loop(lambda x: x[0, 0, 0, 0] < 1, lambda x: x[:, ::-1] + 1, cache)

    assert large_outputs(compile_for_h200(reversed_rows, cache, donate_argnums=0).as_text(), cache.size)
