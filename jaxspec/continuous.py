"""Continuous batching: a row that ends makes room for the next prompt (Orca, Yu et al., OSDI 2022)."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.decode import decode_all, is_traced, run_prefill
from jaxspec.methods.base import Method, Models
from jaxspec.methods.plain import Plain
from jaxspec.models.decoder import Decoder
from jaxspec.requests import Request, check_request
from jaxspec.sampling import Sampling
from jaxspec.types import Array, DecodeState, Finish, Params, Stats


class Completion(NamedTuple):
    """What became of one prompt."""

    index: int  # of the prompt
    tokens: np.ndarray  # int32 [n]: generated ids, EOS included
    finish: Finish
    stats: Stats  # of this prompt: rounds and emitted are scalars, drafted and accepted have an entry per round
    logprobs: np.ndarray | None  # float32 [n], when asked for


def generate_many(
    model: Decoder,
    params: Params,
    prompts: Sequence[Sequence[int]],
    key: Array,
    *,
    batch: int,
    method: Method = Plain(),
    sampling: Sampling = Sampling(),
    max_new_tokens: int,
    eos_ids: tuple[int, ...] = (),
    draft_params: Params | None = None,
    logprobs: bool = False,
) -> Iterator[Completion]:
    """Generates after any number of prompts, up to `batch` of them at a time, and yields each as it ends.

    A fixed batch runs until its slowest row has ended, which under speculation is long after the mean. Here the row of
    an ended prompt is given to the next one: it is prefilled alone, then decoded with the others. The token ids of each
    prompt are those that `generate` returns for it with `fold_in(key, index)`, unless the method does something for the
    whole batch that changes them, as the refreshes of Dustin do. A method that replans keeps the plan that it made on
    the device for the first `batch` prompts; with a batch of 1 it makes one for each prompt. Driven from the host, so
    not under jit.

    Args:
        model: the target model.
        params: its parameters.
        prompts: token ids of each prompt.
        key: a PRNG key, from which prompt i takes `fold_in(key, i)`, or one key per prompt [N].
        batch: rows that are decoded together.
        method: how to draft and verify.
        sampling: how tokens are drawn; scalars, or one value per prompt [N].
        max_new_tokens: per prompt.
        eos_ids: ids that end a prompt's row.
        draft_params: parameters of the method's draft model, if it has one.
        logprobs: also return log-probabilities, as `generate` does.

    Raises:
        ValueError: as `generate`, and for no prompts, a batch below 1, or under jit; by this call, not by the first
            `next`.
    """
    lengths = _lengths(prompts)
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch must be an integer of at least 1, got {batch!r}")
    padded = np.zeros((len(prompts), max(lengths)), np.int64)
    for row, ids in zip(padded, prompts, strict=True):
        row[: len(ids)] = ids
    request = check_request(model, padded, lengths, key, method, sampling, max_new_tokens, eos_ids, 0, draft_params)
    models = Models(model, params, draft_params)
    if is_traced((models, request)):
        raise ValueError("generate_many is driven from the host and cannot be traced; use generate under jit")
    method = method.as_one_program() if method.segment_rounds else method
    return _completions(models, request, method, min(batch, len(prompts)), max_new_tokens, logprobs)


def _lengths(prompts: Sequence[Sequence[int]]) -> np.ndarray:
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    if not lengths.size:
        raise ValueError("prompts must hold at least one prompt")
    if not lengths.all():
        raise ValueError(f"prompts must not be empty; number {int(np.argmin(lengths))} is")
    return lengths


def _completions(
    models: Models, request: Request, method: Method, batch: int, max_new_tokens: int, logprobs: bool
) -> Iterator[Completion]:
    count = request.keys.shape[0]
    rows: list[int | None] = list(range(batch))
    static = {"method": method, "max_new_tokens": max_new_tokens}
    state = run_prefill(models, _rows_of(request, rows), logprobs=logprobs, **static)
    # the plan of the first prefill stays in the state, so those of later rows need not make one
    later = static if batch == 1 else {**static, "method": method.fixed(models.target.config.num_layers)}
    following = batch
    while any(row is not None for row in rows):
        running = sum(row is not None for row in rows)
        sampling = _rows_of(request, [row or 0 for row in rows])
        # rows that the prefill ended give way before the first round
        state = _decode(models, state, sampling, np.int32(running), **static)
        finish = np.asarray(state.finish)
        for place in np.flatnonzero(finish != Finish.RUNNING):
            if rows[place] is None:
                continue
            yield _completion(rows[place], jax.tree.map(np.asarray, _row(_small(state), place)))
            rows[place] = None
            if following < count:
                alone = run_prefill(models, _rows_of(request, [following]), logprobs=logprobs, **later)
                state = _insert(state, alone, np.int32(place)) if batch > 1 else alone
                rows[place], following = following, following + 1


def _rows_of(request: Request, rows: Sequence[int]) -> Request:
    """The request of some prompts."""
    at, count = np.asarray(rows), request.keys.shape[0]
    pick = lambda x: x[at] if x.shape[:1] == (count,) else x  # noqa: E731
    return request.replace(
        prompt=request.prompt[at],
        prompt_length=request.prompt_length[at],
        valid=np.broadcast_to(request.valid, count)[at],
        keys=request.keys[at],
        sampling=jax.tree.map(pick, request.sampling),
    )


def _completion(index: int, row: DecodeState) -> Completion:
    number, rounds = int(row.num_tokens), int(row.stats.rounds)
    stats = row.stats.replace(drafted=row.stats.drafted[:rounds], accepted=row.stats.accepted[:rounds])
    logprobs = None if row.logprobs is None else row.logprobs[:number]
    return Completion(index, row.tokens[:number], Finish(int(row.finish)), stats, logprobs)


def _small(state: DecodeState) -> DecodeState:
    return state.replace(cache=(), method_state=(), keys=(), round=())


@jax.jit
def _row(state: DecodeState, place: Array) -> DecodeState:
    return jax.tree.map(lambda x: x[place], state)


@partial(jax.jit, static_argnames=("method", "max_new_tokens"), donate_argnames="state")
def _decode(
    models: Models, state: DecodeState, request: Request, least_running: Array, method: Method, max_new_tokens: int
) -> DecodeState:
    return decode_all(models, state, request, method, max_new_tokens, least_running)


@partial(jax.jit, donate_argnames="state")
def _insert(state: DecodeState, alone: DecodeState, place: Array) -> DecodeState:
    """The state with one row in place of another; what has no batch axis stays as it is."""

    def insert(whole: Any, one: Any) -> Any:
        # the batch axis is the one in which a state of one row differs
        axes = [axis for axis, (n, m) in enumerate(zip(whole.shape, one.shape, strict=True)) if n != m]
        return jax.lax.dynamic_update_slice_in_dim(whole, one, place, axes[0]) if axes else whole

    return jax.tree.map(insert, state, alone)
