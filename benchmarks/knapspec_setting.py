"""What the parts of knapspec.py share: prompts in a cache that is filled once, runs from it, and latencies."""

import statistics
import time
from dataclasses import replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from acceptance_prompts import rows_of_text

from jaxspec import KnapSpec, Plan, Sampling, Vegas
from jaxspec.benchmarking.runs import time_loop
from jaxspec.decode import begin, decode_all, decode_in_segments
from jaxspec.methods import Method, Models, Plain
from jaxspec.methods.knapspec import traced_plan
from jaxspec.metrics import measure as figures_of
from jaxspec.models import cache_capacity, init_cache
from jaxspec.planning import LatencyProfile, Planned, PlannerOptions, plan
from jaxspec.planning.measure import Measurement, describe, measure
from jaxspec.planning.plan import fitted, read_search, search_plan
from jaxspec.prefill import fill_cache
from jaxspec.requests import check_request
from jaxspec.types import DecodeState, LayerMask


class Setting:
    """One batch of prompts at one context length."""

    def __init__(self, models: Models, texts: dict, context: int, batch: int, args) -> None:
        self.models, self.context, self.batch, self.args = models, context, batch, args
        per_text = [rows_of_text(text, context, -(-batch // len(texts))) for text in texts.values()]
        rows = [row for group in zip(*per_text, strict=True) for row in group][:batch]
        self.new_tokens, self.most = args.new_tokens, args.max_draft
        self.request = check_request(
            models.target, np.array(rows, np.int32), np.full(batch, context), jax.random.key(0), Plain(), Sampling(),
            self.new_tokens, (), 0, None,
        )  # fmt: skip
        capacity = cache_capacity(self.request.prompt.shape[1] + self.new_tokens + self.most + 1)
        cache = init_cache(models.target.config, batch, capacity, models.params["embedding"].dtype)
        fill = jax.jit(partial(fill_cache, models.target), donate_argnums=3)
        self.cache = fill(models.params, self.request.prompt, self.request.prompt_length, cache)
        jax.block_until_ready(self.cache)
        self.vegas = Vegas(rho=args.rho, min_keep=args.min_keep, num_draft=args.num_draft)
        self.measurement: Measurement | None = None
        self._begin = jax.jit(
            lambda models, cache, request, method: begin(models, cache, request, method, self.new_tokens),
            static_argnames="method",
            donate_argnums=1,
        )
        self._loop = jax.jit(
            lambda models, state, request, least_running, method: decode_all(
                models, state, request, method, self.new_tokens, least_running
            ),
            static_argnames="method",
            donate_argnums=1,
        )

    @property
    def profile(self) -> LatencyProfile:
        """Latencies at this batch size."""
        return self.measurement.profile

    def start(self, method: Method, length: int | None = None) -> DecodeState:
        """The state after the prompt, or after its first `length` tokens; it takes the cache with it."""
        lengths = np.full(self.batch, length or self.context, np.int32)
        request = self.request.replace(prompt_length=lengths)
        return self._begin(self.models, self.cache, request, method=_beginning(method, self.most))

    def compile(self, methods: list[Method], planners: list[tuple[Method, PlannerOptions]] = ()) -> float:
        """Compiles the decode loops of fixed methods, and planners; returns seconds."""
        started = time.perf_counter()
        lowered = []
        for method in {_beginning(m, self.most): None for m in (*methods, *(m for m, _ in planners))}:
            lowered.append(self._begin.lower(self.models, self.cache, self.request, method=method))
        for method in methods:
            state = self._state_shapes(method)
            lowered.append(self._loop.lower(self.models, state, self.request, least_running=np.int32(1), method=method))
        for method, options in planners:
            select = partial(_selection, self.models, method=method)
            state = self._state_shapes(method)
            costs, options = self.profile.costs(method.sparse), self._fitted(options, method, self.context)
            arguments = (self.request.prompt, self.request.prompt_length, state.tokens, state.length, costs, options)
            lowered.append(search_plan.lower(self.models, state.cache, *arguments, jax.eval_shape(select, state=state)))
        # one after another: a GPU's compiler times its choices on the device, and keeps what it found for the next
        for low in lowered:
            low.compile()
        return time.perf_counter() - started

    def _state_shapes(self, method: Method):
        start = partial(self._begin, method=_beginning(method, self.most))
        return jax.eval_shape(start, self.models, self.cache, self.request)

    def run(self, method: Method, repeats: int = 2) -> dict:
        """Decodes with a fixed method: figures of the fastest of `repeats` runs."""
        best = None
        for _ in range(repeats):
            state = jax.block_until_ready(self.start(method))
            if isinstance(method, KnapSpec) and method.execution == "traced":
                state = state.replace(method_state=traced_plan(method.plan, state.method_state))
            loop = method.with_plan(None) if getattr(method, "execution", "") == "traced" else method
            state, seconds, part = time_loop(partial(self._loop, self.models, method=loop), state, self.request)
            self.cache = state.cache
            best = min(best or (seconds, part), (seconds, part))
        seconds, (first, rounds, emitted) = best
        figures = {"tokens_per_second_all_running": emitted / first, "milliseconds_per_round": 1e3 * first / rounds}
        return self._figures(state, seconds) | figures

    def run_adaptive(self, method: KnapSpec) -> dict:
        """Decodes with plans that change under way; the second of two runs, whose programs are compiled."""
        for _ in range(2):
            state = jax.block_until_ready(self.start(method))
            state, run = decode_in_segments(self.models, self.request, method, self.new_tokens, state=state)
            self.cache = state.cache
        figures = self._figures(state, run.decode_seconds + run.replan_seconds)
        searches = sum(record["searched"] for record in run.log)
        return {
            **figures,
            "num_plans": searches,
            "seconds_per_plan": run.replan_seconds / searches,
            "planner_seconds": run.replan_seconds,
            "planner_share": run.replan_seconds / (run.decode_seconds + run.replan_seconds),
            "plans": run.log,
            "decode_only_seconds": run.decode_seconds,
            "compile_seconds": run.compile_seconds,
        }

    def planner_cost(self, method: KnapSpec, repeats: int = 5) -> dict:
        """Median seconds of planning after the prompt, compile time left out: those that the host waits for the device,
        and those before and after, when it calls the program and reads what was found."""
        state = self.start(method)
        costs, options = self.profile.costs(method.sparse), self._fitted(method.planner_options, method, self.context)
        prompt = self.request.prompt, np.full(self.batch, self.context, np.int32)
        selection = _selection(self.models, state, method)
        waited, host = [], []
        for _ in range(repeats + 1):
            jax.block_until_ready((state, selection))
            times = [time.perf_counter()]
            found = search_plan(
                self.models, state.cache, *prompt, state.tokens, state.length, costs, options, selection
            )
            times.append(time.perf_counter())
            jax.block_until_ready(found)
            times.append(time.perf_counter())
            read_search(jax.device_get(found._replace(frontier=found.frontier._replace(states=()))))
            times.append(time.perf_counter())
            before, during, after = np.diff(times)
            waited.append(during)
            host.append(before + after)
        self.cache = state.cache
        return {
            "planner_device_seconds": statistics.median(waited[1:]),
            "planner_host_seconds": statistics.median(host[1:]),
            "planner_branches": options.max_cells,
        }

    def plan(self, options: PlannerOptions, *, method: KnapSpec | None = None, length: int | None = None) -> Planned:
        """The planner's choice after the prompt, or after its first `length` tokens; `method` says which selection."""
        method = method or KnapSpec()
        state = self.start(method, length)
        selection = _selection(self.models, state, method)
        lengths = np.full(self.batch, length or self.context, np.int32)
        options = self._fitted(options, method, length or self.context)
        arguments = (state.cache, self.request.prompt, lengths, state.tokens, state.length, self.profile, options)
        found = plan(self.models, *arguments, selection=selection)
        self.cache = state.cache
        return found

    def _fitted(self, options: PlannerOptions, method: KnapSpec, length: int) -> PlannerOptions:
        """With the branches of a run that begins at a length."""
        num_layers, lengths = self.models.target.config.num_layers, (length, self.context + self.new_tokens)
        return fitted(options, self.profile.costs(method.sparse), num_layers, lengths)

    def agreement(self, masks: list[Plan]) -> list[float]:
        """Top-1 agreement of each mask with the full model on the planner's reference tokens: (hits + 1) / (r + 2)."""
        r = max(32 // self.batch, 1)
        start = np.int32(self.context - 1 - r)
        tokens = self.request.prompt[:, start : start + r]
        everything = (True,) * self.models.target.config.num_layers
        full = self._top(everything, everything, tokens, start)
        hits = [int(np.sum(self._top(p.attn, p.mlp, tokens, start) == full)) for p in masks]
        return [(h + 1) / (full.size + 2) for h in hits]

    def _top(self, attn: tuple, mlp: tuple, tokens: np.ndarray, start: np.int32) -> np.ndarray:
        # rows before `start` are those of the full model; the ones written are written again before they are read
        top, self.cache = self._masked(self.models, self.cache, tokens, start, np.array(attn), np.array(mlp))
        return np.asarray(top)

    @cached_property
    def _masked(self):
        def masked(models, cache, tokens, start, attn, mlp):
            out = models.forward(tokens, cache, start, layers=LayerMask(jnp.asarray(attn), jnp.asarray(mlp)))
            return jnp.argmax(out.logits, axis=-1), out.cache

        return jax.jit(masked, donate_argnums=1)

    def _figures(self, state: DecodeState, seconds: float) -> dict:
        stats = jax.tree.map(np.asarray, state.stats)
        figures = figures_of(stats)
        self.tokens = np.asarray(state.tokens)[:, : self.new_tokens]
        rejected = int(np.sum(stats.accepted < stats.drafted))
        accepted = int(np.sum(stats.accepted))
        return {
            "seconds": seconds,
            "tokens_per_second": self.batch * (self.new_tokens - 1) / seconds,
            "tokens_per_round": figures.tokens_per_round.token_weighted,
            # per draft token that was reached: what alpha predicts
            "acceptance": accepted / (accepted + rejected) if accepted + rejected else None,
            "accepted_of_drafted": figures.acceptance.token_weighted,
            "milliseconds_per_round": 1e3 * seconds / max(int(stats.rounds.max()), 1),
        }


def _beginning(method: Method, most: int) -> Method:
    """The method as it is while the prefill ends: no plan is needed, and one program serves all plans and plain
    decoding, which does with more room than it needs."""
    if isinstance(method, Plain):
        return KnapSpec(max_draft=most)
    if isinstance(method, KnapSpec):
        fixed = KnapSpec(max_draft=most, selection=method.selection)
        return fixed if method.plan is not None else replace(fixed, execution=method.execution)
    return method


def _selection(models: Models, state: DecodeState, method: KnapSpec):
    return method.selection.draft_selection(models, state) if method.selection else None


_settings: dict[tuple, Setting] = {}
_measurements: dict[int, Measurement] = {}


def setting_of(report, models: Models, texts: dict, context: int, batch: int, args) -> Setting:
    """The setting, made on first use: prefill and programs serve all parts."""
    if (context, batch) not in _settings:
        if batch not in _measurements:
            inner = Vegas(rho=args.rho, min_keep=args.min_keep, num_draft=args.max_draft)
            contexts = sorted({max(min(args.contexts) // 4, 16), *args.contexts, max(args.contexts) + args.new_tokens})
            measured = measure(models, batch, contexts, max_draft=args.max_draft, selection=inner, steps=16)
            _measurements[batch] = measured
            report.add(
                "latency",
                {
                    "batch": batch,
                    "fit_error": measured.fit_error,
                    "plain_error": measured.plain_error,
                    "seconds": measured.seconds,
                    "contexts": measured.contexts,
                    **describe(models, measured)["measured"],
                    "profile": measured.profile.as_dict(),
                },
            )
        setting = Setting(models, texts, context, batch, args)
        setting.measurement = _measurements[batch]
        _settings[context, batch] = setting
    return _settings[context, batch]


def forget_settings() -> None:
    """Gives the caches' memory back."""
    _settings.clear()
