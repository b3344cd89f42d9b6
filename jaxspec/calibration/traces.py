"""Verification traces: rounds of classic speculation in which every layer's true attention is measured."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.calibration.search import HeadSet, Trace
from jaxspec.decode import commit, draft_tokens, run_prefill
from jaxspec.methods.base import Method, Models
from jaxspec.methods.draft_model import DraftModel, DraftModelState
from jaxspec.models.decoder import Decoder
from jaxspec.requests import Request, check_request
from jaxspec.sampling import Sampling
from jaxspec.types import Array, Collect, DecodeState, Draft, ForwardOut, KVCache, Verdict
from pallas_kernels import attention_scores


@struct.dataclass
class TracedState:
    """Method state of `Traced`."""

    own: DraftModelState
    queries: tuple[Array, ...]  # per target layer [B, N, H]: of the token at row length - 1
    ahead: tuple[Array, ...]  # per draft layer [B, g, N, H]: of last, d_1..d_(g-1)


@dataclass(frozen=True)
class Traced(Method):
    """Classic speculation with a draft model that hands out the queries of all layers of both models. Lossless.

    Not a method to decode with: the queries are kept to measure attention.
    """

    needs_draft_params: ClassVar[bool] = True

    model: Decoder
    num_layers: int
    num_draft: int = 4

    @property
    def max_draft(self) -> int:
        return self.num_draft

    @property
    def _classic(self) -> DraftModel:
        return DraftModel(model=self.model, num_draft=self.num_draft)

    def prefill_collect(self, last: Array) -> Collect:
        return Collect(queries=tuple(range(self.num_layers)))

    def init(self, models: Models, prompt: Array, prompt_length: Array, out: ForwardOut) -> TracedState:
        own = self._classic.init(models, prompt, prompt_length, out)
        config = self.model.config
        shape = (prompt.shape[0], self.num_draft, config.num_heads, config.head_dim)
        ahead = tuple(jnp.zeros(shape, own.cache[0].k.dtype) for _ in range(config.num_layers))
        return TracedState(own, tuple(q[:, 0] for q in out.queries), ahead)

    def draft(
        self, models: Models, state: DecodeState, sampling: Sampling, keys: Array
    ) -> tuple[Draft, KVCache, TracedState]:
        own: TracedState = state.method_state
        layers = tuple(range(self.model.config.num_layers))
        state = state.replace(method_state=own.own)
        draft, new, ahead = self._classic.run(models, state, sampling, keys, query_layers=layers)
        return draft, state.cache, own.replace(own=new, ahead=ahead)

    def verify_collect(self, draft: Draft) -> Collect:
        return Collect(queries=tuple(range(self.num_layers)))

    def observe(
        self, models: Models, method_state: TracedState, out: ForwardOut, draft: Draft, verdict: Verdict, length: Array
    ) -> TracedState:
        accepted = verdict.num_accepted[:, None, None, None]
        queries = tuple(jnp.take_along_axis(q, accepted, axis=1)[:, 0] for q in out.queries)
        return method_state.replace(queries=queries)


def collect_traces(
    models: Models,
    draft_model: Decoder,
    prompts: Sequence[list[int]],
    target: Sequence[HeadSet],
    draft: Sequence[HeadSet],
    *,
    num_draft: int,
    rounds: int,
) -> Iterator[list[Trace]]:
    """Greedy rounds after each prompt; yields per round the traces of the prompts.

    Args:
        models: target, its parameters and those of the draft model.
        draft_model: the draft model.
        prompts: token ids; one ragged batch.
        target, draft: the candidate signals to measure.
        num_draft: drafts per round.
        rounds: how many rounds.
    """
    method = Traced(model=draft_model, num_layers=models.target.config.num_layers, num_draft=num_draft)
    most = rounds * (num_draft + 1) + 2
    width = max(map(len, prompts))
    padded = np.array([[*ids, *[0] * (width - len(ids))] for ids in prompts], np.int32)
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    request = check_request(
        models.target, padded, lengths, jax.random.key(0), method, Sampling(), most, (), 0, models.draft_params
    )
    state = run_prefill(models, request, method, most)
    for _ in range(rounds):
        length = np.asarray(state.length)
        state, *measured = _round(models, state, request, method, most, tuple(target), tuple(draft))
        weights, history, ahead = map(np.asarray, measured)
        yield [Trace(weights[:, b, :n], history[:, b, :n], ahead[:, b, :n]) for b, n in enumerate(length.tolist())]


@partial(jax.jit, static_argnames=("method", "most", "target", "draft"), donate_argnames="state")
def _round(
    models: Models, state: DecodeState, request: Request, method: Traced, most: int, target: tuple, draft: tuple
) -> tuple[DecodeState, Array, Array, Array]:
    """One round, and its true attention [L, B, S], S_target [C, B, S] and S_draft [D, B, S]."""
    length, before = state.length, state.method_state
    state, drafts = draft_tokens(models, state, request, method)
    out = method.verify(models, state, drafts)
    backend = models.target.backend
    newest = (length - 1)[:, None]

    def scores(q: Array, keys: Array, q_pos: Array, heads: tuple[int, ...]) -> Array:
        found = attention_scores(q, keys, q_pos, length, heads, scale=q.shape[-1] ** -0.5, backend=backend)
        return jnp.maximum(found, 0)  # rows past the length hold -inf

    every = tuple(range(models.target.config.num_heads))
    # a position before the round's rows for every query leaves out attention to rows in flight
    committed = jnp.broadcast_to(newest, out.queries[0].shape[:2])
    weights = [scores(q, layer.k, committed, every) for q, layer in zip(out.queries, out.cache, strict=True)]
    history = [scores(before.queries[c.layer][:, None], out.cache[c.layer].k, newest, c.heads) for c in target]
    own: Any = state.method_state
    ahead_pos = length[:, None] + jnp.arange(method.num_draft, dtype=jnp.int32)
    ahead = [scores(own.ahead[c.layer], own.own.cache[c.layer].k, ahead_pos, c.heads) for c in draft]
    state, verdict, *_ = commit(state.replace(cache=out.cache), drafts, out, request, most)
    method_state = method.observe(models, state.method_state, out, drafts, verdict, length)
    return state.replace(method_state=method_state), jnp.stack(weights), jnp.stack(history), jnp.stack(ahead)
