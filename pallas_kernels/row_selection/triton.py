"""Pallas-Triton kernels of `row_selection`: a row in one program, or several programs per row."""

from __future__ import annotations

import jax

from pallas_kernels import dispatch
from pallas_kernels.row_selection import gather, histogram, radix, resident, spread
from pallas_kernels.row_selection.blocks import BlockSizes, choose_block_sizes

_DESIGNS = {
    "resident": resident.row_selection,
    "gather": gather.row_selection,
    "spread": spread.row_selection,
    "radix": radix.row_selection,
}


def unavailable() -> frozenset[str]:
    """The designs that do not run with this GPU and this JAX."""
    if not dispatch.at_least_hopper():
        return frozenset({"gather", "radix"})
    return frozenset() if histogram.AVAILABLE else frozenset({"radix"})


def row_selection(
    scores: jax.Array,
    length: jax.Array,
    k: jax.Array,
    *,
    width: int,
    interpret: bool = False,
    blocks: BlockSizes | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See the public op; `blocks` overrides the choice for measurements."""
    blocks = blocks or choose_block_sizes(*scores.shape, scores.dtype, unavailable())
    return _DESIGNS[blocks.design](scores, length, k, width=width, blocks=blocks, interpret=interpret)
