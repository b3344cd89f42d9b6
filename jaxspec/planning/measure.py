"""Measuring a `LatencyProfile` on this device, with the kernels and the dtype that decoding uses."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decode import decode_all
from jaxspec.methods.base import Method, Models
from jaxspec.methods.plain import Plain
from jaxspec.models import Decoder, ModelConfig
from jaxspec.planning.latency import LatencyProfile, fit_line
from jaxspec.requests import Request, check_request
from jaxspec.sampling import Sampling
from jaxspec.types import Array, DecodeState, Draft, KVCache, LayerCache, LayerMask, Stats, Verdict

# weights and rows that a loop reads again before it has read this much else may come from a GPU's cache, which those
# of a whole model never do; 4 times the 50 MB of an H200
WORKING_SET = 200 << 20


@dataclass(frozen=True)
class Measurement:
    """A profile and what it was fitted to. Times are medians, in seconds."""

    profile: LatencyProfile
    contexts: tuple[int, ...]
    attention: tuple[float, ...]  # one layer, one query row per sequence, at each context
    verify_attention: tuple[float, ...]  # one layer, `profile.rows` query rows
    selected: tuple[float, ...] | None  # one layer, selected rows
    scoring: tuple[float, ...] | None  # one layer, per round
    plain: tuple[float, ...]  # a whole step of plain decoding
    verify: tuple[float, ...] | None  # a whole verification, where it was asked for
    fit_error: float  # largest relative error of the fitted attention times
    seconds: float  # that measuring took, compilation included

    @property
    def plain_error(self) -> float:
        """Largest relative error of the predicted plain steps."""
        predicted = [self.profile.round(0, 0, 0, n) for n in self.contexts]
        return max(abs(p - t) / t for p, t in zip(predicted, self.plain, strict=True))


def measure(
    models: Models,
    batch: int,
    contexts: Sequence[int],
    *,
    max_draft: int = 10,
    selection: Method | None = None,
    whole_verify: bool = False,
    steps: int = 16,
    repeats: int = 5,
    progress: Callable[[str], None] = lambda text: None,
) -> Measurement:
    """Times the parts of decoding, each in a loop on the device, and fits the latency model.

    Sublayers are timed as the difference that so many of them make to a forward that runs nothing but embedding and
    output head. Only as many layers are used as it takes to defeat the device's cache.

    Args:
        models: the target.
        batch: sequences.
        contexts: lengths at which attention is timed; two or more for a slope.
        max_draft: verification is timed at max_draft + 1 query rows.
        selection: a method whose drafts attend to selected rows, timed as well.
        whole_verify: also time verification as one forward of all layers, which compiles it.
        steps: forwards per timing.
        repeats: timings per median, after one that does not count.
        progress: called with a line of text before each step.

    Raises:
        ValueError: no contexts, or they exceed the model's positions.
    """
    started = time.perf_counter()
    contexts, rows = tuple(sorted(set(contexts))), max_draft + 1
    limit = models.target.config.capacity_limit - rows
    if not contexts or contexts[0] < 1 or contexts[-1] > limit:
        raise ValueError(f"contexts must lie in 1..{limit}, got {list(contexts)}")
    if batch < 1 or max_draft < 1:
        raise ValueError(f"batch and max_draft must be at least 1, got {batch} and {max_draft}")
    bench = _Bench(models, batch, contexts, rows, steps, repeats, selection)
    k = bench.num_layers
    nothing, attention, mlp = (False,) * k, LayerMask((True,) * k, (False,) * k), LayerMask((False,) * k, (True,) * k)
    times = {}
    for count in (1, rows):
        progress(f"output head, MLP and attention with {count} query rows")
        head = bench.forward(count, LayerMask(nothing, nothing))[0]
        each = [max(t - head, 0.0) / k for t in bench.forward(count, attention, contexts)]
        times[count] = head, max(bench.forward(count, mlp)[0] - head, 0.0) / k, each
    selected = scoring = None
    if selection is not None:
        progress("attention to selected rows, scoring and selecting")
        selected = [max(t - times[1][0], 0.0) / k for t in bench.selected(attention)]
        unscored = bench.forward(rows, LayerMask((True,) * k, (True,) * k), contexts)
        scoring = [max(t - u, 0.0) / k for t, u in zip(bench.scored(), unscored, strict=True)]
    progress("plain decoding")
    del bench
    plain = _plain_steps(models, batch, contexts, steps, repeats)
    verify = None
    if whole_verify:
        progress(f"verification of {max_draft} drafts")
        whole = _Bench(models, batch, contexts, rows, steps, repeats, None, models.target.config.num_layers)
        verify = tuple(whole.forward(rows, None, contexts))
    (line, error), (verify_line, verify_error) = (fit_line(contexts, times[count][2]) for count in (1, rows))
    profile = LatencyProfile(
        num_layers=models.target.config.num_layers,
        batch=batch,
        rows=rows,
        attention=line,
        mlp=times[1][1],
        head=times[1][0],
        verify_attention=verify_line,
        verify_mlp=times[rows][1],
        verify_head=times[rows][0],
        overhead=0.0,
        selected=None if selected is None else fit_line(contexts, selected)[0],
        scoring=None if scoring is None else fit_line(contexts, scoring)[0],
    )
    rest = statistics.median(t - profile.round(0, 0, 0, n) for n, t in zip(contexts, plain, strict=True))
    return Measurement(
        profile=dataclasses.replace(profile, overhead=max(rest, 0.0)),
        contexts=contexts,
        attention=tuple(times[1][2]),
        verify_attention=tuple(times[rows][2]),
        selected=None if selected is None else tuple(selected),
        scoring=None if scoring is None else tuple(scoring),
        plain=tuple(plain),
        verify=verify,
        fit_error=max(error, verify_error),
        seconds=time.perf_counter() - started,
    )


_measured: dict[tuple[Any, ...], LatencyProfile] = {}


def measured_profile(
    models: Models, batch: int, longest: int, max_draft: int, selection: Method | None
) -> LatencyProfile:
    """The profile for runs of up to `longest` tokens, measured once per process, model and shape."""
    config, dtype = models.target.config, models.params["embedding"].dtype
    longest = min(longest, config.capacity_limit - max_draft - 1)
    contexts = sorted({max(longest // 4, 1), max(longest // 2, 1), max(longest, 1)})
    key = (models.target, str(dtype), batch, tuple(contexts), max_draft, selection)
    if key not in _measured:
        _measured[key] = measure(models, batch, contexts, max_draft=max_draft, selection=selection).profile
    return _measured[key]


def layers_to_time(config: ModelConfig, itemsize: int) -> int:
    """How many layers make a loop read more than a device's cache holds in each of the timed forwards."""
    kv = 2 * config.hidden_size * config.head_dim * (config.num_heads + config.num_kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    needed = math.ceil(WORKING_SET / (min(kv, mlp) * itemsize))
    return min(max(needed, 2), config.num_layers)


class _Bench:
    """Loops of forwards over caches of random rows, on the model's first layers."""

    def __init__(
        self,
        models: Models,
        batch: int,
        contexts: Sequence[int],
        rows: int,
        steps: int,
        repeats: int,
        selection: Method | None,
        num_layers: int | None = None,
    ) -> None:
        dtype = models.params["embedding"].dtype
        self.num_layers = num_layers or layers_to_time(models.target.config, dtype.itemsize)
        config = dataclasses.replace(models.target.config, num_layers=self.num_layers)
        self._models = Models(Decoder(config, models.target.backend), models.params)
        self._contexts, self._rows, self._steps, self._repeats = contexts, rows, steps, repeats
        self._selection = selection
        self._cache = random_cache(config, batch, -(-(contexts[-1] + rows) // 128) * 128, dtype)

    def forward(self, count: int, layers: LayerMask | None, contexts: Sequence[int] = (0,)) -> list[float]:
        """Seconds of one forward of `count` query rows per sequence behind so many rows."""
        return [self._time(partial(_forwards, layers=layers, count=count), n) for n in contexts]

    def selected(self, layers: LayerMask) -> list[float]:
        """Seconds of one forward of one query row over selected rows, at each context."""
        run = partial(_selected_forwards, layers=layers, method=self._selection)
        return [self._time(run, n) for n in self._contexts]

    def scored(self) -> list[float]:
        """Seconds of a verification that scores and selects rows, at each context."""
        run = partial(_scored_forwards, count=self._rows, method=self._selection)
        return [self._time(run, n) for n in self._contexts]

    def _time(self, run: Callable[..., Any], context: int) -> float:
        times = []
        for repeat in range(self._repeats + 1):
            jax.block_until_ready(self._cache)
            started = time.perf_counter()
            tokens, self._cache = run(self._models, self._cache, np.int32(context), steps=self._steps)
            jax.block_until_ready(tokens)
            if repeat:
                times.append((time.perf_counter() - started) / self._steps)
        return statistics.median(times)


def random_cache(config: ModelConfig, batch: int, capacity: int, dtype: Any) -> KVCache:
    """A cache of random rows: zeros would run faster than data."""
    shape = (batch, capacity, config.num_kv_heads, config.head_dim)
    draw = jax.jit(lambda key: jax.random.normal(key, shape, dtype))
    keys = jax.random.split(jax.random.key(0), 2 * config.num_layers)
    return tuple(LayerCache(draw(keys[2 * i]), draw(keys[2 * i + 1])) for i in range(config.num_layers))


@partial(jax.jit, static_argnames=("layers", "count", "steps"), donate_argnames="cache")
def _forwards(
    models: Models, cache: KVCache, start: Array, *, layers: LayerMask | None, count: int, steps: int
) -> tuple[Array, KVCache]:
    def step(_: Array, carry: tuple[Array, KVCache]) -> tuple[Array, KVCache]:
        out = models.forward(carry[0], carry[1], start, layers=layers)
        return jnp.argmax(out.logits, axis=-1).astype(jnp.int32), out.cache

    # each forward reads what the one before chose, so that none can be left out
    return jax.lax.fori_loop(0, steps, step, (jnp.zeros((cache[0].k.shape[0], count), jnp.int32), cache))


@partial(jax.jit, static_argnames=("layers", "method", "steps"), donate_argnames="cache")
def _selected_forwards(
    models: Models, cache: KVCache, start: Array, *, layers: LayerMask, method: Method, steps: int
) -> tuple[Array, KVCache]:
    state = _selecting_state(models, cache, start, method)
    selection = method.draft_selection(models, state)

    def step(_: Array, carry: tuple[Array, KVCache]) -> tuple[Array, KVCache]:
        out = models.forward(carry[0], carry[1], state.length, layers=layers, selection=selection)
        return jnp.argmax(out.logits, axis=-1).astype(jnp.int32), out.cache

    return jax.lax.fori_loop(0, steps, step, (state.last_token[:, None], state.cache))


@partial(jax.jit, static_argnames=("count", "method", "steps"), donate_argnames="cache")
def _scored_forwards(
    models: Models, cache: KVCache, start: Array, *, count: int, method: Method, steps: int
) -> tuple[Array, KVCache]:
    state = _selecting_state(models, cache, start, method)
    batch, zeros = state.length.shape[0], jnp.zeros_like(state.length)

    def step(_: Array, carry: tuple[Array, KVCache, Any]) -> tuple[Array, KVCache, Any]:
        tokens, cache, own = carry
        draft = Draft(tokens[:, 1:], zeros + count - 1, None)
        out = models.forward(tokens, cache, state.length, collect=method.verify_collect(draft))
        own = method.observe(models, own, out, draft, Verdict(zeros, tokens[:, 0]), state.length)
        # the next forward depends on the selection, so that it cannot be left out
        used = sum(jnp.sum(leaf[..., :1]).astype(jnp.float32) for leaf in jax.tree.leaves(own))
        tokens = jnp.argmax(out.logits + used * 1e-30, axis=-1).astype(jnp.int32)
        return tokens, out.cache, own

    carry = (jnp.zeros((batch, count), jnp.int32), state.cache, state.method_state)
    return jax.lax.fori_loop(0, steps, step, carry)[:2]


def _selecting_state(models: Models, cache: KVCache, start: Array, method: Method) -> DecodeState:
    """A state of so many committed rows, with the method's own as it is after a prefill."""
    batch = cache[0].k.shape[0]
    zeros, length = jnp.zeros(batch, jnp.int32), jnp.full(batch, start, jnp.int32)
    out = models.forward(zeros[:, None], cache, length - 1, collect=method.prefill_collect(zeros))
    own = method.init(models, zeros[:, None], length, out)
    return _state(out.cache, length, zeros, own, jax.random.split(jax.random.key(0), batch), 1)


def _state(cache: KVCache, length: Array, token: Array, own: Any, keys: Array, max_new_tokens: int) -> DecodeState:
    zeros = jnp.zeros_like(length)
    trace = jnp.zeros((length.shape[0], max_new_tokens), jnp.int16)
    return DecodeState(
        tokens=jnp.zeros((length.shape[0], max_new_tokens + 1), jnp.int32),
        num_tokens=zeros,
        length=length,
        last_token=token,
        finish=jnp.zeros(length.shape, jnp.int8),
        cache=cache,
        method_state=own,
        keys=keys,
        round=jnp.int32(1),
        stats=Stats(zeros, zeros, trace, trace),
        logprobs=None,
    )


def _plain_steps(models: Models, batch: int, contexts: Sequence[int], steps: int, repeats: int) -> list[float]:
    """Seconds of a step of the decode loop without drafts, at each context."""
    config, dtype = models.target.config, models.params["embedding"].dtype
    key, plain = jax.random.key(0), Plain()
    request = check_request(
        models.target, np.zeros((batch, 1), np.int32), np.ones(batch, np.int32), key, plain, Sampling(), steps, (), 0,
        None,
    )  # fmt: skip
    cache = random_cache(config, batch, -(-(contexts[-1] + steps + 1) // 128) * 128, dtype)
    result = []
    for n in contexts:
        times = []
        for repeat in range(repeats + 1):
            jax.block_until_ready(cache)
            started = time.perf_counter()
            done, cache = _plain_loop(models, cache, np.int32(n), request, steps)
            jax.block_until_ready(done)
            if repeat:
                times.append((time.perf_counter() - started) / steps)
        result.append(statistics.median(times))
    return result


@partial(jax.jit, static_argnames="steps", donate_argnames="cache")
def _plain_loop(models: Models, cache: KVCache, start: Array, request: Request, steps: int) -> tuple[Array, KVCache]:
    batch = cache[0].k.shape[0]
    length = jnp.full(batch, start, jnp.int32)
    state = _state(cache, length, jnp.zeros(batch, jnp.int32), (), request.keys, steps)
    state = decode_all(models, state, request, Plain(), steps)
    return state.tokens, state.cache


def describe(models: Models, measurement: Measurement) -> dict[str, Any]:
    """Device, versions, shapes and raw times, for a profile's file."""
    config = models.target.config
    sizes = ("model_type", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    raw = {f.name: getattr(measurement, f.name) for f in dataclasses.fields(measurement) if f.name != "profile"}
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "dtype": str(models.params["embedding"].dtype),
        "model": {name: getattr(config, name) for name in (*sizes, "vocab_size")},
        "measured": {**raw, "plain_error": measurement.plain_error},
    }
