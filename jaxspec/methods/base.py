"""What a method is: how to draft, how to verify, and what to remember between rounds."""

import dataclasses
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp
from flax import struct

from jaxspec.models.decoder import Decoder
from jaxspec.sampling import Sampling
from jaxspec.types import (
    Array,
    Collect,
    DecodeState,
    Draft,
    Finish,
    ForwardOut,
    KVCache,
    KVSelection,
    KVSelector,
    Params,
    Verdict,
)

if TYPE_CHECKING:
    from jaxspec.replanning import Run


def option(
    default: Any,
    *,
    help: str,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
) -> Any:
    """A field of a method, checked by `Method.__post_init__` and offered as a flag by the command line.

    Args:
        default: its default, which also says whether it is an integer, another number, a string or a tuple of integers.
        help: one line for the command line.
        low: the smallest value of an integer, also in a tuple. A number that is no integer must lie above it.
        high: the largest value.
        choices: what a string may be.
        metavar: what the command line's help calls its value; by default the type's name.
    """
    metadata = {"help": help, "low": low, "high": high, "choices": choices, "metavar": metavar}
    return dataclasses.field(default=default, metadata=metadata)


def num_draft_option(default: int) -> Any:
    """The `num_draft` that most methods have."""
    return option(default, low=0, high=32, help="tokens drafted per round")


def draft_sampling_option() -> Any:
    """The `draft_sampling` that most methods have; Python numbers only, as it is static."""
    return dataclasses.field(default=None)


@struct.dataclass
class Models:
    """The target model with its parameters, and the parameters of a draft model where the method has one."""

    target: Decoder = struct.field(pytree_node=False)
    params: Params
    draft_params: Params | None = None
    running: Array | None = None  # bool [B]: rows that attend, see `Decoder.__call__`; None: all

    def for_running(self, state: DecodeState) -> "Models":
        """The models of a round: rows that have ended cost no attention in it."""
        return self.replace(running=state.finish == Finish.RUNNING)

    def forward(self, tokens: Array, cache: KVCache, start: Array, **options: Any) -> ForwardOut:
        """The target's forward, see `Decoder.__call__`."""
        return self.target.apply({"params": self.params}, tokens, cache, start, running=self.running, **options)

    def visible(self, length: Array) -> Array:
        """`length` int32 [B] where there is something to score and select, far below 0 in rows that have ended: the
        positions that a round's queries count from there are negative too, and queries at those see nothing."""
        return length if self.running is None else jnp.where(self.running, length, -(1 << 20))


@dataclass(frozen=True)
class Method:
    """Base of all methods; by itself it drafts nothing and verifies with the full model.

    A method holds hashable fields only: it is a static argument of the jitted loop, so an equal method never
    recompiles. What changes between rounds lives in the method state, any pytree of arrays whose shapes stay the same.
    """

    lossless: ClassVar[bool] = True  # the output distribution is the target's own
    needs_draft_params: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Raises ValueError for a field outside its range, naming the range."""
        for field in dataclasses.fields(self):
            _check_field(self, field)

    @property
    def max_draft(self) -> int:
        """The most tokens that one round drafts; static."""
        return 0

    def check_model(self, target: Decoder) -> None:
        """Raises ValueError where the method does not fit the target model; runs before anything else does."""

    def check_batch(self, batch: int) -> None:
        """Raises ValueError where the method does not fit so many rows; called by `generate` and `stream`, whose rows
        stay together, before anything is computed."""

    def prefill_collect(self, last: Array) -> Collect:
        """What the forward of the last prompt token hands to `init`; `last` is its query row, int32 [B] of zeros."""
        return Collect()

    def init(self, models: Models, prompt: Array, prompt_length: Array, out: ForwardOut) -> Any:
        """The method state after prefill.

        Args:
            models: the models.
            prompt: int32 [B, P].
            prompt_length: int32 [B], also the number of valid cache rows.
            out: of the forward of each row's last prompt token, T = 1.
        """
        return ()

    def draft(self, models: Models, state: DecodeState, sampling: Sampling, keys: Array) -> tuple[Draft, KVCache, Any]:
        """Drafts up to `max_draft` tokens after `state.last_token`; returns the draft, the cache with scratch rows
        written, and the method state. `keys` [B] are this round's; draws are `draft_chain`'s to make."""
        batch = state.last_token.shape[0]
        empty = Draft(jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32), None)
        return empty, state.cache, state.method_state

    def draft_selection(self, models: Models, state: DecodeState) -> KVSelection | KVSelector | None:
        """The cache rows that this round's drafts attend to, for methods that draft with the target's own weights over
        a selection; None for all others. Methods that skip layers as well draft over the same rows."""
        return None

    def verify_collect(self, draft: Draft) -> Collect:
        """What verification hands to `observe`; query row i predicts the token after i accepted ones."""
        return Collect()

    def verify(self, models: Models, state: DecodeState, draft: Draft) -> ForwardOut:
        """The target's forward over [last_token, draft tokens] at rows length..length + g."""
        tokens = jnp.concatenate([state.last_token[:, None], draft.tokens], axis=1)
        return models.forward(tokens, state.cache, state.length, collect=self.verify_collect(draft))

    def observe(
        self, models: Models, method_state: Any, out: ForwardOut, draft: Draft, verdict: Verdict, length: Array
    ) -> Any:
        """The method state after a round; `length` int32 [B] is the committed length before it."""
        return method_state

    def report(self, method_state: Any) -> dict[str, Array]:
        """Counters of the method's own at the end of a run, by name, [B] each; `Output.report`."""
        return {}

    @property
    def segment_rounds(self) -> int:
        """Rounds between two calls of `replan`; 0 means that it is never called and a run is one program."""
        return 0

    def replan(self, run: "Run") -> "tuple[Method, DecodeState]":
        """The method that drafts from here on, and the state it goes on with. Runs on the host, before the first round
        and after every segment, always on the method that the caller gave; the result's own `replan` is not called.
        A segment is `segment_rounds` rounds, or ends before round `Run.replan_at` where the method sets that.

        State shapes may depend on `max_draft`, which stays: a draft may have fewer columns. A method must not change
        the distribution of the output, whatever it returns.
        """
        return self, run.state

    def as_one_program(self) -> "Method":
        """The method for a run under the caller's own jit, where nothing can be replanned.

        Raises:
            ValueError: it needs the host.
        """
        return self

    def fixed(self, num_layers: int) -> "Method":
        """The method without anything that depends on measured times, for checks that must repeat exactly and for
        prefills whose plan is not used; where it runs as one program, its method state has the same shapes."""
        return self


def _check_field(method: Method, field: dataclasses.Field) -> None:
    value, name = getattr(method, field.name), f"{type(method).__name__} {field.name}"
    limits = field.metadata
    if isinstance(value, Sampling):
        try:
            hash(value)
        except TypeError:
            raise ValueError(f"{name} must hold Python numbers, not arrays: methods are static") from None
        if value.check(1).greedy:
            object.__setattr__(method, field.name, Sampling())
    if not limits:
        return
    if limits["choices"] is not None:
        if value not in limits["choices"]:
            raise ValueError(f"{name} must be one of {', '.join(limits['choices'])}, got {value!r}")
    elif isinstance(field.default, tuple):
        low, high = limits["low"], limits["high"]
        if not isinstance(value, tuple) or not all(type(i) is int and low <= i <= high for i in value):
            raise ValueError(f"{name} must be a tuple of integers in {low}..{high}, got {value!r}")
    elif isinstance(field.default, float):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not limits["low"] < value <= limits["high"]:
            raise ValueError(f"{name} must lie above {limits['low']} and be at most {limits['high']}, got {value!r}")
    elif isinstance(field.default, int):
        try:
            integer = not isinstance(value, bool) and limits["low"] <= operator.index(value) <= limits["high"]
        except TypeError:
            integer = False
        if not integer:
            raise ValueError(f"{name} must be an integer in {limits['low']}..{limits['high']}, got {value!r}")
