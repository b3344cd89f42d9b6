"""Checks what `generate` and `stream` are asked for, and pads prompts to one of a few widths."""

import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.methods.base import Method
from jaxspec.models.decoder import Decoder
from jaxspec.sampling import Sampling
from jaxspec.types import Array, Params


@struct.dataclass
class Request:
    """A checked request; everything in it is traced."""

    prompt: Array  # int32 [B, P], P one of `bucket`'s widths
    prompt_length: Array  # int32 [B], at least 1
    valid: Array  # bool [B]: False where a traced value was wrong
    keys: Array  # [B] PRNG keys
    sampling: Sampling
    eos_ids: Array  # int32 [E]
    pad_id: Array  # int32 []


def bucket(length: int) -> int:
    """The padded width of a prompt: at least 128, then four widths per doubling, so at most a quarter is padding."""
    if length <= 128:
        return 128
    step = 1 << ((length - 1).bit_length() - 3)
    return -(-length // step) * step


def check_request(
    model: Decoder,
    prompt: Array,
    prompt_length: Array,
    key: Array,
    method: Method,
    sampling: Sampling,
    max_new_tokens: int,
    eos_ids: tuple[int, ...],
    pad_id: int,
    draft_params: Params | None,
) -> Request:
    """Validates the arguments of `generate`, which documents them. Raises ValueError."""
    for name, value, kind in (("model", model, Decoder), ("method", method, Method), ("sampling", sampling, Sampling)):
        if not isinstance(value, kind):
            raise ValueError(f"{name} must be a {kind.__name__}, got {value!r}")
    if method.needs_draft_params != (draft_params is not None):
        needs = "needs" if method.needs_draft_params else "takes no"
        raise ValueError(f"method {type(method).__name__} {needs} draft_params")
    method.check_model(model)
    limit, vocab_size = model.config.capacity_limit, model.config.vocab_size
    max_new_tokens = _integer("max_new_tokens", max_new_tokens, 1, limit)
    pad_id = _integer("pad_id", pad_id, -(2**31), 2**31 - 1)
    if not isinstance(eos_ids, Iterable):
        raise ValueError(f"eos_ids must be a sequence of ids, got {eos_ids!r}")
    eos_ids = [_integer("eos_ids", i, 0, vocab_size - 1) for i in eos_ids]

    prompt = _integer_array("prompt", prompt)
    prompt_length = _integer_array("prompt_length", prompt_length)
    if prompt.ndim != 2 or 0 in prompt.shape:
        raise ValueError(f"prompt must be [B, P] with B, P >= 1, got shape {prompt.shape}")
    batch, width = prompt.shape
    if prompt_length.shape != (batch,):
        raise ValueError(f"prompt_length must have shape [{batch}], one per prompt, got {prompt_length.shape}")
    keys = _row_keys(key, batch)
    sampling = sampling.check(batch).arrays

    # concrete values stay in numpy: eager jax operations would compile a program per prompt width
    traced = isinstance(prompt, jax.core.Tracer) or isinstance(prompt_length, jax.core.Tracer)
    xp = jnp if traced else np
    if isinstance(prompt_length, np.ndarray):
        lengths = prompt_length
        _check_rows(lengths, (lengths < 1) | (lengths > width), f"prompt_length must lie in 1..{width}")
        room = limit - max_new_tokens
        message = f"prompt_length + max_new_tokens must fit the model's {limit} positions"
        _check_rows(lengths, lengths > room, f"{message}, {room} of them for the prompt")
        width = int(lengths.max())
        prompt = prompt[:, :width]
    inside = xp.arange(width) < prompt_length[:, None]
    wrong = inside & ((prompt < 0) | (prompt >= vocab_size))
    if not traced:
        _check_rows(prompt, wrong, f"prompt ids must lie in 0..{vocab_size - 1}")
    valid = (prompt_length >= 1) & (prompt_length <= min(width, limit - max_new_tokens)) & ~xp.any(wrong, axis=1)
    padding = ((0, 0), (0, bucket(width) - width))
    return Request(
        prompt=xp.pad(xp.where(inside, prompt, 0).astype(np.int32), padding),
        prompt_length=xp.where(valid, prompt_length, 1).astype(np.int32),
        valid=valid & sampling.valid,
        keys=keys,
        sampling=sampling,
        eos_ids=np.array(eos_ids, np.int32),
        pad_id=np.int32(pad_id),
    )


def _check_rows(values: np.ndarray, wrong: np.ndarray, message: str) -> None:
    if wrong.any():
        raise ValueError(f"{message}; got {values[wrong][:5].tolist()}")


def _integer(name: str, value: Any, low: int, high: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer in {low}..{high}, got {value!r}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} must lie in {low}..{high}, got {number}")
    return number


def _integer_array(name: str, value: Any) -> Array | np.ndarray:
    try:
        array = value if isinstance(value, jax.core.Tracer) else np.asarray(value)
    except ValueError:
        raise ValueError(f"{name} must be an integer array, got a ragged one") from None
    if array.size == 0:
        # an empty list has no type; its shape is what is wrong with it
        array = array.astype(np.int32)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must be an integer array, got dtype {array.dtype}")
    # what it is compared with need not fit a smaller type
    return array.astype(np.int32) if array.dtype.itemsize < 4 else array


def _row_keys(key: Any, batch: int) -> Array:
    if not isinstance(key, jax.Array):
        raise ValueError(f"key must be a JAX PRNG key, got {type(key).__name__}; make one with jax.random.key(seed)")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        try:
            key = jax.random.wrap_key_data(key)
        except (TypeError, ValueError):
            raise ValueError(f"key must be a JAX PRNG key, got dtype {key.dtype} and shape {key.shape}") from None
    if key.shape == (batch,):
        return key
    if key.shape != ():
        raise ValueError(f"key must be one PRNG key or one per row [{batch}], got shape {key.shape}")
    return _folded(key, np.arange(batch, dtype=np.int32))


# outside jit its parts would be a program each
_folded = jax.jit(jax.vmap(jax.random.fold_in, (None, 0)))
