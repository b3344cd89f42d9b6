"""What the host knows of a run while it is under way, for methods that change their plan between segments."""

import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxspec.methods.base import Method, Models
from jaxspec.requests import Request
from jaxspec.types import DecodeState

# seconds that compiling methods took, by what their rounds were compiled for; JAX keeps the programs with the process
_compile_seconds: defaultdict[Any, dict[Method, float]] = defaultdict(dict)


@dataclass
class Run:
    """A run on the host. It lives as long as the call of `generate` or the stream.

    Seconds of decoding count rounds only: compiling and planning have counters of their own.
    """

    models: Models
    request: Request
    max_new_tokens: int
    state: DecodeState
    lower: Callable[[Method], Any]  # lowers a method's rounds; what it returns has `compile()`
    kind: str  # names what `lower` lowers
    rounds: int = 0
    replan_at: int = 0  # the round before which `replan` is called next; the method may set it there
    decode_seconds: float = 0.0
    replan_seconds: float = 0.0
    compile_seconds: float = 0.0  # waited for; what a background thread compiles is not
    memory: dict[str, Any] = field(default_factory=dict)  # the method's own, from one `replan` to the next
    # what the method notes of its plans, and the tokens per second and sequence measured until the next one
    log: list[dict[str, Any]] = field(default_factory=list)
    _compiled: dict[Method, Future] = field(default_factory=dict)  # in this run
    _seconds: dict[Method, float] = field(init=False)  # in this process
    _pool: ThreadPoolExecutor | None = None
    _noted_at: tuple[float, float] = (0.0, 0.0)  # tokens per sequence and seconds at the last note

    def __post_init__(self) -> None:
        arguments = self.models, self.request, self.state
        shapes = tuple((np.shape(x), getattr(x, "dtype", None)) for x in jax.tree.leaves(arguments))
        program = self.kind, self.max_new_tokens, jax.tree.structure(arguments), shapes
        self._seconds = _compile_seconds[program]

    def replan(self, method: Method) -> Method:
        """The method to go on with until `replan_at`, its rounds compiled, as `method.replan` says."""
        self.replan_at = self.rounds + method.segment_rounds
        drafter, self.state = method.replan(self)
        self.prepare(drafter, background=False)
        return drafter

    def prepare(self, method: Method, *, background: bool) -> bool:
        """Has a method's rounds compiled; returns whether they are ready.

        Args:
            method: the method.
            background: start a thread and return at once, unless they are ready.
        """
        started = time.perf_counter()
        if method not in self._compiled:
            if background:
                self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="jaxspec-compile")
                # lowered here, because the state's buffers are gone once the next round has begun
                self._compiled[method] = self._pool.submit(self._compile, method, self.lower(method))
            else:
                self._compile(method, self.lower(method))
                self._compiled[method] = Future()
                self._compiled[method].set_result(None)
        future = self._compiled[method]
        if background and not future.done():
            return False
        future.result()
        if not background:
            self.compile_seconds += time.perf_counter() - started
        return True

    def is_ready(self, method: Method) -> bool:
        """Whether a method's rounds are compiled."""
        return method in self._compiled and self._compiled[method].done()

    def seconds_to_compile(self, method: Method | None = None) -> float:
        """What compiling a method's rounds will take, without a method those of a new one: nothing where this process
        has compiled them, else as long as the longest did."""
        return 0.0 if method in self._seconds else max(self._seconds.values(), default=0.0)

    def note(self, record: dict[str, Any]) -> None:
        """Adds to the log what holds from here on; plain types."""
        self.measure()
        self.log.append(record)

    def close(self) -> None:
        """Lets go of the compile thread; what it has begun it finishes."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def measure(self) -> None:
        """Adds the tokens per second since the last note to that one."""
        tokens, seconds = float(np.mean(np.asarray(self.state.stats.emitted))), self.decode_seconds
        (tokens_before, seconds_before), self._noted_at = self._noted_at, (tokens, seconds)
        if self.log and seconds > seconds_before:
            self.log[-1]["measured_tokens_per_second"] = (tokens - tokens_before) / (seconds - seconds_before)

    def _compile(self, method: Method, lowered: Any) -> None:
        started = time.perf_counter()
        lowered.compile()
        self._seconds.setdefault(method, time.perf_counter() - started)
