"""What the host knows of a run while it is under way, for methods that change their plan between segments."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxspec.methods.base import Method, Models
from jaxspec.requests import Request
from jaxspec.types import DecodeState


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
    rounds: int = 0
    replan_at: int = 0  # the round before which `replan` is called next; the method may set it there
    decode_seconds: float = 0.0
    replan_seconds: float = 0.0
    compile_seconds: float = 0.0  # waited for; what a background thread compiles is not
    longest_compile_seconds: float = 0.0  # of one method, waited for or not
    memory: dict[str, Any] = field(default_factory=dict)  # the method's own, from one `replan` to the next
    # what the method notes of its plans, and the tokens per second and sequence measured until the next one
    log: list[dict[str, Any]] = field(default_factory=list)
    _compiled: dict[Method, Future] = field(default_factory=dict)
    _pool: ThreadPoolExecutor | None = None
    _noted_at: tuple[float, float] = (0.0, 0.0)  # tokens per sequence and seconds at the last note

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
                self._compiled[method] = self._pool.submit(_timed_compile, self.lower(method))
            else:
                done: Future = Future()
                done.set_result(_timed_compile(self.lower(method)))
                self._compiled[method] = done
        future = self._compiled[method]
        if background and not future.done():
            return False
        self.longest_compile_seconds = max(self.longest_compile_seconds, future.result())
        if not background:
            self.compile_seconds += time.perf_counter() - started
        return True

    def is_ready(self, method: Method) -> bool:
        """Whether a method's rounds are compiled."""
        return method in self._compiled and self._compiled[method].done()

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


def _timed_compile(lowered: Any) -> float:
    started = time.perf_counter()
    lowered.compile()
    return time.perf_counter() - started
