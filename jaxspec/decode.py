"""The only loop: prefill, then rounds of draft, verify, accept, commit, observe. It never asks which method it runs."""

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.acceptance import accept
from jaxspec.methods.base import Method, Models
from jaxspec.methods.plain import Plain
from jaxspec.models.decoder import Decoder, cache_capacity, init_cache
from jaxspec.prefill import fill_cache
from jaxspec.replanning import Run
from jaxspec.requests import Request, check_request
from jaxspec.sampling import Sampling
from jaxspec.types import Array, DecodeState, Draft, Finish, ForwardOut, KVCache, Output, Params, Stats, Verdict


def generate(
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
    pad_id: int = 0,
    draft_params: Params | None = None,
    logprobs: bool = False,
) -> Output:
    """Generates up to `max_new_tokens` tokens after each prompt, wholly on the device, as one jitted program.

    It may be called under the caller's own jit. Each row's result depends on its own prompt and key only. Outside jit
    a method that replans runs in segments, with the host between them: which tokens are drafted then depends on
    measured times and on the whole batch, the distribution of the output does not.

    Args:
        model: the target model.
        params: its parameters; their dtype is the dtype of the computation and of the cache.
        prompt: int32 [B, P], right-padded; what stands behind a row's length does not matter. Outside jit it is
            padded to one of a few widths, so that prompts of any length share a bounded number of compilations.
        prompt_length: int32 [B], tokens in each row, at least 1.
        key: a PRNG key, from which row b takes `fold_in(key, b)`, or one key per row [B].
        method: how to draft and verify.
        sampling: how tokens are drawn; greedy by default.
        max_new_tokens: static.
        eos_ids: ids that end a row; the id itself is the row's last token.
        pad_id: fills `tokens` behind each row's end.
        draft_params: parameters of the method's draft model, if it has one.
        logprobs: also return the log-probability of every token under the target's unfiltered logits.

    Returns:
        `Output`. A row whose logits hold NaN or infinity ends with `Finish.NAN` before that token; others are
        untouched.

    Raises:
        ValueError: before anything is computed, for wrong shapes or dtypes, and for wrong values (empty prompts, ids
            outside the vocabulary, more positions than the model has, impossible sampling) where they are concrete.
            Under tracing a row with wrong values returns length 0 and `Finish.INVALID` instead.
    """
    request = check_request(
        model, prompt, prompt_length, key, method, sampling, max_new_tokens, eos_ids, pad_id, draft_params
    )
    method.check_batch(request.keys.shape[0])
    models = Models(model, params, draft_params)
    if method.segment_rounds and not is_traced((models, request)):
        state, _ = decode_in_segments(models, request, method, max_new_tokens, logprobs)
        return _finish(state, request, max_new_tokens)
    method = method.as_one_program() if method.segment_rounds else method
    return _generate(models, request, method, max_new_tokens, logprobs)


@partial(jax.jit, static_argnames=("method", "max_new_tokens", "logprobs"))
def _generate(models: Models, request: Request, method: Method, max_new_tokens: int, logprobs: bool) -> Output:
    state = prefill(models, request, method, max_new_tokens, logprobs)
    state = decode_all(models, state, request, method, max_new_tokens)
    return finish_output(state, request, max_new_tokens)._replace(report=method.report(state.method_state))


def is_traced(arguments: Any) -> bool:
    """Whether this call is part of a program being traced: an argument is, or the caller runs under jit."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)):
        return True
    return isinstance(jax.lax.add(np.int32(0), np.int32(0)), jax.core.Tracer)


def decode_in_segments(
    models: Models,
    request: Request,
    method: Method,
    max_new_tokens: int,
    logprobs: bool = False,
    state: DecodeState | None = None,
) -> tuple[DecodeState, Run]:
    """Prefill and rounds until every row has ended, with `method.replan` before every `segment_rounds` of them, or as
    many as it asks for.

    Args:
        models: the models.
        request: the request; nothing in it is traced.
        method: a method whose `segment_rounds` is not 0.
        max_new_tokens: as in `generate`.
        logprobs: as in `generate`.
        state: what `prefill` or `begin` returned; None runs the prefill. Its buffers are given up.

    Returns:
        The last state, and the run's times and plans.
    """
    state = run_prefill(models, request, method, max_new_tokens, logprobs) if state is None else state
    run = Run(models, request, max_new_tokens, state, lambda method: _lower_segment(run, method), "a segment")
    try:
        while np.any(np.asarray(run.state.finish) == Finish.RUNNING):
            drafter = run.replan(method)
            # the prefill counts as round 0
            last_round = np.int32(run.replan_at + 1)
            started = time.perf_counter()
            run.state = _segment(models, run.state, request, last_round, drafter, max_new_tokens)
            run.rounds = int(run.state.round) - 1
            run.decode_seconds += time.perf_counter() - started
        run.measure()
    finally:
        run.close()
    return run.state, run


def _lower_segment(run: Run, method: Method) -> jax.stages.Lowered:
    return _segment.lower(run.models, run.state, run.request, np.int32(0), method, run.max_new_tokens)


@partial(jax.jit, static_argnames=("method", "max_new_tokens"), donate_argnames="state")
def _segment(
    models: Models, state: DecodeState, request: Request, last_round: Array, method: Method, max_new_tokens: int
) -> DecodeState:
    return jax.lax.while_loop(
        lambda state: jnp.any(state.finish == Finish.RUNNING) & (state.round < last_round),
        lambda state: decode_step(models, state, request, method, max_new_tokens)[0],
        state,
    )


@partial(jax.jit, static_argnames=("method", "max_new_tokens", "logprobs"))
def run_prefill(
    models: Models, request: Request, method: Method, max_new_tokens: int, logprobs: bool = False
) -> DecodeState:
    """`prefill` as a program of its own."""
    return prefill(models, request, method, max_new_tokens, logprobs)


@partial(jax.jit, static_argnames="max_new_tokens")
def _finish(state: DecodeState, request: Request, max_new_tokens: int) -> Output:
    return finish_output(state, request, max_new_tokens)


def prefill(
    models: Models, request: Request, method: Method, max_new_tokens: int, logprobs: bool = False
) -> DecodeState:
    """Runs the prompts and samples each row's first token.

    The prompt goes through in chunks. Its last token then takes one ordinary forward of its own, which gives logits,
    scores and queries at each row's own end however ragged the prompts are.
    """
    batch, width = request.prompt.shape
    capacity = cache_capacity(width + max_new_tokens + method.max_draft + 1)
    cache = init_cache(models.target.config, batch, capacity, models.params["embedding"].dtype)
    cache = fill_cache(models.target, models.params, request.prompt, request.prompt_length, cache)
    return begin(models, cache, request, method, max_new_tokens, logprobs)


def begin(
    models: Models, cache: KVCache, request: Request, method: Method, max_new_tokens: int, logprobs: bool = False
) -> DecodeState:
    """The end of the prefill: each row's last prompt token, over a cache that holds the tokens before it.

    A cache that another run over the same prompts has used will do, since everything behind the prompts is scratch.
    """
    batch, g = request.prompt.shape[0], method.max_draft
    last = jnp.take_along_axis(request.prompt, request.prompt_length[:, None] - 1, axis=1)
    zeros = jnp.zeros(batch, jnp.int32)
    trace = jnp.zeros((batch, max_new_tokens), jnp.int16)
    columns = max_new_tokens + g + 1
    state = DecodeState(
        tokens=jnp.zeros((batch, columns), jnp.int32),
        num_tokens=zeros,
        length=request.prompt_length - 1,
        last_token=last[:, 0],
        finish=jnp.where(request.valid, Finish.RUNNING, Finish.INVALID).astype(jnp.int8),
        cache=cache,
        method_state=(),
        keys=request.keys,
        round=jnp.int32(0),
        stats=Stats(zeros, zeros, trace, trace),
        logprobs=jnp.zeros((batch, columns), jnp.float32) if logprobs else None,
    )
    out = models.forward(last, cache, state.length, collect=method.prefill_collect(zeros))
    empty = Draft(jnp.zeros((batch, 0), jnp.int32), zeros, None)
    state, *_ = commit(state.replace(cache=out.cache), empty, out, request, max_new_tokens, is_round=False)
    return state.replace(method_state=method.init(models, request.prompt, request.prompt_length, out))


def decode_step(
    models: Models, state: DecodeState, request: Request, method: Method, max_new_tokens: int
) -> tuple[DecodeState, Array, Array]:
    """One round: draft, verify, accept, commit, observe. Rows that have ended keep their state and attend to nothing.

    Returns:
        The new state, and what the round emitted: tokens int32 [B, g+1], of which the first count int32 [B] are valid.
    """
    models = models.for_running(state)
    state, draft = draft_tokens(models, state, request, method)
    out = method.verify(models, state, draft)
    length = state.length
    state, verdict, tokens, count = commit(state.replace(cache=out.cache), draft, out, request, max_new_tokens)
    method_state = method.observe(models, state.method_state, out, draft, verdict, length)
    return state.replace(method_state=method_state), tokens, count


def draft_tokens(models: Models, state: DecodeState, request: Request, method: Method) -> tuple[DecodeState, Draft]:
    """The first phase of a round: the method drafts."""
    keys = jax.vmap(jax.random.fold_in, (0, None))(_round_keys(state), 1)
    draft, cache, method_state = method.draft(models, state, request.sampling, keys)
    return state.replace(cache=cache, method_state=method_state), draft


def decode_all(
    models: Models,
    state: DecodeState,
    request: Request,
    method: Method,
    max_new_tokens: int,
    least_running: Array | int = 1,
) -> DecodeState:
    """Rounds while at least `least_running` rows, int32 [], have not ended."""
    return jax.lax.while_loop(
        lambda state: jnp.sum(state.finish == Finish.RUNNING) >= least_running,
        lambda state: decode_step(models, state, request, method, max_new_tokens)[0],
        state,
    )


def finish_output(state: DecodeState, request: Request, max_new_tokens: int) -> Output:
    """What `generate` returns, of a finished state."""
    valid = jnp.arange(max_new_tokens) < state.num_tokens[:, None]
    tokens = jnp.where(valid, state.tokens[:, :max_new_tokens], request.pad_id)
    logprobs = None if state.logprobs is None else jnp.where(valid, state.logprobs[:, :max_new_tokens], 0)
    return Output(tokens, state.num_tokens, state.finish, state.stats, logprobs)


def _round_keys(state: DecodeState) -> Array:
    # by the row's own rounds, so that it does not matter when its batch began; the prefill is number 0
    number = state.stats.rounds + (state.round > 0)
    return jax.vmap(jax.random.fold_in)(state.keys, number)


def commit(
    state: DecodeState,
    draft: Draft,
    out: ForwardOut,
    request: Request,
    max_new_tokens: int,
    *,
    is_round: bool = True,
) -> tuple[DecodeState, Verdict, Array, Array]:
    """Accepts, applies the stop rules, and advances the active rows. Returns state, verdict, tokens and their count."""
    g = draft.tokens.shape[1]
    slot = jnp.arange(g + 1)
    active = state.finish == Finish.RUNNING
    accept_keys = jax.vmap(jax.random.fold_in, (0, None))(_round_keys(state), 0)
    verdict = accept(draft, out.logits, request.sampling, accept_keys)
    proposed = verdict.num_accepted[:, None]
    tokens = jnp.where(slot < proposed, jnp.pad(draft.tokens, ((0, 0), (0, 1))), verdict.next_token[:, None])

    read = slot <= draft.count[:, None]
    # the maximum is NaN if any logit is; an infinite one leaves no distribution either, while -inf only masks a token
    has_nan = jnp.any(~jnp.isfinite(jnp.max(out.logits, axis=-1)) & read, axis=1)
    # slots behind the next token repeat it, so the first end lies behind it only where there is none
    is_eos = jnp.any(tokens[..., None] == request.eos_ids, axis=-1)
    stop_at = jnp.where(jnp.any(is_eos, axis=1), jnp.argmax(is_eos, axis=1), g + 1)
    count = jnp.minimum(jnp.minimum(verdict.num_accepted, stop_at) + 1, max_new_tokens - state.num_tokens)
    count = jnp.where(active & ~has_nan, count, 0).astype(jnp.int32)
    finish = jnp.select(
        [~active, has_nan, stop_at < count, state.num_tokens + count >= max_new_tokens],
        [state.finish, jnp.int8(Finish.NAN), jnp.int8(Finish.EOS), jnp.int8(Finish.LENGTH)],
        jnp.int8(Finish.RUNNING),
    )

    def append(buffer: Array, values: Array) -> Array:
        # columns behind num_tokens are scratch, so the whole block can be written whatever its count is
        return jax.vmap(lambda b, v, i: jax.lax.dynamic_update_slice(b, v, (i,)))(buffer, values, state.num_tokens)

    logprobs = state.logprobs
    if logprobs is not None:
        token_logits = jnp.take_along_axis(out.logits, tokens[..., None], axis=-1)[..., 0]
        logprobs = append(logprobs, token_logits - jax.nn.logsumexp(out.logits, axis=-1))
    stats = state.stats
    if is_round:
        at = jnp.arange(active.shape[0]), jnp.where(active, stats.rounds, max_new_tokens)
        stats = Stats(
            rounds=stats.rounds + active,
            emitted=stats.emitted + count,
            drafted=stats.drafted.at[at].set(draft.count.astype(jnp.int16), mode="drop"),
            accepted=stats.accepted.at[at].set(verdict.num_accepted.astype(jnp.int16), mode="drop"),
        )
    state = state.replace(
        tokens=append(state.tokens, tokens),
        num_tokens=state.num_tokens + count,
        length=state.length + count,
        last_token=jnp.where(active, verdict.next_token, state.last_token),
        finish=finish,
        round=state.round + 1,
        stats=stats,
        logprobs=logprobs,
    )
    return state, verdict, tokens, count
