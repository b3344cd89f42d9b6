"""Pallas-Triton kernels of `row_selection`: a row in one program, or spread over several."""

from __future__ import annotations

import jax

from pallas_kernels.row_selection import resident, spread
from pallas_kernels.row_selection.blocks import BlockSizes, choose_block_sizes


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
    blocks = blocks or choose_block_sizes(*scores.shape, scores.dtype)
    design = resident if blocks.resident else spread
    return design.row_selection(scores, length, k, width=width, blocks=blocks, interpret=interpret)
