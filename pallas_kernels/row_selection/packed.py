"""bfloat16 scores compared as they are, two in an instruction: half the registers and instructions of integer keys.

A threshold is a key, see `keys`; here it becomes the number that has this key. Interpreted kernels compare keys
instead, since a CPU takes subnormal numbers for zeros and has no inline assembly. Needs compute capability 9.0.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.row_selection import keys

NEGATIVE_INFINITY = -0x7F80
# Scores of one 128-bit load. Counts go to memory for groups of as many.
GROUP = 8


def load(scores_ref: Any, row: jax.Array, index: jax.Array, *, inside: bool) -> jax.Array:
    """scores[row, index]; `inside` promises that no index is past the row's end."""
    # As in `keys.load`, the length is no part of the mask.
    return pltriton.load(
        scores_ref.at[row, index], **({} if inside else {"mask": index < scores_ref.shape[1], "other": 0.0})
    )


def load_eligible(scores_ref: Any, row: jax.Array, index: jax.Array, length: jax.Array, *, inside: bool) -> jax.Array:
    """scores[row, index], NaN past the length; see `load`."""
    x = load(scores_ref, row, index, inside=inside)
    return jnp.where(index < jnp.minimum(length, scores_ref.shape[1]), x, jnp.bfloat16(jnp.nan))


def tile_index(tile: jax.Array | int, size: int) -> jax.Array:
    """int32 [size/8,8]: the indices of a tile, a group in each row."""
    group = jnp.arange(size // GROUP, dtype=jnp.int32)[:, None] * GROUP
    return tile * size + group + jnp.arange(GROUP, dtype=jnp.int32)[None, :]


def count_reaching(x: jax.Array, key: jax.Array | int, interpret: bool) -> jax.Array:
    """int32 []: how many of x [N,8] are at least the threshold. A thread must hold 8 of them or more."""
    if interpret:
        return keys.count(keys.make(x, True) >= _at_least_infinity(key))
    # The assembly sees packs of 8 scores; which, depends on the compiler. It leaves a pack's count in the first word
    # of its result and 0 in the others, so that the sum is the same whatever the packs are. Counts start from 128.0 in
    # both halves of a register: from there on each addition of 1.0 adds 1 to the bits.
    pairs = GROUP // 2
    code = "mov.b32 sum, 0x43004300; "
    for i in range(pairs):
        code += f"set.ge.bf16x2.bf16x2 one, ${GROUP + i}, ${GROUP + pairs + i}; add.rn.bf16x2 sum, sum, one; "
    code += "sub.u32 $0, sum, 0x43004300; " + "".join(f"mov.u32 ${i}, 0; " for i in range(1, GROUP))
    # Each half counts at most half of `keys.MAX_TILE`.
    total = jnp.sum(_assembly("sum, one", code, x, key, GROUP, jnp.int32))
    return (total & 0xFFFF) + (total >> 16)


def above_and_equal(x: jax.Array, key: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Which of x are above the threshold, and which are equal to it."""
    if interpret:
        own, key = keys.make(x, True), _at_least_infinity(key)
        return own > key, own == key
    value = _number(key)
    return x > value, x == value


def group_words(x: jax.Array, key: jax.Array, interpret: bool) -> jax.Array:
    """int32 [N]: how many of each row of x [N,8] are above the threshold, plus 2^16 times how many are equal to it."""
    if interpret:
        above, equal = above_and_equal(x, key, interpret)
        return jnp.sum(keys.words(above, equal), axis=1)
    # Element by element, so that packs may be any two: 1.0 above the threshold, 65536.0 where equal, otherwise 0.0.
    # With booleans instead a row of 32,768 takes 102 registers a thread, not 64, and only one fits a multiprocessor.
    code = "set.gt.bf16x2.bf16x2 above, $1, $2; set.eq.bf16x2.bf16x2 equal, $1, $2; mov.b32 weight, 0x47804780; "
    code += "fma.rn.bf16x2 $0, equal, weight, above; "
    weights = _assembly("above, equal, weight", code, x, key, 2, jnp.bfloat16)
    return jnp.sum(weights.astype(jnp.float32), axis=1).astype(jnp.int32)


def _at_least_infinity(key: jax.Array | int) -> jax.Array:
    """Keys below that of -inf are no number's, and NaN must not reach them."""
    return jnp.maximum(jnp.int32(key), NEGATIVE_INFINITY)


def _number(key: jax.Array | int) -> jax.Array:
    """The bfloat16 number with this key; NaN, which nothing reaches or equals, above the key of infinity."""
    key = _at_least_infinity(key)
    pattern = jnp.where(key < 0, 0x8000 - key, key)
    return jax.lax.bitcast_convert_type(pattern.astype(jnp.int16), jnp.bfloat16)


def _assembly(registers: str, code: str, x: jax.Array, key: Any, pack: int, dtype: Any) -> jax.Array:
    """`code` for packs of x and, in as many registers, the threshold."""
    outputs = pack * jnp.dtype(dtype).itemsize // 4
    got = pltriton.elementwise_inline_asm(
        f"{{ .reg .b32 {registers}; {code}}}",
        args=[x, jnp.broadcast_to(_number(key), x.shape)],
        constraints=",".join(["=r"] * outputs + ["r"] * pack),
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, dtype)],
    )
    return got[0]
