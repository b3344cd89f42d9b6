"""Kernels that let the next one start while they run: CUDA's programmatic dependent launch.

From JAX 0.11 on XLA launches kernels so on Hopper, and each waits in its first instructions until those before it have
written their results. That wait has something to wait for only if the kernel before says that its dependents may start;
unless it does, the next kernel's launch comes after its end. Source: `griddepcontrol` in NVIDIA's PTX ISA.

It is safe only where the results are read by kernels that wait before they read. Those of this package do. XLA's own
may load what they take for constant before they wait, and nothing tells XLA that a Pallas kernel launches early: an
XLA operation that reads a result directly could read it before it is written. What is read later is complete, since
a kernel says so only after its own wait.

Pallas has no such primitive, and JAX no public way to add one. Without the private functions that this takes, kernels
start one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive

from pallas_kernels import dispatch

try:
    from jax._src.pallas.triton.lowering import register_lowering
    from jax._src.state.types import WriteEffect
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith
    from jaxlib.triton import dialect
except ImportError:
    AVAILABLE = False
else:
    AVAILABLE = jax.__version_info__ >= (0, 11)

_launch = Primitive("launch_dependents")
_launch.multiple_results = True

if AVAILABLE:

    @_launch.def_effectful_abstract_eval
    def _(ref):
        del ref
        # nothing reads what has no result: without an effect it would be removed
        return [], {WriteEffect(0)}

    @register_lowering(_launch)
    def _(ctx, ref):
        del ctx, ref
        word = ir.IntegerType.get_signless(32)
        zero = arith.constant(word, ir.IntegerAttr.get(word, 0))
        # this form of inline assembly must have a result
        text = "griddepcontrol.launch_dependents; mov.u32 $0, $1;"
        dialect.elementwise_inline_asm([word], text, "=r,r", pure=False, packed_element=1, args=[zero])
        return []


def early_launch(kernel: Callable[..., None], early: bool, *, interpret: bool) -> Callable[..., None]:
    """Returns the kernel, which first lets its dependents start if `early` and if there is such a thing.

    Args:
      kernel: of a `pallas_call` for Triton; its last reference is an output.
      early: whether all that reads the results directly are kernels of this package.
      interpret: as for `pallas_call`.
    """
    if not early or interpret or not AVAILABLE or not dispatch.at_least_hopper():
        return kernel

    def launching(*refs: Any) -> None:
        _launch.bind(refs[-1])
        kernel(*refs)

    return launching
