"""Every pytree that crosses a file boundary, each field with its shape.

Letters, used everywhere: B batch, T query rows of one call, S cache capacity, M index-buffer width, L layers, N query
heads, K key/value heads, G = N / K, H head dim, D model width, V vocabulary, g = draft tokens of a round.

Cache rows at or past a row's `length` are garbage by definition: drafting writes there, verification overwrites them,
and rolling back means not advancing the length. Nothing may read them; no test, mask or crop is needed to undo them.
"""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
from flax import struct

Array: TypeAlias = jax.Array
Params: TypeAlias = Any


class Finish(enum.IntEnum):
    """Why a row ended. The values are the int8 codes of `Output.finish`."""

    RUNNING = 0
    EOS = 1
    LENGTH = 2
    STOP = 3
    NAN = 4
    INVALID = 5


class LayerCache(NamedTuple):
    """Keys (after rope) and values of one layer."""

    k: Array  # [B, S, K, H]
    v: Array  # [B, S, K, H]


KVCache: TypeAlias = tuple[LayerCache, ...]  # one per layer, never stacked: XLA copies a stacked cache in loops


@struct.dataclass
class KVSelection:
    """The cache rows that a sparse forward attends to: the listed ones and everything from `valid` on.

    A row is visible iff it is listed or >= `valid`, and it is <= the query's position.
    """

    rows: Array  # int32 [L or 1, B, M]; all < valid, -1 pads, last; no row twice; shared by all heads
    valid: Array  # int32 [B]; rows valid..query position are always visible
    window: int = struct.field(pytree_node=False, default=16)  # static bound of (last query position + 1 - valid)
    count: Array | None = None  # int32 [L or 1, B], entries before the padding; None: up to M


@struct.dataclass
class KVSelector:
    """A selection computed inside each layer, for methods that need the layer's own query."""

    state: Any  # pytree given to `select`
    valid: Array  # int32 [B]
    # (layer, q [B,T,N,H], LayerCache, q_pos int32 [B,T], state) -> rows int32 [B,M], as in KVSelection; hashable
    select: Callable[..., Array] = struct.field(pytree_node=False)
    window: int = struct.field(pytree_node=False, default=16)


@struct.dataclass
class LayerMask:
    """Which sublayers run (True). Tuples of bool are static, bool arrays are traced (a branch per sublayer)."""

    attn: Array | tuple[bool, ...]  # [L]
    mlp: Array | tuple[bool, ...]  # [L]


@struct.dataclass
class Collect:
    """What a forward hands out besides logits and cache."""

    scored_rows: Array | None = None  # int32 [B, R]: query rows whose attention is scored
    score_mode: str = struct.field(pytree_node=False, default="weight")  # 'weight' (softmax mass) or 'logit'
    per_row: bool = struct.field(pytree_node=False, default=False)  # keep R apart instead of summing over it
    queries: tuple[int, ...] = struct.field(pytree_node=False, default=())  # layers whose queries are returned
    hidden: bool = struct.field(pytree_node=False, default=False)  # return the residual stream


class ForwardOut(NamedTuple):
    """What `Decoder` returns."""

    logits: Array  # float32 [B, T, V]
    cache: KVCache
    # float32 [L, B, S], or [L, B, R, S] with `per_row`; -inf where some scored query does not see the row
    row_scores: Array | None
    queries: tuple[Array, ...]  # one [B, T, N, H] (after rope) per layer of `Collect.queries`
    # [2L+1, B, T, D]: embeddings, then the residual stream after each attention and MLP, before the final norm
    hidden: Array | None


@struct.dataclass
class Draft:
    """The draft tokens of a round."""

    tokens: Array  # int32 [B, g]
    count: Array  # int32 [B]: how many of them are used, 0..g
    probs: Array | None  # float32 [B, g, V], the very array each token was sampled from; None: one-hot


class Verdict(NamedTuple):
    """What verification decided."""

    num_accepted: Array  # int32 [B], 0..count
    next_token: Array  # int32 [B]: the correction or the bonus token


@struct.dataclass
class Stats:
    """Counters of a run. The token that the prefill samples belongs to no round."""

    rounds: Array  # int32 [B]: verification rounds in which the row was active
    emitted: Array  # int32 [B]: tokens those rounds put into the output
    drafted: Array  # int16 [B, max_new_tokens]: draft tokens offered, by the row's own round; the trace
    accepted: Array  # int16 [B, max_new_tokens]: draft tokens accepted before any stop rule, by round


@struct.dataclass
class DecodeState:
    """The carry of the decode loop.

    `length` tokens have their K/V in the cache. `last_token` is emitted, its K/V not yet written: it goes to row
    `length`. Shapes depend on the method's largest number of drafts, so a new plan reuses the state.
    """

    tokens: Array  # int32 [B, max_new_tokens + g + 1]: emitted tokens; the last g + 1 columns are scratch
    num_tokens: Array  # int32 [B]: how many of them are valid
    length: Array  # int32 [B]
    last_token: Array  # int32 [B]
    finish: Array  # int8 [B], `Finish`; RUNNING while the row is active
    cache: KVCache
    method_state: Any
    keys: Array  # [B] PRNG keys, one per row
    round: Array  # int32 []
    stats: Stats
    logprobs: Array | None  # float32 [B, max_new_tokens + g + 1], when asked for


class Output(NamedTuple):
    """What `generate` returns."""

    tokens: Array  # int32 [B, max_new_tokens]: generated ids, EOS included, then pad_id
    lengths: Array  # int32 [B]: generated tokens of each row, EOS counted
    finish: Array  # int8 [B], see `Finish`
    stats: Stats
    logprobs: Array | None  # float32 [B, max_new_tokens]: log_softmax of the raw logits at each emitted token
    report: dict[str, Array] | None = None  # what the method itself counted, see `Method.report`
