"""The one place that looks at the platform."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

BACKENDS = ("pallas", "xla", "interpret")
# the least that JAX asks for on some GPU
MIN_CUDNN = 91100

_override: contextvars.ContextVar[str | None] = contextvars.ContextVar("pallas_kernels_backend", default=None)


def default_backend() -> str:
    """Returns 'pallas' where the default device is an NVIDIA GPU, else 'xla'."""
    return _override.get() or ("pallas" if jax.default_backend() == "gpu" else "xla")


def resolve(backend: str | None) -> str:
    """Returns `backend`, or the default for None; raises ValueError for an unknown name."""
    if backend is None:
        return default_backend()
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed are None, " + ", ".join(map(repr, BACKENDS)))
    return backend


def at_least_hopper() -> bool:
    """Returns whether the GPU has compute capability 9.0 or more: it compares two bfloat16 numbers in an instruction,
    and can start a kernel before the one ahead of it has ended.

    True without a GPU, where programs are compiled for one at most.
    """
    device = jax.devices()[0]
    return device.platform != "gpu" or float(device.compute_capability) >= 9


def has_cudnn() -> bool:
    """Returns whether the default device is a GPU for which JAX finds a cuDNN with fused attention.

    False without a GPU, whatever is installed.
    """
    if jax.default_backend() != "gpu":
        return False
    try:
        from jax._src.cudnn.fused_attention_stablehlo import MaskType, check_cudnn_version, dot_product_attention

        del MaskType, dot_product_attention  # what the call needs, should another JAX have moved it
        return check_cudnn_version() >= MIN_CUDNN
    except (ImportError, RuntimeError):
        return False


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Makes `backend` the default inside the block.

    For programs compiled on one platform for another, where the default device says nothing about the target. The
    choice is read while tracing, so a function that is already traced keeps the one it was traced with.
    """
    token = _override.set(resolve(backend))
    try:
        yield
    finally:
        _override.reset(token)


def prefill_rows(backend: str | None) -> int:
    """Query rows per prefill chunk, over the whole batch.

    The GPU's matrix units want thousands; the reference attention materialises rows x cache logits, so it gets fewer.
    """
    return 8192 if resolve(backend) == "pallas" else 512


def shared(*static: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates an op so that all its calls with equal shapes and options are traced and lowered once.

    A model calls each op once a layer: without this its kernels would be traced anew for every layer, which took longer
    than all of XLA.

    Args:
      static: names of the arguments that are no arrays.
    """
    return functools.partial(jax.jit, static_argnames=static)
