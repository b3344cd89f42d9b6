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
import numpy as np

from jaxspec.benchmarking.shapes import random_cache
from jaxspec.methods.base import Method, Models
from jaxspec.methods.plain import Plain
from jaxspec.models import Decoder, ModelConfig, cache_capacity
from jaxspec.planning.latency import LatencyProfile, fit_line
from jaxspec.planning.loops import forwards, plain_loop, scored_forwards, selected_forwards, selecting_state
from jaxspec.requests import check_request
from jaxspec.sampling import Sampling
from jaxspec.types import Array, KVCache, LayerMask
from pallas_kernels.dispatch import resolve
from pallas_kernels.tiling import QUERY_TILE

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
        predicted = [self.profile.costs().plain_step(n) for n in self.contexts]
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

    An MLP's time is the mean of what MLPs add to forwards of embedding and output head alone and to forwards with
    attention: alone they take longer than among others, whose kernels they overlap with. Attention takes the rest of
    whole layers, so that whole steps add up. Only as many layers are used as it takes to defeat the device's cache.

    Args:
        models: the target.
        batch: sequences.
        contexts: lengths at which attention is timed; two or more for a slope.
        max_draft: verification is timed at max_draft + 1 query rows, or as many as share a tile of the GPU's kernel.
        selection: a method whose drafts attend to selected rows, timed as well.
        whole_verify: also time verification as one forward of all layers, which compiles it.
        steps: forwards per timing.
        repeats: timings per median, after one that does not count.
        progress: called with a line of text before each step.

    Raises:
        ValueError: no contexts, or they exceed the model's positions.
    """
    started = time.perf_counter()
    if selection is not None:
        selection.check_model(models.target)
    selection = _as_timed(selection)
    contexts, rows = tuple(sorted(set(contexts))), min(max_draft + 1, rows_of_a_tile(models) or math.inf)
    limit = models.target.config.capacity_limit - rows
    if not contexts or contexts[0] < 1 or contexts[-1] > limit:
        raise ValueError(f"contexts must lie in 1..{limit}, got {list(contexts)}")
    if batch < 1 or max_draft < 1:
        raise ValueError(f"batch and max_draft must be at least 1, got {batch} and {max_draft}")
    part = _Loops(models, batch, contexts, rows, steps, repeats)
    k = part.num_layers
    nothing, everything = (False,) * k, (True,) * k
    jobs: dict[Any, _Job] = {}
    for count in (1, rows):
        jobs["head", count] = partial(forwards, layers=LayerMask(nothing, nothing), count=count)
        jobs["mlp", count] = partial(forwards, layers=LayerMask(nothing, everything), count=count)
        jobs["attention", count] = partial(forwards, layers=LayerMask(everything, nothing), count=count)
        jobs["layers", count] = partial(forwards, layers=LayerMask(everything, everything), count=count)
    if selection is not None:
        jobs["selected"] = partial(selected_forwards, layers=LayerMask(everything, everything), method=selection)
        jobs["scored"] = partial(scored_forwards, count=rows, method=selection)
    whole = _Loops(models, batch, contexts, rows, steps, repeats, models.target.config.num_layers)
    whole_jobs: dict[Any, _Job] = {"plain": partial(plain_loop, request=_request(models, batch, steps))}
    if whole_verify:
        whole_jobs["verify"] = partial(forwards, layers=None, count=rows)
    progress(f"compiling {len(jobs)} loops over {k} layers and {len(whole_jobs)} over all")
    # one after another: compilers for GPUs time their choices on the device, and keep what they found for the next
    for loops, some in ((part, jobs), (whole, whole_jobs)):
        for job in some.values():
            loops.lower(job).compile()
    progress(f"timing sublayers at {len(contexts)} context lengths")
    flat = {name: job for name, job in jobs.items() if name[0] in ("head", "mlp")}
    seconds = {name: part.time(job, contexts[:1] if name in flat else contexts) for name, job in jobs.items()}
    part.drop()
    progress("timing whole steps")
    seconds |= {name: whole.time(job, contexts) for name, job in whole_jobs.items()}
    whole.drop()

    def per_layer(more: Sequence[float], less: Sequence[float], rest: float = 0.0) -> tuple[float, ...]:
        # noise may make a difference negative where a part costs next to nothing
        return tuple(max((m - n) / k - rest, 1e-9 / k) for m, n in zip(more, less, strict=True))

    def layers(count: int) -> tuple[tuple[float, ...], float]:
        """Attention at each context, and an MLP."""
        both, attention = seconds["layers", count], seconds["attention", count]
        alone = per_layer(seconds["mlp", count], seconds["head", count])
        mlp = (alone[0] + statistics.mean(per_layer(both, attention))) / 2
        return per_layer(both, seconds["head", count] * len(contexts), mlp), mlp

    (attention, mlp), (verify_attention, verify_mlp) = layers(1), layers(rows)
    selected = scoring = None
    if selection is not None:
        selected = per_layer(seconds["selected"], seconds["head", 1] * len(contexts), mlp)
        scoring = per_layer(seconds["scored"], seconds["layers", rows])
    (line, error), (verify_line, verify_error) = (fit_line(contexts, t) for t in (attention, verify_attention))
    profile = LatencyProfile(
        num_layers=models.target.config.num_layers,
        batch=batch,
        rows=rows,
        attention=line,
        mlp=mlp,
        head=seconds["head", 1][0],
        verify_attention=verify_line,
        verify_mlp=verify_mlp,
        verify_head=seconds["head", rows][0],
        overhead=0.0,
        selected=None if selected is None else fit_line(contexts, selected)[0],
        scoring=None if scoring is None else fit_line(contexts, scoring)[0],
    )
    step = profile.costs()
    rest = statistics.median(t - step.plain_step(n) for n, t in zip(contexts, seconds["plain"], strict=True))
    return Measurement(
        profile=dataclasses.replace(profile, overhead=max(rest, 0.0)),
        contexts=contexts,
        attention=attention,
        verify_attention=verify_attention,
        selected=selected,
        scoring=scoring,
        plain=tuple(seconds["plain"]),
        verify=tuple(seconds["verify"]) if whole_verify else None,
        fit_error=max(error, verify_error),
        seconds=time.perf_counter() - started,
    )


# by everything but the lengths: the shortest and the longest that were timed, and the profile
_measured: dict[tuple[Any, ...], list[tuple[int, int, LatencyProfile]]] = {}


def measured_profile(
    models: Models,
    batch: int,
    longest: int,
    max_draft: int,
    selection: Method | None,
    progress: Callable[[str], None] = lambda text: None,
) -> LatencyProfile:
    """The profile for runs of up to `longest` tokens; the other arguments are those of `measure`. A process measures a
    model, batch and selection once, and again for lengths outside of those timed."""
    config, dtype = models.target.config, models.params["embedding"].dtype
    longest = max(min(longest, config.capacity_limit - max_draft - 1), 1)
    key = (models.target, str(dtype), batch, max_draft, _as_timed(selection))
    for shortest, most, profile in _measured.get(key, ()):
        if shortest <= longest <= most:
            return profile
    contexts = sorted({max(longest // 4, 1), max(longest // 2, 1), longest})
    options = {"max_draft": max_draft, "selection": selection, "progress": progress}
    profile = measure(models, batch, contexts, **options).profile
    _measured.setdefault(key, []).append((contexts[0], longest, profile))
    return profile


def _as_timed(selection: Method | None) -> Method | None:
    """Without rows by layer: the mean of their shares is 1, and only some layers are timed."""
    if getattr(selection, "layer_shares", ""):
        return dataclasses.replace(selection, layer_shares="")
    return selection


def layers_to_time(config: ModelConfig, itemsize: int) -> int:
    """How many layers make a loop read more than a device's cache holds in each of the timed forwards."""
    kv = 2 * config.hidden_size * config.head_dim * (config.num_heads + config.num_kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    needed = math.ceil(WORKING_SET / (min(kv, mlp) * itemsize))
    return min(max(needed, 2), config.num_layers)


def rows_of_a_tile(models: Models) -> int | None:
    """Query rows that attention of verification takes at about the cost of one, at least 2; None without kernels."""
    if resolve(models.target.backend) == "xla":
        return None
    return max(QUERY_TILE // models.target.config.group_size, 2)


_Job = partial[tuple[Array, KVCache]]  # (models, cache, context or a state, steps=) -> tokens, cache


class _Loops:
    """Compiles and times loops over a cache of random rows, on the model's first layers."""

    def __init__(
        self,
        models: Models,
        batch: int,
        contexts: Sequence[int],
        rows: int,
        steps: int,
        repeats: int,
        num_layers: int | None = None,
    ) -> None:
        dtype = models.params["embedding"].dtype
        self.num_layers = num_layers or layers_to_time(models.target.config, dtype.itemsize)
        config = dataclasses.replace(models.target.config, num_layers=self.num_layers)
        self._models = Models(Decoder(config, models.target.backend), models.params)
        self._steps, self._repeats = steps, repeats
        # plain decoding goes on for `steps` tokens
        capacity = cache_capacity(contexts[-1] + max(rows, steps + 1))
        self._new_cache = partial(random_cache, config, batch, capacity, dtype)
        self._cache: KVCache | None = None

    def lower(self, job: _Job) -> jax.stages.Lowered:
        """The job's program, to be compiled; `time` then finds it compiled."""
        prepare = partial(_operands, job, self._models, context=np.int32(0))
        operands = jax.eval_shape(prepare, jax.eval_shape(self._new_cache))
        return job.func.lower(self._models, *operands, **job.keywords, steps=self._steps)

    def time(self, job: _Job, contexts: Sequence[int]) -> list[float]:
        """Median seconds of one step of the job at each context length."""
        medians = []
        self._cache = self._cache or self._new_cache()
        for context in contexts:
            times = []
            self._cache, where = _operands(job, self._models, self._cache, np.int32(context))
            for repeat in range(self._repeats + 1):
                jax.block_until_ready((self._cache, where))
                started = time.perf_counter()
                tokens, self._cache = job(self._models, self._cache, where, steps=self._steps)
                jax.block_until_ready(tokens)
                if repeat:
                    times.append((time.perf_counter() - started) / self._steps)
            medians.append(statistics.median(times))
        return medians

    def drop(self) -> None:
        """Gives the cache's memory back."""
        self._cache = None


def _operands(job: _Job, models: Models, cache: KVCache, context: Array) -> tuple[Any, ...]:
    """What a job takes between models and `steps`. A state that selects takes a forward, which is not to be timed."""
    method = job.keywords.get("method")
    return (cache, context) if method is None else selecting_state(models, cache, context, method=method)


def _request(models: Models, batch: int, steps: int) -> Any:
    tokens, length = np.zeros((batch, 1), np.int32), np.ones(batch, np.int32)
    arguments = (jax.random.key(0), Plain(), Sampling(), steps, (), 0, None)
    return check_request(models.target, tokens, length, *arguments)


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
