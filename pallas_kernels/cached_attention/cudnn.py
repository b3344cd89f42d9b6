"""`cached_attention` of prefill chunks by cuDNN's fused attention, which is faster there than the Triton kernel.

cuDNN's causal mask begins at the first key, so a chunk with a past takes two calls: one over the rows before it, whose
number is an operand, and a causal one over its own rows. The log-sum-exps say what share each has in the result.
"""

from __future__ import annotations

import functools
from typing import Protocol

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.cached_attention import triton
from pallas_kernels.tiling import ceil_div

# A tile of cuDNN's that holds the last rows of the past holds rows after them too, and a NaN among their values would
# reach the result (0 * NaN). Those rows are the chunk's own while a chunk is no shorter than a tile.
MIN_ROWS = 256
# cuDNN does not split the keys: only tiles of queries spread over the card, and it takes two waves to hide an uneven
# end. Below that the Triton kernel, which does split them, is the safe choice.
QUERY_TILE = 128
MIN_TILES = 256


class Part(Protocol):
    """Attention of q [B,T,N,H] to the first `length` [B] (at least 1) of k and v [B,S,K,H], or with None, S == T, to
    those up to each query's own: out [B,T,N,H] of q's dtype and its log-sum-exp, float32 [B,N,T]."""

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array | None, scale: float
    ) -> tuple[jax.Array, jax.Array]: ...


def is_faster(
    batch: int, num_rows: int, heads: int, head_dim: int, capacity: int, dtype: jnp.dtype, *, available: bool
) -> bool:
    """Returns whether q [B,T,N,H] over a cache of S rows is for cuDNN: there is one, it takes the shape and dtype on
    every GPU, and there are enough rows for it to win."""
    tiles = batch * heads * ceil_div(num_rows, QUERY_TILE)
    takes = jnp.dtype(dtype).itemsize == 2 and head_dim % 8 == 0 and head_dim <= 128
    return available and takes and MIN_ROWS <= num_rows <= capacity and tiles >= MIN_TILES


def fused(
    q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array | None, scale: float
) -> tuple[jax.Array, jax.Array]:
    """The `Part` that cuDNN computes."""
    # jax.nn.dot_product_attention rounds the log-sum-exp to q's dtype: in bfloat16 a share would be off by percents.
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    options = {"mask_type": MaskType.CAUSAL}
    if length is not None:
        rows = jnp.full_like(length, q.shape[1])
        options = {"mask_type": MaskType.PADDING, "q_seqlen": rows, "kv_seqlen": length}
    return dot_product_attention(q, k, v, scale=scale, return_residual=True, **options)


def attend_with_past(
    q: jax.Array, k: jax.Array, v: jax.Array, start: jax.Array, *, scale: float, part: Part = fused
) -> jax.Array:
    """Attention of a chunk that lies inside the cache, 0 <= start <= S - T."""
    own_rows = jax.vmap(lambda x, at: jax.lax.dynamic_slice_in_dim(x, at, q.shape[1]))
    own, own_lse = part(q, own_rows(k, start), own_rows(v, start), None, scale)
    past, past_lse = part(q, k, v, jnp.maximum(start, 1), scale)
    # A sequence without a past gets no share of the row that it was given here: what it holds may be NaN.
    has_past = (start > 0)[:, None, None]
    share = jnp.where(has_past, jax.nn.sigmoid(past_lse - own_lse), 0.0)
    share = jnp.swapaxes(share, 1, 2)[..., None]
    past = jnp.where(has_past[..., None], past, 0).astype(jnp.float32)
    return ((1.0 - share) * own.astype(jnp.float32) + share * past).astype(q.dtype)


@dispatch.shared("scale", "part", "interpret")
def cached_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    *,
    scale: float,
    part: Part = fused,
    interpret: bool = False,
) -> jax.Array:
    """See the public op; T <= S, no scores. `part` and `interpret` are for tests without a GPU."""
    num_rows = q.shape[1]

    def first(q, k, v, start):
        del start
        return part(q, k[:, :num_rows], v[:, :num_rows], None, scale)[0]

    def partly_outside(q, k, v, start):
        return triton.cached_attention(q, k, v, start, scale=scale, interpret=interpret)[0]

    # The host waits for this choice, once a call. It spares a first chunk, all that short prompts have, the second call
    # and the merge, and leaves odd positions to the kernel that knows them.
    inside = jnp.all((start >= 0) & (start <= k.shape[1] - num_rows))
    case = jnp.where(jnp.all(start == 0), 0, jnp.where(inside, 1, 2))
    later = functools.partial(attend_with_past, scale=scale, part=part)
    return jax.lax.switch(case, (first, later, partly_outside), q, k, v, start)
