"""Rounds by phase: draft, verify, accept and observe as programs of their own, timed beside the fused round."""

import statistics
import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.decode import commit, decode_step, draft_tokens
from jaxspec.methods.base import Method, Models
from jaxspec.requests import Request
from jaxspec.types import Array, DecodeState, Draft, Finish, ForwardOut, Stats, Verdict


class Profile(NamedTuple):
    """Median seconds of a round's phases, each with its launch and wait, and of the whole round as one program.

    None where a run had too few rounds. The first round of each kind is left out: it compiles.
    """

    draft: float | None
    verify: float | None
    accept: float | None
    observe: float | None
    round: float | None
    num_rounds: int  # rounds measured as one program


class RoundTimer:
    """Runs rounds in place of the fused program, every second one by phases; both advance the same state."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {name: [] for name in (*Profile._fields[:4], "round")}
        self._fused = False

    def step(
        self, models: Models, state: DecodeState, request: Request, stopped: Array, method: Method, max_new_tokens: int
    ) -> tuple[DecodeState, Any]:
        """One round; the arguments and results of the fused program."""
        self._fused = not self._fused
        if self._fused:
            return self._timed("round", fused_step, models, state, request, stopped, method, max_new_tokens)
        state, draft, length = self._timed("draft", _draft, models, state, request, stopped, method)
        state, out = self._timed("verify", _verify, models, state, draft, method)
        state, verdict, tokens, count = self._timed("accept", _accept, state, draft, out, request, max_new_tokens)
        state, counters = self._timed("observe", _observe, models, state, out, draft, verdict, length, method)
        return state, (tokens, count, *counters)

    def profile(self) -> Profile:
        """What was measured so far."""
        seconds = {name: values[1:] for name, values in self._seconds.items()}
        medians = {name: statistics.median(values) if values else None for name, values in seconds.items()}
        return Profile(**medians, num_rounds=len(seconds["round"]))

    def _timed(self, name: str, function: Any, *args: Any) -> Any:
        start = time.perf_counter()
        result = jax.block_until_ready(function(*args))
        self._seconds[name].append(time.perf_counter() - start)
        return result


def stop_rows(state: DecodeState, stopped: Array) -> DecodeState:
    """Ends the rows that the host has seen a stop string in."""
    finish = jnp.where(stopped & (state.finish == Finish.RUNNING), jnp.int8(Finish.STOP), state.finish)
    return state.replace(finish=finish)


@partial(jax.jit, static_argnames=("method", "max_new_tokens"), donate_argnames="state")
def fused_step(
    models: Models, state: DecodeState, request: Request, stopped: Array, method: Method, max_new_tokens: int
) -> tuple[DecodeState, Any]:
    """A round as one program; returns the state and (tokens, count, finish, stats)."""
    state, tokens, count = decode_step(models, stop_rows(state, stopped), request, method, max_new_tokens)
    return state, (tokens, count, state.finish, state.stats)


@partial(jax.jit, static_argnames="method", donate_argnames="state")
def _draft(
    models: Models, state: DecodeState, request: Request, stopped: Array, method: Method
) -> tuple[DecodeState, Draft, Array]:
    state = stop_rows(state, stopped)
    state, draft = draft_tokens(models.for_running(state), state, request, method)
    return state, draft, state.length


@partial(jax.jit, static_argnames="method", donate_argnames="state")
def _verify(models: Models, state: DecodeState, draft: Draft, method: Method) -> tuple[DecodeState, ForwardOut]:
    out = method.verify(models.for_running(state), state, draft)
    # the cache leaves by one way only: a second result would be a copy of it
    return state.replace(cache=out.cache), out._replace(cache=())


@partial(jax.jit, static_argnames="max_new_tokens", donate_argnames="state")
def _accept(
    state: DecodeState, draft: Draft, out: ForwardOut, request: Request, max_new_tokens: int
) -> tuple[DecodeState, Verdict, Array, Array]:
    return commit(state, draft, out, request, max_new_tokens)


@partial(jax.jit, static_argnames="method", donate_argnames="state")
def _observe(
    models: Models, state: DecodeState, out: ForwardOut, draft: Draft, verdict: Verdict, length: Array, method: Method
) -> tuple[DecodeState, tuple[Array, Stats]]:
    out = out._replace(cache=state.cache)
    method_state = method.observe(models.for_running(state), state.method_state, out, draft, verdict, length)
    # results of their own, which outlive the donated state
    return state.replace(method_state=method_state), (state.finish, state.stats)
