"""A target and a draft model over one prefilled batch, on which many methods run in turn."""

import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.benchmarking.runs import time_loop
from jaxspec.decode import commit, decode_all, draft_tokens, prefill
from jaxspec.dustin.verification import SparseState, SparseVerification
from jaxspec.methods import DraftModel, Dustin, Models
from jaxspec.metrics import measure
from jaxspec.requests import Request, bucket, check_request
from jaxspec.sampling import Sampling
from jaxspec.types import DecodeState, ForwardOut

CHUNK = 16  # rows of a teacher-forced forward


class Prefilled:
    """One batch of prompts after the prefill of both models. Its caches go from method to method."""

    def __init__(self, pair: "Pair", rows: list[list[int]]) -> None:
        self.request = pair.request(rows)
        started = time.perf_counter()
        state = jax.block_until_ready(pair.prefill_program(pair.models, self.request))
        self.seconds = time.perf_counter() - started
        # what is small is kept on the host, since the loops take the state away
        self.small = jax.tree.map(np.asarray, _without_caches(state))
        self.caches = state.cache, state.method_state.own.cache

    def state(self) -> DecodeState:
        """A state for the method that prefilled. It must be handed back by `keep`."""
        caches, self.caches = self.caches, None
        return _with_caches(jax.tree.map(jnp.asarray, self.small), *caches)

    def keep(self, state: DecodeState) -> None:
        own = state.method_state
        own = own.own if isinstance(own, SparseState) else own
        self.caches = state.cache, own.cache if hasattr(own, "cache") else self.spare
        self.spare = None

    spare = None  # the draft model's cache, where a method does not take it


class Pair:
    """Compiled loops of methods over batches of one shape.

    Args:
        models: the target, and both models' parameters.
        base: a Dustin method that takes heads from both models; every prefill is its.
        rows: prompts that set the shape.
        new_tokens: per run.
    """

    def __init__(self, models: Models, base: Dustin, rows: list[list[int]], new_tokens: int) -> None:
        self.models, self.base, self.new_tokens = models, base, new_tokens
        self.width, self.batch = max(map(len, rows)), len(rows)
        self.prefill_program = jax.jit(partial(prefill, method=base, max_new_tokens=new_tokens))
        self.loops, self.starts, self.phase_programs = {}, {}, {}

    def request(self, rows: list[list[int]]) -> Request:
        assert len(rows) == self.batch
        prompt = np.array([[*ids, *[0] * (self.width - len(ids))] for ids in rows], np.int32)
        lengths = np.array([len(ids) for ids in rows], np.int32)
        request = check_request(
            self.models.target, prompt, lengths, jax.random.key(0), self.base, Sampling(), self.new_tokens, (), 0,
            self.models.draft_params,
        )  # fmt: skip
        # prompts of one width share the programs whatever their longest is
        padding = ((0, 0), (0, bucket(self.width) - request.prompt.shape[1]))
        return request.replace(prompt=np.pad(request.prompt, padding))

    def compile(self, methods: dict, prepared: Prefilled, attempt, phases: tuple[str, ...] = ()) -> None:
        """Compiles the loops of `methods`, and of some the phases of a round, side by side; what fails is left out."""
        started = time.perf_counter()
        request = prepared.request

        def state_of(name: str) -> DecodeState:
            state = _without_draft(methods[name], _with_caches(prepared.small, *prepared.caches))
            state = jax.eval_shape(lambda s: s, state)
            return jax.eval_shape(partial(self._adapt, methods[name], self.models), state, request)

        def build_loop(name: str) -> None:
            loop = partial(decode_all, method=methods[name], max_new_tokens=self.new_tokens)
            loop = jax.jit(loop, donate_argnums=1).lower(
                self.models, state_of(name), request, least_running=np.int32(1)
            )
            self.loops[name] = loop.compile()

        def build_phases(name: str) -> None:
            method, state = methods[name], state_of(name)
            draft, verify, rest = (jax.jit(partial(f, method, self.new_tokens), donate_argnums=1) for f in PHASES)
            state, drafts = jax.eval_shape(draft, self.models, state, request)
            verified, out = jax.eval_shape(verify, self.models, state, drafts)
            self.phase_programs[name] = (
                draft.lower(self.models, state_of(name), request).compile(),
                verify.lower(self.models, state, drafts).compile(),
                rest.lower(self.models, verified, drafts, out, request).compile(),
            )

        jobs = [(f"compile {name}", partial(build_loop, name)) for name in methods]
        jobs += [(f"compile phases of {name}", partial(build_phases, name)) for name in phases]
        # one after another: a GPU's compiler times its choices on the device, and keeps what it found for the next
        for job in jobs:
            attempt(*job)
        print(f"  compiled {len(jobs)} sets of programs in {time.perf_counter() - started:.0f} s", flush=True)

    def start(self, name: str, method, prepared: Prefilled) -> DecodeState:
        """The state of a method after the shared prefill."""
        state = prepared.state()
        if not method.needs_draft_params:
            prepared.spare = state.method_state.own.cache
        adapt = self.starts.setdefault(name, jax.jit(partial(self._adapt, method), donate_argnums=1))
        return adapt(self.models, _without_draft(method, state), prepared.request)

    def _adapt(self, method, models: Models, state: DecodeState, request: Request) -> DecodeState:
        base: SparseState = state.method_state
        if isinstance(method, DraftModel):
            return state.replace(method_state=base.own)
        if not isinstance(method, SparseVerification):
            return state.replace(method_state=())
        queries = (
            tuple(q[:, None] for q in base.queries) if method.prefill_collect(request.prompt_length).queries else ()
        )
        out = ForwardOut(None, state.cache, None, queries, None)
        return state.replace(method_state=method.start(models, request.prompt, request.prompt_length, out, base.own))

    def run(self, name: str, method, prepared: Prefilled) -> dict:
        """One greedy run: seconds without prefill, tokens [B, new], stats; and of the rounds in which all rows were
        running their seconds, number and emitted tokens."""
        state = jax.block_until_ready(self.start(name, method, prepared))
        state, seconds, part = time_loop(partial(self.loops[name], self.models), state, prepared.request)
        tokens, stats = np.asarray(state.tokens)[:, : self.new_tokens], jax.tree.map(np.asarray, state.stats)
        prepared.keep(state)
        return {"seconds": seconds, "tokens": tokens, "stats": stats, "all_running": part}

    def phases(self, name: str, method, prepared: Prefilled, num_rounds: int) -> dict:
        """Median milliseconds of a round's phases, each launched and waited for by itself."""
        state, request = self.start(name, method, prepared), prepared.request
        draft, verify, rest = self.phase_programs[name]
        seconds = {"draft, scores and selection": [], "verify": [], "accept and observe": []}

        def timed(phase: str, program, *args):
            started = time.perf_counter()
            result = jax.block_until_ready(program(*args))
            seconds[phase].append(time.perf_counter() - started)
            return result

        for _ in range(num_rounds):
            state, drafts = timed("draft, scores and selection", draft, self.models, state, request)
            state, out = timed("verify", verify, self.models, state, drafts)
            state = timed("accept and observe", rest, self.models, state, drafts, out, request)
        prepared.keep(state)
        return {phase: 1e3 * statistics.median(values[1:]) for phase, values in seconds.items()}

    def teacher_forced(self, tokens: np.ndarray, prepared: Prefilled) -> tuple[np.ndarray, np.ndarray]:
        """The full model's verdict on every emitted token [B, n]: whether it is the likeliest, and how much
        log-probability it gives up against that."""
        target_cache, draft_cache = prepared.caches
        prompt, lengths = np.asarray(prepared.request.prompt), np.asarray(prepared.request.prompt_length)
        last = np.take_along_axis(prompt, lengths[:, None] - 1, axis=1)
        count = tokens.shape[1]
        inputs = np.concatenate([last, tokens], axis=1)
        hits, gaps = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, np.float32)
        for begin in range(0, count, CHUNK):
            # the last chunk begins earlier instead of writing past the run's own rows
            begin = max(min(begin, count - CHUNK), 0)
            fed, wanted = inputs[:, begin : begin + CHUNK], tokens[:, begin : begin + CHUNK]
            start = (lengths - 1 + begin).astype(np.int32)
            fed = fed[:, : wanted.shape[1]]
            target_cache, hit, gap = _judge(self.models.target, self.models.params, target_cache, fed, wanted, start)
            hits[:, begin : begin + CHUNK], gaps[:, begin : begin + CHUNK] = hit, gap
        prepared.caches = target_cache, draft_cache
        return hits, gaps


def _draft(method, new_tokens, models, state, request):
    return draft_tokens(models.for_running(state), state, request, method)


def _verify(method, new_tokens, models, state, drafts):
    out = method.verify(models.for_running(state), state, drafts)
    # the cache leaves by one way only: a second result would be a copy of it
    return state.replace(cache=out.cache), out._replace(cache=())


def _rest(method, new_tokens, models, state, drafts, out, request):
    length, out = state.length, out._replace(cache=state.cache)
    state, verdict, *_ = commit(state, drafts, out, request, new_tokens)
    method_state = method.observe(models.for_running(state), state.method_state, out, drafts, verdict, length)
    return state.replace(method_state=method_state)


PHASES = (_draft, _verify, _rest)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _judge(target, params, cache, tokens, wanted, start):
    out = target.apply({"params": params}, tokens, cache, start)
    chosen = jnp.take_along_axis(out.logits, wanted[..., None], axis=-1)[..., 0]
    return out.cache, jnp.argmax(out.logits, axis=-1) == wanted, jnp.max(out.logits, axis=-1) - chosen


def _without_draft(method, state: DecodeState) -> DecodeState:
    """The shared state without the draft model's, for methods that have none."""
    if method.needs_draft_params:
        return state
    return state.replace(method_state=state.method_state.replace(own=()))


def rows_measured(stats, at: np.ndarray) -> dict:
    """Tokens per round and acceptance of some rows of a batch."""
    figures = measure(jax.tree.map(lambda x: x[at], stats))
    return {
        "tokens_per_round": figures.tokens_per_round.per_row,
        "acceptance": figures.acceptance.token_weighted,
        "acceptance_by_position": list(figures.acceptance_by_position),
    }


def _without_caches(state: DecodeState) -> DecodeState:
    own = state.method_state
    return state.replace(
        cache=(), keys=jax.random.key_data(state.keys), method_state=own.replace(own=own.own.replace(cache=()))
    )


def _with_caches(small: DecodeState, target_cache, draft_cache) -> DecodeState:
    own = small.method_state
    own = own.replace(own=own.own.replace(cache=draft_cache))
    return small.replace(cache=target_cache, keys=jax.random.wrap_key_data(small.keys), method_state=own)
