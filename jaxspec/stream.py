"""`stream`: the loop of `generate`, driven from the host so that tokens can be shown and stopped as they come."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.decode import is_traced, prefill
from jaxspec.methods.base import Method, Models
from jaxspec.methods.plain import Plain
from jaxspec.models.decoder import Decoder
from jaxspec.profiling import Profile, RoundTimer, fused_step
from jaxspec.replanning import Run
from jaxspec.requests import Request, check_request
from jaxspec.sampling import Sampling
from jaxspec.text import TextStream, check_stop
from jaxspec.types import Array, DecodeState, Finish, Params, Stats


class Chunk(NamedTuple):
    """What one round brought."""

    tokens: list[list[int]]  # per row, the ids emitted this round; empty for rows that have ended
    text: list[str] | None  # per row, the text that is now certain; None without a tokenizer
    finish: list[Finish]  # per row, RUNNING while more may come
    stats: Stats | None  # on the last chunk only
    profile: Profile | None = None  # on the last chunk, when asked for
    plans: list[dict[str, Any]] | None = None  # on the last chunk, of methods that replan: what each plan was
    decode_seconds: float | None = None  # with `plans`: of the rounds alone, without planning and compiling
    report: dict[str, np.ndarray] | None = None  # on the last chunk: what the method itself counted, as in `Output`


def stream(
    model: Decoder,
    params: Params,
    prompt: Array,
    prompt_length: Array,
    key: Array,
    *,
    method: Method = Plain(),
    sampling: Sampling = Sampling(),
    max_new_tokens: int,
    eos_ids: tuple[int, ...] = (),
    draft_params: Params | None = None,
    tokenizer: Any = None,
    stop: tuple[str, ...] = (),
    profile: bool = False,
) -> Iterator[Chunk]:
    """Yields a `Chunk` per round, the first one after prefill; the tokens are those that `generate` returns.

    Args:
        tokenizer: a fast Hugging Face tokenizer, or a `tokenizers.Tokenizer`; chunks then carry text.
        stop: a row ends with `Finish.STOP` at the first token that completes one of these strings. The text ends
            before the string, and text that might still become one is held back. Needs `tokenizer`.
        profile: run every second round by its phases, wait for each, and report their times on the last chunk.

        The others are those of `generate`.

    Raises:
        ValueError: as `generate`, for stop strings that are empty or without a tokenizer, and under jit. Raised by this
            call, not by the first `next`.
    """
    stop = check_stop(stop, tokenizer)
    request = check_request(
        model, prompt, prompt_length, key, method, sampling, max_new_tokens, eos_ids, 0, draft_params
    )
    method.check_batch(request.keys.shape[0])
    if is_traced((params, draft_params, request)):
        raise ValueError("stream is driven from the host and cannot be traced; use generate under jit")
    texts = None if tokenizer is None else [TextStream(tokenizer, stop) for _ in range(request.keys.shape[0])]
    timer = RoundTimer() if profile else None
    return _rounds(Models(model, params, draft_params), request, method, max_new_tokens, texts, timer)


def _rounds(
    models: Models,
    request: Request,
    method: Method,
    max_new_tokens: int,
    texts: list[TextStream] | None,
    timer: RoundTimer | None,
) -> Iterator[Chunk]:
    state, this_round = _prefill(models, request, method, max_new_tokens)
    rounds = _Rounds(models, request, method, max_new_tokens, state, fused_step if timer is None else timer.step)
    del state
    try:
        yield from _chunks(rounds, this_round, request.keys.shape[0], texts, timer)
    finally:
        rounds.close()


def _chunks(
    rounds: "_Rounds", this_round: Any, batch: int, texts: list[TextStream] | None, timer: RoundTimer | None
) -> Iterator[Chunk]:
    stopped = np.zeros(batch, bool)
    counted: dict[int, tuple[int, int]] = {}  # rounds and emitted tokens of the rows that a stop string ended
    next_round = None
    while True:
        tokens, count, finish, stats = jax.tree.map(np.asarray, this_round)
        emitted = [[] if stopped[b] else tokens[b, : count[b]].tolist() for b in range(batch)]
        text = None if texts is None else [""] * batch
        for b in np.flatnonzero(~stopped) if texts is not None else ():
            emitted[b], text[b], stopped[b] = texts[b].push(emitted[b], last=finish[b] != Finish.RUNNING)
            if stopped[b]:
                counted[b] = stats.rounds[b], stats.emitted[b] - (count[b] - len(emitted[b]))
        finish = np.where(stopped, Finish.STOP, finish)
        done = not np.any(finish == Finish.RUNNING)
        chunk = Chunk(emitted, text, [Finish(f) for f in finish], _counted(stats, counted) if done else None)
        if done:
            chunk = chunk._replace(
                profile=None if timer is None else timer.profile(),
                plans=rounds.plans(),
                decode_seconds=rounds.decode_seconds(),
                report=rounds.report(),
            )
        yield chunk
        if done:
            return
        if next_round is None:
            next_round = rounds.next(stopped.copy())
        this_round = next_round
        # one round is always under way while the host reads the one before; rows that stop there ignore what it brings
        next_round = rounds.next(stopped.copy())


class _Rounds:
    """Launches rounds, and has the method replan between segments of them."""

    def __init__(
        self, models: Models, request: Request, method: Method, max_new_tokens: int, state: DecodeState, step: Any
    ) -> None:
        self._arguments = models, request, max_new_tokens
        self._method = self._drafter = method
        self._step = step
        self._run = Run(models, request, max_new_tokens, state, self._lower, "a round")
        self._segment_started = 0.0

    def report(self) -> dict[str, np.ndarray]:
        """What the method has counted so far."""
        return jax.tree.map(np.asarray, self._method.report(self._run.state.method_state))

    def plans(self) -> list[dict[str, Any]] | None:
        """The log of plans so far; None where the method does not replan."""
        if not self._method.segment_rounds:
            return None
        if self._run.rounds:
            self._run.decode_seconds += time.perf_counter() - self._segment_started
        self._run.measure()
        return self._run.log

    def decode_seconds(self) -> float | None:
        """Seconds of the rounds up to the last call of `plans`; None where the method does not replan."""
        return self._run.decode_seconds if self._method.segment_rounds else None

    def next(self, stopped: Array) -> Any:
        models, request, max_new_tokens = self._arguments
        run = self._run
        if self._method.segment_rounds and run.rounds == run.replan_at:
            # the clock goes on while the caller looks at a chunk, but a round is under way then
            jax.block_until_ready(run.state.round)
            if run.rounds:
                run.decode_seconds += time.perf_counter() - self._segment_started
            self._drafter = run.replan(self._method)
            self._segment_started = time.perf_counter()
        state, run.state = run.state, None
        run.state, brought = self._step(models, state, request, stopped, self._drafter, max_new_tokens)
        run.rounds += 1
        return brought

    def close(self) -> None:
        self._run.close()

    def _lower(self, method: Method) -> jax.stages.Lowered:
        models, request, max_new_tokens = self._arguments
        stopped = np.zeros(request.keys.shape[0], bool)
        return fused_step.lower(models, self._run.state, request, stopped, method, max_new_tokens)


def _counted(stats: Stats, counted: dict[int, tuple[int, int]]) -> Stats:
    """The counters without what was under way when a stop string was found."""
    rounds, emitted = stats.rounds.copy(), stats.emitted.copy()
    for b, values in counted.items():
        rounds[b], emitted[b] = values
    kept = np.arange(stats.drafted.shape[1]) < rounds[:, None]
    return Stats(rounds, emitted, np.where(kept, stats.drafted, 0), np.where(kept, stats.accepted, 0))


@partial(jax.jit, static_argnames=("method", "max_new_tokens"))
def _prefill(models: Models, request: Request, method: Method, max_new_tokens: int) -> tuple[DecodeState, Any]:
    state = prefill(models, request, method, max_new_tokens)
    return state, (state.tokens[:, :1], state.num_tokens, state.finish, state.stats)
