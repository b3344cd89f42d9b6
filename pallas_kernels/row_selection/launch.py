"""One launch of any design."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.row_selection.blocks import BlockSizes


def launch(
    kernel: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    shapes: Any,
    *operands: jax.Array,
    blocks: BlockSizes,
    interpret: bool,
) -> Any:
    """Runs `kernel(*refs, blocks=)` over a grid: results like `shapes`."""
    return pl.pallas_call(
        functools.partial(kernel, blocks=blocks),
        out_shape=shapes,
        grid=grid,
        compiler_params=pltriton.CompilerParams(num_warps=blocks.num_warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*operands)
