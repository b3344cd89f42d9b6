"""Sampling: every filter in one place, by threshold search instead of sorting the vocabulary."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.types import Array

GREEDY_BELOW = 1e-4  # temperatures under this are argmax: dividing by them would overflow

_FLOAT32 = np.finfo(np.float32)
_RANGES = {
    "temperature": (0, _FLOAT32.max, "a finite number >= 0"),
    "top_k": (1, 2**31 - 1, "an integer >= 1"),
    "top_p": (_FLOAT32.tiny, 1, "a number in (0, 1]"),
    "min_p": (0, 1, "a number in [0, 1]"),
}


@struct.dataclass
class Sampling:
    """How tokens are drawn. A field that is None is off and costs nothing; `Sampling()` is greedy.

    Values are traced, so a new temperature never recompiles; switching a filter on or off does. Each is a scalar or
    one value per row [B]. The filters apply in the order of the fields, as in transformers.

    Raises:
        ValueError: a Python number outside its range. Arrays are checked where they are used: concrete ones raise
            there, and traced ones end their rows as invalid.
    """

    temperature: Any = None  # >= 0; None, or below 1e-4: the first index of the largest logit
    top_k: Any = None  # int >= 1: keep the k largest logits and all that tie with the k-th; k may exceed V
    top_p: Any = None  # in (0, 1]: keep the smallest set of likeliest tokens with this mass, ties included
    min_p: Any = None  # in [0, 1]: keep tokens at least this fraction as likely as the likeliest

    def __post_init__(self) -> None:
        for name, (low, high, what) in _RANGES.items():
            value = getattr(self, name)
            # JAX rebuilds this around whatever it maps over, so that only what a user wrote is looked at
            if type(value) in (int, float) and not low <= value <= high:
                raise ValueError(f"sampling {name} must be {what}, got {value!r}")

    @property
    def greedy(self) -> bool:
        """Whether this is known to be greedy without looking at traced values."""
        return self.temperature is None

    @property
    def valid(self) -> Array | np.ndarray:
        """Whether the values are possible, bool [] or [B]; false for NaN."""
        checks = [np.True_]
        for name, (low, high, _) in _RANGES.items():
            value = getattr(self, name)
            if value is not None:
                checks.append((value >= low) & (value <= high))
        return functools.reduce(operator.and_, checks)

    @property
    def arrays(self) -> "Sampling":
        """The same with arrays of one dtype per field, so that 1 and 1.0 share a program."""
        values = {name: getattr(self, name) for name in _RANGES}
        return Sampling(
            **{
                name: None if value is None else _array(value).astype(np.int32 if name == "top_k" else np.float32)
                for name, value in values.items()
            }
        )

    def check(self, batch: int) -> "Sampling":
        """Validates shapes, dtypes and concrete values; returns the greedy form when every temperature is tiny.

        Raises:
            ValueError: names the field and what it may be.
        """
        for name, (_, _, what) in _RANGES.items():
            value = getattr(self, name)
            if value is None:
                continue
            array = _array(value)
            if array.shape not in ((), (batch,)):
                raise ValueError(f"sampling {name} must be a scalar or have shape [{batch}], got shape {array.shape}")
            integral = jnp.issubdtype(array.dtype, jnp.integer)
            if not integral and (name == "top_k" or not jnp.issubdtype(array.dtype, jnp.floating)):
                raise ValueError(f"sampling {name} must be {what}, got {value!r}")
            if isinstance(array, np.ndarray) and not np.all(Sampling(**{name: array}).valid):
                raise ValueError(f"sampling {name} must be {what}, got {value!r}")
        temperature = self.temperature
        if temperature is None and not (self.top_k is None and self.top_p is None and self.min_p is None):
            raise ValueError("sampling filters need a temperature: without one decoding is greedy")
        known = temperature is not None and not isinstance(temperature, jax.core.Tracer)
        return Sampling() if known and np.all(np.asarray(temperature) < GREEDY_BELOW) else self


def to_probs(logits: Array, sampling: Sampling) -> Array:
    """The distribution that is sampled from: float32 [B, ..., V] from logits [B, ..., V], after every filter."""
    logits = logits.astype(jnp.float32)

    def per_row(value: Any) -> Array:
        value = jnp.asarray(value)
        return value.reshape(value.shape + (1,) * (logits.ndim - value.ndim)) if value.ndim else value

    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    if sampling.greedy:
        return best
    temperature = per_row(sampling.temperature).astype(jnp.float32)
    scaled = logits / jnp.maximum(temperature, GREEDY_BELOW)
    if sampling.top_k is not None:
        keys, k = _ordered_keys(scaled), _drop_last(per_row(sampling.top_k))
        threshold = _largest_key(lambda mask: jnp.sum(mask, axis=-1, dtype=jnp.int32) >= k, keys)
        scaled = jnp.where(keys >= threshold[..., None], scaled, -jnp.inf)
    probs = jax.nn.softmax(scaled, axis=-1)
    if sampling.top_p is not None:
        # where rounding keeps the whole mass below top_p, no threshold is enough and all tokens stay
        keys, top_p = _ordered_keys(probs), per_row(sampling.top_p)
        goal = _drop_last(top_p)
        threshold = _largest_key(lambda mask: jnp.sum(jnp.where(mask, probs, 0), axis=-1) >= goal, keys)
        # tokens too unlikely to change a float sum belong to a top_p of 1 too
        probs = jnp.where((keys >= threshold[..., None]) | (top_p >= 1), probs, 0)
    if sampling.min_p is not None:
        probs = jnp.where(probs >= per_row(sampling.min_p) * jnp.max(probs, axis=-1, keepdims=True), probs, 0)
    probs = probs / jnp.sum(probs, axis=-1, keepdims=True)
    return jnp.where(temperature < GREEDY_BELOW, best, probs)


def sample(probs: Array, keys: Array) -> Array:
    """Draws one index per row of probs [B, V] with keys [B]; int32 [B]. Never an index of probability 0."""
    gumbel = jax.vmap(lambda key: jax.random.gumbel(key, probs.shape[-1:], jnp.float32))(keys)
    return jnp.argmax(jnp.where(probs > 0, jnp.log(probs) + gumbel, -jnp.inf), axis=-1).astype(jnp.int32)


def _array(value: Any) -> Array | np.ndarray:
    return value if isinstance(value, jax.core.Tracer) else np.asarray(value)


def _drop_last(value: Array) -> Array:
    return value[..., 0] if value.ndim else value


def _ordered_keys(x: Array) -> Array:
    """uint32 keys in the order of float32 `x`."""
    # -0.0 equals 0.0 but has other bits
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest_key(enough: Callable[[Array], Array], keys: Array) -> Array:
    """The largest threshold t [...] for which `enough(keys >= t)` holds, 0 if it holds for none.

    Four bits of t are settled per pass, by trying all of their values at once.
    """

    def settle(i: Array, threshold: Array) -> Array:
        shift = jnp.uint32(28) - 4 * i.astype(jnp.uint32)
        digits = jnp.arange(1, 16, dtype=jnp.uint32) << shift
        passed = [enough(keys >= (threshold | digit)[..., None]) for digit in digits]
        return threshold | (sum(p.astype(jnp.uint32) for p in passed) << shift)

    return jax.lax.fori_loop(0, 8, settle, jnp.zeros(keys.shape[:-1], jnp.uint32))
