"""When `KnapSpec` plans anew, and whether the new plan is worth its compile time. Host only."""

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.planning.latency import LatencyProfile, RoundCosts, expected_tokens
from jaxspec.planning.plan import Plan, Planned, PlannerOptions, fitted, plan, search_plan
from jaxspec.replanning import Run
from jaxspec.types import DecodeState, Finish

if TYPE_CHECKING:
    from jaxspec.methods.knapspec import KnapSpec


@dataclass
class _Memory:
    """What is remembered from one call to the next."""

    profile: LatencyProfile
    options: PlannerOptions  # with branches for all lengths of the run
    period: int  # rounds from a plan to the next
    plan: Plan | None = None  # what drafts now
    waiting: Plan | None = None  # chosen, and compiling in the background
    planned_at: tuple[int, float] = (0, 1.0)  # rounds and context length at the last planning
    plan_seconds: float = 0.0  # of the last planning
    counts: dict[str, Any] = field(default_factory=dict)  # at the last call


def replan(method: "KnapSpec", run: Run) -> "tuple[KnapSpec, DecodeState]":
    """`KnapSpec.replan`: the method with the plan to go on with, and the state, which holds the plan where traced.

    Plans before the first round; afterwards if planning is due and has taken at most `planner_share` of the decoding
    time so far, this one included. Due it is once the context has grown by `growth`, or a period after the last one:
    `replan_every` rounds, doubled each time that the plan stays. Each planning leaves a record in `run.log`. The next
    call is put off where no planning is to be expected after `replan_every` rounds.
    """
    memory = run.memory.get("knapspec")
    if memory is None:
        profile = _profile(method, run)
        costs, length = profile.costs(method.sparse), _mean_length(run.state)
        lengths = length, length + run.max_new_tokens
        options = fitted(method.planner_options, costs, profile.num_layers, lengths)
        memory = run.memory["knapspec"] = _Memory(profile, options, method.replan_every)
        started = time.perf_counter()
        search_plan.lower(*_arguments(run), costs, options, _selection(method, run)).compile()
        run.compile_seconds += time.perf_counter() - started
    acceptance = _acceptance(memory, run.state)
    if memory.waiting is not None and run.is_ready(method.with_plan(memory.waiting)):
        memory.plan, memory.waiting = memory.waiting, None
    if memory.plan is None or _is_due(method, run, memory):
        _consider(method, run, memory, acceptance)
    run.replan_at = max(run.replan_at, run.rounds + _rounds_until_due(method, run, memory))
    return _with(method, run, memory.plan)


def _consider(method: "KnapSpec", run: Run, memory: _Memory, acceptance: float | None) -> None:
    """Plans, and takes the plan over where that pays."""
    found, seconds = _plan(method, run, memory)
    length = _mean_length(run.state)
    memory.planned_at, memory.plan_seconds = (run.rounds, length), seconds
    record = {
        "round": run.rounds,
        "length": length,
        "seconds": seconds,
        "weights": found.weights,
        "attn": found.plan.attn,
        "mlp": found.plan.mlp,
        "num_draft": found.plan.num_draft,
        "predicted_acceptance": found.alpha,
        "predicted_tokens_per_second": found.tokens_per_second,
        "predicted_plain_tokens_per_second": found.plain_tokens_per_second,
        "measured_acceptance_before": acceptance,
    }
    record["taken"] = _take(method, run, memory, found, acceptance)
    kept = record["taken"] in ("same", "not worth it")
    memory.period = 2 * memory.period if kept else method.replan_every
    run.note(record)


def _take(method: "KnapSpec", run: Run, memory: _Memory, found: Planned, acceptance: float | None) -> str:
    """Takes a plan over or not; returns which, for the record."""
    if memory.plan is None:
        memory.plan = found.plan
        run.prepare(method.with_plan(None if method.execution == "traced" else found.plan), background=False)
        return "first"
    if found.plan == memory.plan:
        return "same"
    if method.execution == "traced":
        memory.plan = found.plan
        return "changed"
    costs = memory.profile.costs(method.sparse)
    old = rate_of(costs, memory.plan, acceptance, _mean_length(run.state))
    state = run.state
    active = np.asarray(state.finish) == Finish.RUNNING
    left = float(np.mean(run.max_new_tokens - np.asarray(state.num_tokens)[active])) if active.any() else 0.0
    saved = left / old - left / found.tokens_per_second
    executed = method.with_plan(found.plan)
    cost = 0.0 if run.is_ready(executed) else run.longest_compile_seconds
    background = method.compile_in == "background"
    # in the background compiling costs nothing but the tokens that the old plan decodes meanwhile
    worth = saved > 0 and left / old > cost if background else saved > cost
    if not worth:
        return "not worth it"
    if run.prepare(executed, background=background):
        memory.plan, memory.waiting = found.plan, None
        return "changed"
    memory.waiting = found.plan
    return "compiling"


def rate_of(costs: RoundCosts, plan: Plan, acceptance: float | None, n: float) -> float:
    """Predicted tokens per second and sequence of a plan.

    Args:
        costs: measured latencies.
        plan: the plan.
        acceptance: the chance that a draft token is accepted; None counts as 0.
        n: context length.
    """
    tokens = float(expected_tokens(float(acceptance or 0.0), plan.num_draft))
    return tokens / float(costs.round(plan.num_attention, plan.num_mlp, plan.num_draft, n))


def _with(method: "KnapSpec", run: Run, chosen: Plan) -> "tuple[KnapSpec, DecodeState]":
    if method.execution == "static":
        return method.with_plan(chosen), run.state
    from jaxspec.methods.knapspec import traced_plan  # which imports this package

    state = run.state
    return method.with_plan(None), state.replace(method_state=traced_plan(chosen, state.method_state.selection))


def _is_due(method: "KnapSpec", run: Run, memory: _Memory) -> bool:
    rounds, length = memory.planned_at
    grown = _mean_length(run.state) >= method.growth * length
    due = grown or run.rounds - rounds >= memory.period
    return due and run.replan_seconds + memory.plan_seconds <= method.planner_share * run.decode_seconds


def _rounds_until_due(method: "KnapSpec", run: Run, memory: _Memory) -> int:
    """Rounds until `_is_due` is true, at the speed and with the tokens per round so far; 0 where that is not known."""
    if memory.waiting is not None or not run.rounds or not run.decode_seconds:
        return 0
    rounds, length = memory.planned_at
    now, tokens = _mean_length(run.state), float(np.mean(np.asarray(run.state.stats.emitted)))
    growth = (method.growth * length - now) * run.rounds / max(tokens, 1.0)
    seconds = (run.replan_seconds + memory.plan_seconds) / method.planner_share - run.decode_seconds
    share = seconds * run.rounds / run.decode_seconds
    return int(min(max(min(growth, rounds + memory.period - run.rounds), share), 2.0**30))


def _plan(method: "KnapSpec", run: Run, memory: _Memory) -> tuple[Planned, float]:
    started = time.perf_counter()
    selection = _selection(method, run)
    found = plan(*_arguments(run), memory.profile, memory.options, selection=selection)
    seconds = time.perf_counter() - started
    run.replan_seconds += seconds
    return found, seconds


def _arguments(run: Run) -> tuple[Any, ...]:
    state, request = run.state, run.request
    return run.models, state.cache, request.prompt, request.prompt_length, state.tokens, state.length


def _selection(method: "KnapSpec", run: Run) -> Any:
    if not method.sparse:
        return None
    own = run.state.method_state
    own = own.selection if method.execution == "traced" else own
    return method.selection.draft_selection(run.models, run.state.replace(method_state=own))


def _acceptance(memory: _Memory, state: DecodeState) -> float | None:
    """The chance that a draft token was accepted since the last call: accepted / (accepted + rejected); None without
    drafts."""
    names = ("rounds", "accepted", "drafted")
    now = {name: np.asarray(getattr(state.stats, name)).astype(np.int64) for name in names}
    before, memory.counts = memory.counts.get("rounds", np.zeros_like(now["rounds"])), now
    round_ = np.arange(now["drafted"].shape[1])
    new = (round_ >= before[:, None]) & (round_ < now["rounds"][:, None])
    accepted = int(now["accepted"][new].sum())
    rejected = int(np.sum(now["accepted"][new] < now["drafted"][new]))
    return accepted / (accepted + rejected) if accepted + rejected else None


def _mean_length(state: DecodeState) -> float:
    return float(np.mean(np.asarray(state.length)))


def _profile(method: "KnapSpec", run: Run) -> LatencyProfile:
    """The given profile, which was checked with the request, or a measured one."""
    if method.profile:
        return method.profile
    from jaxspec.planning.measure import measured_profile

    return measured_profile(
        run.models,
        run.state.length.shape[0],
        run.request.prompt.shape[1] + run.max_new_tokens,
        method.max_draft,
        method.selection or None,
        lambda text: print(f"jaxspec: measuring latencies for KnapSpec: {text}", file=sys.stderr, flush=True),
    )
