"""When `KnapSpec` plans anew, and whether the new plan is worth its compile time. Host only."""

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.planning.choice import acceptance_by_row, time_to_end
from jaxspec.planning.latency import LatencyProfile, expected_tokens
from jaxspec.planning.plan import Candidate, Plan, Planned, PlannerOptions, fitted, plan, round_prices, search_plan
from jaxspec.replanning import Run
from jaxspec.types import DecodeState, Finish, LayerMask

if TYPE_CHECKING:
    from jaxspec.methods.knapspec import KnapSpec


# Share of the time left that another plan has to save: by about as much the errors of two predicted rounds differ.
LEAST_GAIN = 0.03


@dataclass
class _Memory:
    """What is remembered from one call to the next."""

    profile: LatencyProfile
    options: PlannerOptions  # with branches for all lengths of the run
    period: int  # rounds from a search to the next
    # predicted acceptance over that of skipping nothing, which is the first: of what was ever chosen
    shares: dict[LayerMask, float]
    base: float = 0.0  # predicted acceptance of skipping nothing
    weights: tuple[int, int] = (1, 1)  # of an attention and an MLP sublayer
    plan: Plan | None = None  # what drafts now
    waiting: Plan | None = None  # chosen, and compiling in the background
    searched_at: tuple[int, float] = (0, 1.0)  # rounds and context length at the last search
    search_seconds: float = 0.0  # of the last search
    rounds: Any = 0  # int [B], rounds of each row at the last call
    pause: int = 0  # rounds from that call to the next
    seconds_left: float = np.inf  # until the last row ends with the plan that drafts, when that was last weighed
    # float [2, B] by the sublayers that drafts ran: those accepted, and those accepted or rejected
    measured: dict[LayerMask, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class _Choice:
    """The best plan, and what is predicted of it."""

    plan: Plan
    acceptance: float  # over all rows that run
    tokens_per_second: float  # per sequence
    plain_tokens_per_second: float
    seconds_left: float  # until the last row has ended
    seconds_left_before: float  # with the plan that drafts now


def replan(method: "KnapSpec", run: Run) -> "tuple[KnapSpec, DecodeState]":
    """`KnapSpec.replan`: the method with the plan to go on with, and the state, which holds the plan where traced.

    Searches before the first round; afterwards if a search is due and planning has taken at most `planner_share` of the
    decoding time so far, this one included. Due it is once the context has grown by `growth`, or a period after the
    last one: `replan_every` rounds, doubled each time that the plan stays. In between the plan is weighed against
    skipping nothing and against those chosen before, by what was measured. Each search and each change leaves a record
    in `run.log`. The next call comes after a quarter of `replan_every` rounds, and each time that the plan stays after
    twice as many as before: a call interrupts the device, which costs more than what is weighed.
    """
    memory = run.memory.get("knapspec")
    if memory is None:
        memory = run.memory["knapspec"] = _begin(method, run)
    acceptance = _measure(memory, run.state)
    if memory.plan is not None and not np.any(_running(run.state)):
        # a stream launches one round more than it waits for
        run.replan_at = run.rounds + 1
        return _with(method, run, memory.plan)
    if memory.waiting is not None and run.is_ready(method.with_plan(memory.waiting)):
        memory.plan, memory.waiting = memory.waiting, None
    before = memory.plan
    searches = memory.plan is None or _is_due(method, run, memory)
    if searches or memory.waiting is None:
        _consider(method, run, memory, searches, acceptance)
    memory.pause = 2 * memory.pause if memory.plan is before else max(method.replan_every // 4, 1)
    run.replan_at = run.rounds + memory.pause
    return _with(method, run, memory.plan)


def planned(method: "KnapSpec", run: Run) -> Planned:
    """What a search finds in the present state of a run."""
    return _found(method, run, _begin(method, run))


def _found(method: "KnapSpec", run: Run, memory: _Memory) -> Planned:
    return plan(*_arguments(run), memory.profile, memory.options, selection=_selection(method, run))


def _begin(method: "KnapSpec", run: Run) -> _Memory:
    profile = _profile(method, run)
    costs, length = profile.costs(method.sparse), _context(run.state)
    options = fitted(method.planner_options, costs, profile.num_layers, (length, length + run.max_new_tokens))
    started = time.perf_counter()
    search_plan.lower(*_arguments(run), costs, options, _selection(method, run)).compile()
    run.compile_seconds += time.perf_counter() - started
    every = (True,) * profile.num_layers
    return _Memory(profile, options, method.replan_every, {LayerMask(every, every): 1.0})


def _consider(method: "KnapSpec", run: Run, memory: _Memory, searches: bool, acceptance: float | None) -> None:
    """Chooses a plan, after a search or without one, and takes it over where that pays."""
    started = time.perf_counter()
    frontier = _search(method, run, memory) if searches else ()
    choice = _choose(method, run, memory, frontier)
    seconds = time.perf_counter() - started
    run.replan_seconds += seconds
    taken = _take(method, run, memory, choice)
    memory.seconds_left = choice.seconds_left_before
    kept = taken in ("same", "not worth it")
    if searches:
        memory.searched_at, memory.search_seconds = (run.rounds, _context(run.state)), seconds
        memory.period = 2 * memory.period if kept else method.replan_every
    elif kept:
        return
    run.note(
        {
            "round": run.rounds,
            "length": _context(run.state),
            "searched": searches,
            "seconds": seconds,
            "weights": memory.weights,
            "attn": choice.plan.attn,
            "mlp": choice.plan.mlp,
            "num_draft": choice.plan.num_draft,
            "predicted_acceptance": choice.acceptance,
            "predicted_tokens_per_second": choice.tokens_per_second,
            "predicted_plain_tokens_per_second": choice.plain_tokens_per_second,
            "measured_acceptance_before": acceptance,
            "taken": taken,
        }
    )


def _search(method: "KnapSpec", run: Run, memory: _Memory) -> tuple[Candidate, ...]:
    """The frontier; none where selected rows are so unlike all of them that even skipping nothing was dropped."""
    found = _found(method, run, memory)
    memory.weights = found.weights
    memory.base = next((candidate.alpha for candidate in found.frontier if not candidate.weight), 0.0)
    return found.frontier if memory.base else ()


def _choose(method: "KnapSpec", run: Run, memory: _Memory, frontier: tuple[Candidate, ...]) -> _Choice:
    """The plan with which the last row ends first: of a frontier, of what was chosen before, of skipping nothing and of
    not speculating."""
    costs, n, running = memory.profile.costs(method.sparse), _context(run.state), _running(run.state)
    shares = memory.shares | {candidate.plan.layers: candidate.alpha / memory.base for candidate in frontier}
    kinds, none = list(shares), np.zeros((2, running.size))
    accepted, tried = np.stack([memory.measured.get(layers, none)[:, running] for layers in kinds], axis=1)
    pooled, alpha = acceptance_by_row(
        memory.base, np.array(list(shares.values())), accepted, tried, method.reference_tokens
    )
    ran = np.array([(sum(layers.attn), sum(layers.mlp)) for layers in kinds]).T
    price, seconds = round_prices(*ran, costs, n, memory.options, np)
    left = run.max_new_tokens - np.asarray(run.state.num_tokens)[running]
    best, num_draft = np.unravel_index(np.argmin(time_to_end(alpha, left, price)), price.shape)
    seconds_left = time_to_end(alpha, left, seconds)
    now = (kinds.index(memory.plan.layers), memory.plan.num_draft) if memory.plan else (0, 0)
    layers = kinds[best]
    memory.shares[layers] = shares[layers]
    return _Choice(
        plan=Plan(layers.attn, layers.mlp, num_draft),
        acceptance=float(pooled[best]),
        tokens_per_second=float(expected_tokens(pooled[best], num_draft) / seconds[best, num_draft]),
        plain_tokens_per_second=float(1 / costs.plain_step(n)),
        seconds_left=float(seconds_left[best, num_draft]),
        seconds_left_before=float(seconds_left[now]),
    )


def _take(method: "KnapSpec", run: Run, memory: _Memory, choice: _Choice) -> str:
    """Takes a plan over or not; returns which, for the record."""
    if memory.plan is None:
        memory.plan = choice.plan
        run.prepare(method.with_plan(None if method.execution == "traced" else choice.plan), background=False)
        return "first"
    if choice.plan == memory.plan:
        return "same"
    saved = choice.seconds_left_before - choice.seconds_left
    if saved < LEAST_GAIN * choice.seconds_left_before:
        return "not worth it"
    if method.execution == "traced":
        memory.plan = choice.plan
        return "changed"
    executed = method.with_plan(choice.plan)
    cost = run.seconds_to_compile(executed)
    background = method.compile_in == "background"
    # in the background compiling costs nothing but the tokens that the old plan decodes meanwhile
    worth = choice.seconds_left_before > cost if background else saved > cost
    if not worth:
        return "not worth it"
    if run.prepare(executed, background=background):
        memory.plan, memory.waiting = choice.plan, None
        return "changed"
    memory.waiting = choice.plan
    return "compiling"


def _with(method: "KnapSpec", run: Run, chosen: Plan) -> "tuple[KnapSpec, DecodeState]":
    if method.execution == "static":
        return method.with_plan(chosen), run.state
    from jaxspec.methods.knapspec import traced_plan  # which imports this package

    state = run.state
    return method.with_plan(None), state.replace(method_state=traced_plan(chosen, state.method_state.selection))


def _is_due(method: "KnapSpec", run: Run, memory: _Memory) -> bool:
    rounds, length = memory.searched_at
    grown = _context(run.state) >= method.growth * length
    due = grown or run.rounds - rounds >= memory.period
    if method.execution == "static" and method.compile_in == "foreground":
        # a search is for new plans, none of which could otherwise save what compiling it takes
        due = due and memory.seconds_left > run.seconds_to_compile()
    return due and run.replan_seconds + memory.search_seconds <= method.planner_share * run.decode_seconds


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
    rounds, accepted, drafted = (np.asarray(getattr(state.stats, name)) for name in ("rounds", "accepted", "drafted"))
    round_ = np.arange(drafted.shape[1])
    new = (round_ >= np.reshape(memory.rounds, (-1, 1))) & (round_ < rounds[:, None])
    memory.rounds = rounds
    tried = np.sum(accepted + (accepted < drafted), axis=1, where=new)
    accepted = np.sum(accepted, axis=1, where=new)
    # texts change: what was measured long ago fades, and in the end counts less than a search's prediction
    memory.measured = {layers: counts / 2 for layers, counts in memory.measured.items()}
    if memory.plan is None or not tried.any():
        return None
    layers, counts = memory.plan.layers, np.stack([accepted, tried])
    memory.measured[layers] = memory.measured.get(layers, 0) + counts
    return float(accepted.sum() / tried.sum())


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
