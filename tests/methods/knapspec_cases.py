"""A tiny model and KnapSpec's runs over it, shared by the tests of its drafts and of its plans."""

from functools import cache, partial

import jax
import numpy as np
from method_cases import GREEDY, LENGTHS, assert_same_greedy, prompts, tiny_model

from jaxspec import KnapSpec, LatencyProfile, Plain
from jaxspec.decode import decode_all, prefill
from jaxspec.methods import Models
from jaxspec.methods.knapspec import traced_plan
from jaxspec.planning import Line
from jaxspec.requests import check_request

LAYERS, NEW, MOST = 2, 20, 4
KEY = jax.random.key(0)


def profile(batch=3, layers=LAYERS, overhead=1.0):
    """Rounds cost so much besides their forwards that drafts pay at any acceptance."""
    line, none = Line(1e-6, 1e-3), Line(0.0, 0.0)
    return LatencyProfile(layers, batch, MOST + 1, line, 1e-3, 1e-3, line, 1e-3, 1e-3, overhead, line, none)


@cache
def models():
    return Models(*tiny_model(LAYERS))


@cache
def plain():
    """Plain decoding's last state."""
    return end_state(Plain())


def request_of(method):
    return check_request(models().target, *prompts(), KEY, method, GREEDY, NEW, (), 0, None)


@partial(jax.jit, static_argnames="method")
def begin(models, request, method):
    return prefill(models, request, method, NEW)


@partial(jax.jit, static_argnames="method")
def finish(models, request, state, method):
    return decode_all(models, state, request, method, NEW)


@cache
def begun(selection=""):
    """The state after prefill of any static plan over a selection; traced plans wrap its method state."""
    method = KnapSpec(max_draft=MOST, selection=selection)
    return begin(models(), request_of(method), method)


def end_state(method):
    """The state at the end of a run."""
    state = begun(getattr(method, "selection", ""))
    if isinstance(method, KnapSpec) and method.execution == "traced":
        state = state.replace(method_state=traced_plan(method.plan, state.method_state))
        method = method.with_plan(None)
    return jax.tree.map(np.asarray, finish(models(), request_of(method), state, method).replace(keys=None))


def assert_plain(state):
    """Tokens and committed cache are plain decoding's: nothing that drafts wrote is left in it."""
    prompt, _ = prompts()
    for b in range(3):
        assert_same_greedy(models(), prompt[b, : LENGTHS[b]], state.tokens[b, :NEW], plain().tokens[b, :NEW])
        rows = slice(0, int(plain().length[b]))
        for mine, other in zip(jax.tree.leaves(state.cache), jax.tree.leaves(plain().cache), strict=True):
            np.testing.assert_allclose(mine[b, rows], other[b, rows], atol=1e-5)
