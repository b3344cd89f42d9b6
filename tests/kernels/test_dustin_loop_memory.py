"""Dustin's decode loop compiled for an H200: refreshes and fallbacks, which run now and then, copy no cache either."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from compile_for_h200 import compile_for_h200
from test_decode_loop_memory import CONFIG, large_outputs

from jaxspec.decode import decode_all, prefill
from jaxspec.methods import Dustin, Models
from jaxspec.models import Decoder, param_shapes
from jaxspec.requests import check_request
from jaxspec.sampling import Sampling
from pallas_kernels.dispatch import use_backend

pytestmark = pytest.mark.gpu_compile

TARGET = dataclasses.replace(CONFIG, num_layers=1)
DRAFT = dataclasses.replace(TARGET, hidden_size=896, intermediate_size=4864, num_heads=14, num_kv_heads=2, head_dim=64)
NEW_TOKENS = 64


def test_the_loop_updates_both_caches_in_place():
    heads = {"target_heads": ((0, (0, 1, 2, 3)),), "draft_heads": ((0, (1, 2, 8, 9)),)}
    method = Dustin(
        model=Decoder(DRAFT, "pallas"), split=160, sparse_drafts="last", refresh_every=8, min_arr=0.5, **heads
    )
    params, draft_params = (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), param_shapes(config))
        for config in (TARGET, DRAFT)
    )
    models = Models(Decoder(TARGET, "pallas"), params, draft_params)

    def start(models, prompt, length):
        key = jax.random.key(0)
        request = check_request(
            models.target, prompt, length, key, method, Sampling(), NEW_TOKENS, (5,), 0, models.draft_params
        )
        return prefill(models, request, method, NEW_TOKENS), request

    prompt, length = jax.ShapeDtypeStruct((16, 32768), jnp.int32), jax.ShapeDtypeStruct((16,), jnp.int32)
    with use_backend("pallas"):
        state, request = jax.eval_shape(start, models, prompt, length)
        compiled = compile_for_h200(
            lambda models, state, request: decode_all(models, state, request, method, NEW_TOKENS),
            models,
            state,
            request,
            donate_argnums=1,
        )
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    target_keys, draft_keys = state.cache[0].k, state.method_state.own.cache[0].k
    outputs = large_outputs(hlo, draft_keys.size)
    # forwards: two of the draft model, and of the target a refresh, a verification and its full repetition
    assert [opcode for opcode, _ in outputs].count("custom-call") == 5, outputs
    # a row that does not fall back gets its own few rows back, in place
    others = [line for opcode, line in outputs if opcode != "custom-call"]
    assert len(others) == 2
    assert all("scatter" in line for line in others), others
    assert memory.alias_size_in_bytes >= 2 * 2 * (target_keys.size + draft_keys.size)
    # logits of a refresh's 16 rows are the largest temporary
    assert memory.temp_size_in_bytes < 2 * 16 * 16 * 4 * CONFIG.vocab_size
    assert memory.temp_size_in_bytes < 2 * target_keys.size
    assert " sort(" not in hlo
