"""KnapSpec's programs compiled for an H200: whatever is skipped, and however, no cache is copied."""

import jax
import jax.numpy as jnp
import pytest
from compile_for_h200 import compile_for_h200
from test_decode_loop_memory import large_outputs

from jaxspec import Decoder, KnapSpec, ModelConfig, Plan, Sampling
from jaxspec.decode import decode_all, prefill
from jaxspec.methods import Models
from jaxspec.models import RopeConfig, init_cache, param_shapes
from jaxspec.planning import LatencyProfile, Line, PlannerOptions
from jaxspec.planning.plan import search_plan
from jaxspec.requests import check_request

pytestmark = pytest.mark.gpu_compile

LAYERS, CONTEXT, NEW_TOKENS = 3, 32768, 64
CONFIG = ModelConfig("qwen2", 4096, 512, 1024, LAYERS, 4, 2, 128, 131072, RopeConfig(1e6), qkv_bias=True)
MODEL = Decoder(CONFIG, "pallas")
STATIC = {"plan": Plan((True, False, True), (True, True, False), 4), "selection": "vegas"}


def int32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def params():
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), param_shapes(CONFIG))


@pytest.mark.parametrize("options", [{"execution": "traced"}, STATIC], ids=["traced", "static, over selected rows"])
def test_decode_loop(options):
    method = KnapSpec(max_draft=4, **options)

    def start(params, prompt, length):
        request = check_request(MODEL, prompt, length, jax.random.key(0), method, Sampling(), NEW_TOKENS, (5,), 0, None)
        return prefill(Models(MODEL, params), request, method, NEW_TOKENS), request

    state, request = jax.eval_shape(start, params(), int32(1, CONTEXT - 128), int32(1))

    def run(params, state, request):
        return decode_all(Models(MODEL, params), state, request, method, NEW_TOKENS)

    compiled = compile_for_h200(run, params(), state, request, donate_argnums=1)
    keys = state.cache[0].k
    outputs = large_outputs(compiled.as_text(), keys.size)
    # the kernel that writes new rows: once in every layer that a draft may run, and in every layer that verifies
    drafted = LAYERS if "execution" in options else sum(STATIC["plan"].attn)
    assert [opcode for opcode, _ in outputs] == ["custom-call"] * (drafted + LAYERS), outputs
    assert compiled.memory_analysis().temp_size_in_bytes < keys.size * keys.dtype.itemsize


def test_planner():
    line = Line(1e-8, 1e-5)
    costs = LatencyProfile(LAYERS, 1, 11, line, 1e-5, 1e-5, line, 1e-5, 1e-5, 0.0).costs()
    cache = jax.eval_shape(lambda: init_cache(CONFIG, 1, CONTEXT, jnp.bfloat16))

    def run(params, cache, *tokens):
        found = search_plan.__wrapped__(Models(MODEL, params), cache, *tokens, costs, PlannerOptions(max_cells=16))
        return found.cell, found.frontier.attn

    compiled = compile_for_h200(run, params(), cache, int32(1, CONTEXT), int32(1), int32(1, NEW_TOKENS), int32(1))
    copied = [line for opcode, line in large_outputs(compiled.as_text(), cache[0].k.size) if "32768,2,128" in line]
    assert not copied
