"""When `KnapSpec` plans anew, and whether the new plan is worth its compile time. Host only."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.planning.latency import LatencyProfile, RoundCosts, expected_tokens
from jaxspec.planning.plan import Candidate, Plan, Planned, PlannerOptions, fitted, plan, promised, search_plan
from jaxspec.replanning import Run
from jaxspec.types import DecodeState, Finish, LayerMask

if TYPE_CHECKING:
    from jaxspec.methods.knapspec import KnapSpec

MEASURED = 4  # times as many drafts tried as a search has reference tokens: half the error


@dataclass
class _Memory:
    """What is remembered from one call to the next."""

    profile: LatencyProfile
    options: PlannerOptions  # with branches for all lengths of the run
    period: int  # rounds from a plan to the next
    found: Planned | None = None  # by the last search
    plan: Plan | None = None  # what drafts now
    waiting: Plan | None = None  # chosen, and compiling in the background
    planned_at: tuple[int, float] = (0, 1.0)  # rounds and context length at the last planning
    plan_seconds: float = 0.0  # of the last planning
    counts: dict[str, Any] = field(default_factory=dict)  # at the last call
    # int64 [2, B]: accepted drafts, and accepted or rejected ones, by the sublayers that they ran
    measured: dict[LayerMask, np.ndarray] = field(default_factory=dict)


def replan(method: "KnapSpec", run: Run) -> "tuple[KnapSpec, DecodeState]":
    """`KnapSpec.replan`: the method with the plan to go on with, and the state, which holds the plan where traced.

    Plans before the first round; afterwards if planning is due and has taken at most `planner_share` of the decoding
    time so far, this one included. Due it is once the context has grown by `growth`, or a period after the last one:
    `replan_every` rounds, doubled each time that the plan stays. In between, a plan that measures worse than skipping
    nothing, or than another plan did, is given up for that one. Each planning and each such change leaves a record in
    `run.log`. The next call comes after `replan_every` rounds, or a quarter of them until the plan is measured.
    """
    memory = run.memory.get("knapspec")
    if memory is None:
        profile = _profile(method, run)
        costs, length = profile.costs(method.sparse), _context(run.state)
        lengths = length, length + run.max_new_tokens
        options = fitted(method.planner_options, costs, profile.num_layers, lengths)
        memory = run.memory["knapspec"] = _Memory(profile, options, method.replan_every)
        started = time.perf_counter()
        running, measured = _running(run.state), np.zeros(2, np.int32)
        selection = _selection(method, run)
        search_plan.lower(*_arguments(run), costs, options, selection, running, measured).compile()
        run.compile_seconds += time.perf_counter() - started
    acceptance = _measure(memory, run.state)
    if memory.waiting is not None and run.is_ready(method.with_plan(memory.waiting)):
        memory.plan, memory.waiting = memory.waiting, None
    if memory.plan is None or _is_due(method, run, memory):
        memory.found, seconds = _plan(method, run, memory)
        memory.planned_at, memory.plan_seconds = (run.rounds, _context(run.state)), seconds
        found = _choose(method, run, memory, memory.found.frontier)
        kept = _consider(method, run, memory, found, seconds, acceptance) in ("same", "not worth it")
        memory.period = 2 * memory.period if kept else method.replan_every
    elif memory.waiting is None and _is_measured(method, run, memory, memory.plan):
        found = _choose(method, run, memory, [c for c in memory.found.frontier if not c.weight])
        if found.plan != memory.plan:
            _consider(method, run, memory, found, 0.0, acceptance)
    if memory.plan.num_draft and not _is_measured(method, run, memory, memory.plan):
        run.replan_at = run.rounds + max(method.replan_every // 4, 1)
    return _with(method, run, memory.plan)


def _choose(method: "KnapSpec", run: Run, memory: _Memory, predicted: Sequence[Candidate]) -> Planned:
    """The best of some candidates, of what was skipped so far, by the acceptance that was measured, and of not
    speculating; as what the last search found."""
    assert memory.found is not None
    every, n = (True,) * memory.profile.num_layers, _context(run.state)
    alphas = {LayerMask(every, every): 0.0}
    alphas |= {candidate.plan.layers: candidate.alpha for candidate in predicted}
    for layers in memory.measured:
        accepted, tried = _measured(run, memory, layers)
        if tried >= MEASURED * method.reference_tokens:
            alphas[layers] = accepted / tried
    alpha = np.array(list(alphas.values()))
    attention, mlp = (np.array([sum(getattr(layers, kind)) for layers in alphas]) for kind in ("attn", "mlp"))
    costs = memory.profile.costs(method.sparse)
    value, rate = promised(alpha, attention, mlp, costs, n, memory.options)
    best, num_draft = np.unravel_index(np.argmax(value), value.shape)
    layers = list(alphas)[best]
    return replace(
        memory.found,
        plan=Plan(layers.attn, layers.mlp, num_draft),
        alpha=float(alpha[best]),
        tokens_per_second=float(rate[best, num_draft]),
        plain_tokens_per_second=float(1 / costs.plain_step(n)),
    )


def _consider(
    method: "KnapSpec", run: Run, memory: _Memory, found: Planned, seconds: float, acceptance: float | None
) -> str:
    """Takes a plan over where that pays; returns which, and notes it."""
    record = {
        "round": run.rounds,
        "length": _context(run.state),
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
    taken = _take(method, run, memory, found)
    # what is not taken over without a search would be noted at every call
    if seconds or taken != "not worth it":
        run.note({**record, "taken": taken})
    return taken


def _take(method: "KnapSpec", run: Run, memory: _Memory, found: Planned) -> str:
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
    accepted, tried = _measured(run, memory, memory.plan.layers)
    old = rate_of(costs, memory.plan, accepted / tried if tried else None, _context(run.state))
    state = run.state
    active = _running(state)
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
    grown = _context(run.state) >= method.growth * length
    due = grown or run.rounds - rounds >= memory.period
    return due and run.replan_seconds + memory.plan_seconds <= method.planner_share * run.decode_seconds


def _plan(method: "KnapSpec", run: Run, memory: _Memory) -> tuple[Planned, float]:
    started = time.perf_counter()
    selection = _selection(method, run)
    every = (True,) * memory.profile.num_layers
    found = plan(
        *_arguments(run),
        memory.profile,
        memory.options,
        selection=selection,
        running=_running(run.state),
        measured=_measured(run, memory, LayerMask(every, every)),
    )
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


def _measure(memory: _Memory, state: DecodeState) -> float | None:
    """Counts what became of the drafts since the last call, and returns the chance that one was accepted: accepted /
    (accepted + rejected); None without drafts."""
    names = ("rounds", "accepted", "drafted")
    now = {name: np.asarray(getattr(state.stats, name)).astype(np.int64) for name in names}
    before, memory.counts = memory.counts.get("rounds", np.zeros_like(now["rounds"])), now
    round_ = np.arange(now["drafted"].shape[1])
    new = (round_ >= before[:, None]) & (round_ < now["rounds"][:, None])
    accepted = np.sum(now["accepted"], axis=1, where=new)
    tried = accepted + np.sum(now["accepted"] < now["drafted"], axis=1, where=new)
    if memory.plan is None or not tried.any():
        return None
    layers, counts = memory.plan.layers, np.stack([accepted, tried])
    memory.measured[layers] = memory.measured.get(layers, 0) + counts
    return float(accepted.sum() / tried.sum())


def _measured(run: Run, memory: _Memory, layers: LayerMask) -> tuple[int, int]:
    """Drafts of these sublayers that were accepted, and that were accepted or rejected, of the rows that still run: the
    others' are easier, as they ended first."""
    if layers not in memory.measured:
        return 0, 0
    accepted, tried = memory.measured[layers][:, _running(run.state)].sum(axis=1)
    return int(accepted), int(tried)


def _is_measured(method: "KnapSpec", run: Run, memory: _Memory, plan: Plan) -> bool:
    """Whether a plan's drafts were tried so often that what a search predicts is of no more use."""
    return _measured(run, memory, plan.layers)[1] >= MEASURED * method.reference_tokens


def _running(state: DecodeState) -> np.ndarray:
    """bool [B]: rows that have not ended."""
    return np.asarray(state.finish) == Finish.RUNNING


def _context(state: DecodeState) -> float:
    """The context length that a round pays for, a row: attention leaves out those that have ended."""
    return float(np.mean(np.where(_running(state), np.asarray(state.length), 0)))


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
