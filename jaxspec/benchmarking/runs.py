"""Runs of many methods over the same prompts, from one cache that is filled once."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.decode import begin, decode_all, decode_in_segments
from jaxspec.methods.base import Method, Models
from jaxspec.methods.knapspec import KnapSpec
from jaxspec.methods.plain import Plain
from jaxspec.metrics import Metrics, measure
from jaxspec.models.decoder import cache_capacity, init_cache
from jaxspec.planning import Planned
from jaxspec.planning.controller import planned
from jaxspec.prefill import fill_cache
from jaxspec.profiling import RoundTimer
from jaxspec.replanning import Run
from jaxspec.requests import Request, check_request
from jaxspec.sampling import Sampling
from jaxspec.types import DecodeState, Finish, KVCache, Params, Stats


class Part(NamedTuple):
    """The rounds of a run in which all rows were running."""

    seconds: float
    rounds: int
    tokens: int  # of all rows


class Timed(NamedTuple):
    """One run without its prefill."""

    seconds: float  # waiting for compilation not counted, planning counted
    rounds: int  # of the row with the most
    tokens: np.ndarray  # int32 [B, new_tokens]
    metrics: Metrics
    stats: Stats  # as NumPy arrays
    all_running: Part | None  # None where the method runs in segments


@dataclass
class Candidate:
    """A method under measurement."""

    name: str
    method: Method
    draft_params: Params | None = None
    runs: list[Timed] = field(default_factory=list)

    def median(self) -> Timed:
        """The run of median time."""
        return sorted(self.runs, key=lambda run: run.seconds)[(len(self.runs) - 1) // 2]

    def spread(self) -> float:
        """(slowest - fastest) / median."""
        seconds = [run.seconds for run in self.runs]
        return (max(seconds) - min(seconds)) / statistics.median(seconds)


class Runs:
    """Greedy runs over one batch of prompts. No token ends a row, so that every method does the same work."""

    def __init__(
        self,
        models: Models,
        rows: Sequence[Sequence[int]],
        new_tokens: int,
        max_draft: int,
        cache: Callable[[int], KVCache] | None = None,
    ) -> None:
        """Args:
        models: the target.
        rows: token ids of each prompt.
        new_tokens: tokens generated per row.
        max_draft: the largest of the methods to come.
        cache: capacity -> a cache that takes the place of the prefill's.
        """
        self.models, self.new_tokens = models, new_tokens
        width = max(map(len, rows))
        prompt = np.array([[*ids, *[0] * (width - len(ids))] for ids in rows], np.int32)
        lengths = np.array([len(ids) for ids in rows], np.int32)
        key = jax.random.key(0)
        request = check_request(models.target, prompt, lengths, key, Plain(), Sampling(), new_tokens, (), 0, None)
        self.request: Request = request
        capacity = cache_capacity(request.prompt.shape[1] + new_tokens + max_draft + 1)
        started = time.perf_counter()
        if cache is not None:
            self.cache = jax.block_until_ready(cache(capacity))
        else:
            empty = init_cache(models.target.config, len(rows), capacity, models.params["embedding"].dtype)
            fill = jax.jit(partial(fill_cache, models.target), donate_argnums=3)
            self.cache = jax.block_until_ready(fill(models.params, request.prompt, request.prompt_length, empty))
        self.prefill_seconds = time.perf_counter() - started
        self._programs: dict[Method, tuple[Any, Any]] = {}

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return self.request.keys.shape[0]

    def run(self, candidate: Candidate) -> Timed:
        """One run, appended to the candidate's; the first of a method compiles it."""
        method, models = candidate.method, self._models(candidate)
        first, rest = self._compile(models, method)
        state = jax.block_until_ready(first(models, self.cache, self.request))
        part = None
        if rest is None:
            state, run = decode_in_segments(models, self.request, method, self.new_tokens, state=state)
            seconds = run.decode_seconds + run.replan_seconds
        else:
            state, seconds, part = time_loop(partial(rest, models), state, self.request)
        self.cache = state.cache
        stats = jax.tree.map(np.asarray, state.stats)
        tokens = np.asarray(state.tokens)[:, : self.new_tokens]
        timed = Timed(seconds, int(stats.rounds.max()), tokens, measure(stats), stats, part)
        candidate.runs.append(timed)
        return timed

    def compile(self, candidate: Candidate) -> None:
        """Compiles a candidate's programs, which its first run would do otherwise."""
        self._compile(self._models(candidate), candidate.method)

    def program_bytes(self, candidate: Candidate) -> int | None:
        """Device memory that a candidate's compiled loop needs, weights and caches included; None where unknown."""
        program = self._programs[candidate.method][1]
        sizes = None if program is None else program.memory_analysis()
        if sizes is None:
            return None
        whole = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + sizes.output_size_in_bytes
        return whole - sizes.alias_size_in_bytes

    def phases(self, candidate: Candidate, num_rounds: int) -> dict[str, float]:
        """Median milliseconds of a round's phases, each as a program of its own, and of the whole round."""
        method, models = candidate.method, self._models(candidate)
        if method.segment_rounds:
            method = method.fixed(models.target.config.num_layers)
        state = self._compile(models, method)[0](models, self.cache, self.request)
        timer, running = RoundTimer(), np.zeros(self.batch, bool)
        for _ in range(2 * num_rounds):
            state, _ = timer.step(models, state, self.request, running, method, self.new_tokens)
        self.cache = state.cache
        profile = timer.profile()._asdict()
        del profile["num_rounds"]
        return {phase: 1e3 * seconds for phase, seconds in profile.items() if seconds is not None}

    def plan(self, method: KnapSpec, reference_tokens: int) -> Planned:
        """What KnapSpec's planner finds after the prompts, judged on so many tokens. Latencies are measured at first
        use."""
        state = self._compile(self.models, method)[0](self.models, self.cache, self.request)
        self.cache = state.cache
        run = Run(self.models, self.request, self.new_tokens, state, lambda method: None, "nothing")
        return planned(replace(method, reference_tokens=reference_tokens), run)

    def _models(self, candidate: Candidate) -> Models:
        return self.models.replace(draft_params=candidate.draft_params)

    def _compile(self, models: Models, method: Method) -> tuple[Any, Any]:
        if method not in self._programs:
            options = {"method": method, "max_new_tokens": self.new_tokens}
            first = jax.jit(partial(begin, **options), donate_argnums=1).lower(models, self.cache, self.request)
            rest = None
            if not method.segment_rounds:
                loop = jax.jit(partial(decode_all, **options), donate_argnums=1)
                rest = loop.lower(models, first.out_info, self.request, least_running=np.int32(1)).compile()
            self._programs[method] = first.compile(), rest
        return self._programs[method]


def time_loop(
    loop: Callable[..., DecodeState], state: DecodeState, request: Request
) -> tuple[DecodeState, float, Part]:
    """Decodes until every row has ended, and times the rounds before the first row has apart.

    Args:
        loop: (state, request, least_running=) -> state, compiled; see `decode_all`. The state's buffers are given up.
        state: after the prefill, with every row running.
        request: the request.

    Returns:
        The last state, the seconds of all rounds, and the rounds in which all rows were running.
    """
    started = time.perf_counter()
    state = jax.block_until_ready(loop(state, request, least_running=np.int32(request.keys.shape[0])))
    seconds = time.perf_counter() - started
    # of a JAX array NumPy's functions would compile programs
    rounds, emitted = (np.asarray(figure) for figure in (state.stats.rounds, state.stats.emitted))
    part = Part(seconds, int(rounds.max()), int(emitted.sum()))
    if np.any(np.asarray(state.finish) == Finish.RUNNING):
        started = time.perf_counter()
        state = jax.block_until_ready(loop(state, request, least_running=np.int32(1)))
        seconds += time.perf_counter() - started
    return state, seconds, part


def measure_interleaved(
    runs: Runs, candidates: Sequence[Candidate], repeats: int, tell: Callable[[str], None] = lambda line: None
) -> None:
    """`repeats` runs of every candidate, in turns, so that a drift of the device meets all alike. One more run of each
    comes first and does not count; before it the programs are compiled. One after another, since a GPU compiler
    measures its choices on the device and keeps what it found for the next program.

    Args:
        runs: the prompts.
        candidates: the methods.
        repeats: measured runs of each.
        tell: is told what was done.
    """
    for repeat in range(repeats + 1):
        for candidate in candidates:
            started = time.perf_counter()
            runs.compile(candidate)
            compiled = time.perf_counter()
            timed = runs.run(candidate)
            if repeat == 0:
                candidate.runs.clear()
                ran = time.perf_counter() - compiled
                tell(f"{candidate.name}: compiled in {compiled - started:.0f} s, first run in {ran:.0f} s")
            else:
                tell(f"{candidate.name}: run {repeat} of {repeats} in {timed.seconds:.2f} s")


def expected_tokens(acceptance: float, num_draft: int) -> float:
    """Tokens per round when every draft token is accepted with the same chance: (1 - a^(g+1)) / (1 - a)
    (arXiv 2211.17192, equation 1)."""
    return float(sum(acceptance**i for i in range(num_draft + 1)))
