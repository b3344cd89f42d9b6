"""KnapSpec (arXiv 2602.20217): drafts skip the sublayers that a knapsack over measured latencies can spare."""

from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.drafting import self_draft
from jaxspec.method_text import parse_text
from jaxspec.methods.base import Method, Models, draft_sampling_option, option
from jaxspec.methods.quest import Quest
from jaxspec.methods.streaming import Streaming
from jaxspec.methods.vegas import Vegas
from jaxspec.models.decoder import Decoder
from jaxspec.planning.latency import LatencyProfile, load_profile
from jaxspec.planning.plan import Plan, PlannerOptions, check_profile, fitted, search_plan
from jaxspec.sampling import Sampling
from jaxspec.types import Array, Collect, DecodeState, Draft, ForwardOut, KVCache, LayerMask, Verdict

if TYPE_CHECKING:
    from jaxspec.replanning import Run

SELECTIONS: dict[str, type[Method]] = {"quest": Quest, "streaming": Streaming, "vegas": Vegas}


@struct.dataclass
class TracedPlan:
    """A plan as arrays: the method state with `execution="traced"`."""

    attn: Array  # bool [L]
    mlp: Array  # bool [L]
    num_draft: Array  # int32 []
    selection: Any  # the state of the composed method


@dataclass(frozen=True)
class KnapSpec(Method):
    """Drafts with the target's own weights, some attention and MLP sublayers left out; verifies in full. Lossless.

    A planner chooses the sublayers and the number of drafts that promise the most tokens per second, from latencies
    measured on this device and from how well the last tokens are predicted without those sublayers. It runs between
    segments of rounds, one plan for the whole batch: before the first round, then after `replan_every` rounds, twice as
    many whenever it kept the plan that was there, and as soon as the context has grown by `growth`; later than that
    where planning would take more than `planner_share` of the decoding time. In between, plans are weighed against
    skipping nothing by the acceptance measured so far, and by the time until the last row ends.

    Execution: `static` compiles one program per plan, the fastest to run, and changes the plan only where the
    predicted gain pays for compiling; `compile_in="background"` compiles while the old plan decodes. `traced` keeps
    the plan in the method state: one program for all plans, with a conditional per sublayer.

    Under the caller's own jit nothing can be measured or replanned: give a `plan`, or `execution="traced"` and a
    `profile`, which plans once after the prefill, on the device.

    `selection`, a `Vegas`, `Streaming` or `Quest` or what `read_selection` takes, makes drafts read few cache rows as
    well; its own `num_draft` is replaced by `max_draft`. `items="blocks"` with `value="tpl"` is CLaSp (arXiv
    2505.24196). `plan` fixes the plan. `draft_length="confidence"` drafts until the draft's largest probability falls
    below `threshold`, at most `max_draft` tokens. `draft_sampling` draws drafts in another way than the output.
    """

    max_draft: int = option(10, low=1, high=32, help="most tokens drafted per round")
    items: str = option("sublayers", choices=("sublayers", "blocks"), help="what drafts may skip")
    value: str = option("tpt", choices=("tpt", "tpl"), help="tokens per second, or per layer run")
    alpha: str = option("smoothed", choices=("smoothed", "raw"), help="predicted acceptance from top-1 agreement")
    draft_length: str = option("grid", choices=("grid", "confidence"), help="how the number of drafts is decided")
    threshold: float = option(0.7, low=0, high=1, help="confidence below which a draft ends")
    tau: float = option(0.5, low=-1, high=1, help="least cosine with the full model's hidden state")
    clip: int = option(5, low=1, high=64, help="largest weight of a sublayer, the cheaper kind's being 1")
    max_cells: int = option(64, low=2, high=1024, help="most branches of the planner")
    max_skipped: float = option(0.5, low=0, high=1, help="largest share of the weight that drafts skip")
    reference_tokens: int = option(32, low=1, high=256, help="committed tokens that a plan is judged on, in all")
    replan_every: int = option(
        64, low=1, high=2**20, help="rounds until the next plan, doubled each time that a plan is kept"
    )
    growth: float = option(1.25, low=1, high=2**20, help="growth of the context that asks for a new plan")
    planner_share: float = option(0.02, low=0, high=1, help="most of the decoding time that planning may take")
    execution: str = option("static", choices=("static", "traced"), help="a program per plan, or one for all")
    compile_in: str = option("foreground", choices=("foreground", "background"), help="where new plans are compiled")
    profile: LatencyProfile | str = option(
        "", help="JSON file of `jaxspec profile`; without it, measured at first use", metavar="FILE"
    )
    selection: Method | str = option(
        "", help="rows that drafts read: vegas, streaming or quest; all of them without it", metavar="METHOD"
    )
    plan: Plan | None = None
    draft_sampling: Sampling | None = draft_sampling_option()
    plans_itself: bool = False  # after the prefill, on the device; see `as_one_program`

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.profile, str) and self.profile:
            object.__setattr__(self, "profile", load_profile(self.profile))
        if not isinstance(self.profile, LatencyProfile | str):
            raise ValueError(f"KnapSpec profile must be a LatencyProfile or a file's name, got {self.profile!r}")
        if isinstance(self.selection, str) and self.selection:
            object.__setattr__(self, "selection", read_selection(self.selection))
        if self.selection:
            if not isinstance(self.selection, tuple(SELECTIONS.values())):
                raise ValueError(f"KnapSpec selection must be a Vegas, Streaming or Quest, got {self.selection!r}")
            # index buffers and method states have the size of the longest draft, whatever the plan
            object.__setattr__(self, "selection", replace(self.selection, num_draft=self.max_draft))
        if self.plan is not None:
            if not isinstance(self.plan, Plan):
                raise ValueError(f"KnapSpec plan must be a Plan, got {self.plan!r}")
            if self.plan.num_draft > self.max_draft:
                drafts = f"{self.plan.num_draft} drafts"
                raise ValueError(f"KnapSpec plan: {drafts} are more than max_draft = {self.max_draft}")

    @property
    def sparse(self) -> bool:
        """Whether drafts attend to selected rows only."""
        return bool(self.selection)

    @property
    def planner_options(self) -> PlannerOptions:
        """The options that the planner looks at."""
        return PlannerOptions(**{field.name: getattr(self, field.name) for field in fields(PlannerOptions)})

    @property
    def segment_rounds(self) -> int:
        return 0 if self.plan is not None or self.plans_itself else self.replan_every

    def with_plan(self, plan: Plan | None) -> "KnapSpec":
        """The method that executes a plan, or for None any plan in its state. Planner options are left out, so that
        equal plans share a compiled program however they were found."""
        if plan is not None and self.draft_length == "confidence" and plan.num_draft:
            plan = replace(plan, num_draft=self.max_draft)
        kept = ("max_draft", "draft_length", "threshold", "selection", "execution", "draft_sampling")
        return KnapSpec(plan=plan, **{name: getattr(self, name) for name in kept})

    def as_one_program(self) -> "KnapSpec":
        if self.plan is not None:
            return self
        if self.execution == "traced" and self.profile:
            return replace(self, plans_itself=True)
        raise ValueError(
            "KnapSpec measures and plans on the host, which the caller's jit does not allow: give a plan, or "
            "execution='traced' with a profile"
        )

    def fixed(self, num_layers: int) -> "KnapSpec":
        """With its plan, or one that leaves out a few sublayers all over the model."""
        if self.plan is not None:
            return self
        layers = range(num_layers)
        return self.with_plan(
            Plan(tuple(i % 4 != 1 for i in layers), tuple(i % 8 != 5 for i in layers), self.max_draft)
        )

    def check_model(self, target: Decoder) -> None:
        num_layers = target.config.num_layers
        if self.plan is not None and len(self.plan.attn) != num_layers:
            raise ValueError(f"KnapSpec plan is for {len(self.plan.attn)} layers, the model has {num_layers}")
        if self.selection:
            self.selection.check_model(target)
        if self.profile and self.plan is None:
            check_profile(self.profile, target)
            self.profile.costs(self.sparse)  # raises where the profile lacks the selection's figures

    def check_batch(self, batch: int) -> None:
        if self.profile and self.plan is None and self.profile.batch != batch:
            raise ValueError(f"KnapSpec profile was measured at batch {self.profile.batch}, this run has batch {batch}")

    def replan(self, run: "Run") -> "tuple[Method, DecodeState]":
        from jaxspec.planning.controller import replan  # which measures with the loop, and that imports this module

        return replan(self, run)

    def prefill_collect(self, last: Array) -> Collect:
        return self.selection.prefill_collect(last) if self.selection else Collect()

    def init(self, models: Models, prompt: Array, prompt_length: Array, out: ForwardOut) -> Any:
        inner = self.selection.init(models, prompt, prompt_length, out) if self.selection else ()
        num_layers = models.target.config.num_layers
        if self.execution == "static":
            return inner
        if self.plans_itself:
            emitted = jnp.zeros((prompt.shape[0], 1), jnp.int32)
            arguments = (prompt, prompt_length, emitted, prompt_length)
            costs, selection = self.profile.costs(self.sparse), None
            if self.selection:
                state = SimpleNamespace(cache=out.cache, length=prompt_length, method_state=inner)
                selection = self.selection.draft_selection(models, state)
            options = fitted(self.planner_options, costs, num_layers, (1, prompt.shape[1]))
            found = search_plan(models, out.cache, *arguments, costs, options, selection)
            attn, mlp = found.frontier.attn[found.cell], found.frontier.mlp[found.cell]
            return TracedPlan(attn, mlp, found.num_draft.astype(jnp.int32), inner)
        plan = self.plan or Plan((True,) * num_layers, (True,) * num_layers, 0)
        return traced_plan(plan, inner)

    def draft(self, models: Models, state: DecodeState, sampling: Sampling, keys: Array) -> tuple[Draft, KVCache, Any]:
        sampling = sampling if self.draft_sampling is None else self.draft_sampling
        ends = self._unsure if self.draft_length == "confidence" else None
        if self.execution == "static":
            if self.plan is None:
                raise ValueError("KnapSpec has no plan yet: `generate` and `stream` make one; else give plan=...")
            own, layers, num_draft, limit = state.method_state, self.plan.layers, self.plan.num_draft, None
        else:
            own, traced = state.method_state.selection, state.method_state
            layers, num_draft, limit = LayerMask(attn=traced.attn, mlp=traced.mlp), self.max_draft, traced.num_draft
        options: dict[str, Any] = {"layers": layers, "ends": ends, "limit": limit}
        if self.selection:
            options["selection"] = self.selection.draft_selection(models, state.replace(method_state=own))
        draft, cache = self_draft(models.forward, state, num_draft, sampling, keys, **options)
        return draft, cache, state.method_state

    def verify_collect(self, draft: Draft) -> Collect:
        if not self.selection:
            return Collect()
        return replace(self.selection, num_draft=draft.tokens.shape[1]).verify_collect(draft)

    def observe(
        self, models: Models, method_state: Any, out: ForwardOut, draft: Draft, verdict: Verdict, length: Array
    ) -> Any:
        if not self.selection:
            return method_state
        own = method_state if self.execution == "static" else method_state.selection
        own = self.selection.observe(models, own, out, draft, verdict, length)
        return own if self.execution == "static" else method_state.replace(selection=own)

    def _unsure(self, logits: Array) -> Array:
        return jnp.max(jax.nn.softmax(logits), axis=-1) < self.threshold


def read_selection(text: str) -> Method:
    """The method that a text such as `vegas` or `quest:rho=0.05,min_keep=512` means.

    Raises:
        ValueError: another name, an option that the method does not have, or a value outside its range.
    """
    name, options = parse_text(text, selection_named)
    return SELECTIONS[name](**options)


def selection_named(name: str) -> type[Method]:
    """The method that selects rows under a name; raises ValueError if there is none."""
    if name not in SELECTIONS:
        raise ValueError(f"selection must be one of {', '.join(SELECTIONS)}, got {name!r}")
    return SELECTIONS[name]


def traced_plan(plan: Plan, selection: Any) -> TracedPlan:
    """A plan as the method state of `execution="traced"`."""
    return TracedPlan(jnp.array(plan.attn), jnp.array(plan.mlp), jnp.int32(plan.num_draft), selection)


def random_plan(num_layers: int, skipped: int, num_draft: int, seed: int = 0) -> Plan:
    """A plan that skips `skipped` sublayers drawn at random; the first and the last block always run.

    Args:
        num_layers: of the model, at least 3.
        skipped: 0..2 * num_layers - 4.
        num_draft: drafts per round.
        seed: of the draw.

    Raises:
        ValueError: more sublayers than there are between the first and the last block.
    """
    inner = 2 * (num_layers - 2)
    if not 0 <= skipped <= inner:
        raise ValueError(f"skipped must lie in 0..{inner} for {num_layers} layers, got {skipped}")
    run = np.ones(2 * num_layers, bool)
    run[2 + np.random.default_rng(seed).permutation(inner)[:skipped]] = False
    return Plan(tuple(run[::2].tolist()), tuple(run[1::2].tolist()), num_draft)
