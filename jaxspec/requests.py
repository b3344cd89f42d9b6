"""Checks what `generate` and `stream` are asked for, and pads prompts to one of a few widths."""

import operator
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
    config = model.config
    limit = config.capacity_limit
    for name, value, kind in (("model", model, Decoder), ("method", method, Method), ("sampling", sampling, Sampling)):
        if not isinstance(value, kind):
            raise ValueError(f"{name} must be a {kind.__name__}, got {value!r}")
    if method.needs_draft_params != (draft_params is not None):
        needs = "needs" if method.needs_draft_params else "takes no"
        raise ValueError(f"method {type(method).__name__} {needs} draft_params")
    max_new_tokens = _integer("max_new_tokens", max_new_tokens, 1, limit)
    pad_id = _integer("pad_id", pad_id, -(2**31), 2**31 - 1)
    eos_ids = [_integer("eos_ids", i, 0, config.vocab_size - 1) for i in eos_ids]

    prompt = _integer_array("prompt", prompt)
    prompt_length = _integer_array("prompt_length", prompt_length)
    if prompt.ndim != 2 or 0 in prompt.shape:
        raise ValueError(f"prompt must be [B, P] with B, P >= 1, got shape {prompt.shape}")
    batch, width = prompt.shape
    if prompt_length.shape != (batch,):
        raise ValueError(f"prompt_length must have shape [{batch}], one per prompt, got {prompt_length.shape}")
    keys = _row_keys(key, batch)
    sampling = sampling.check(batch)

    if _concrete(prompt_length):
        lengths = np.asarray(prompt_length)
        _check_rows(lengths, (lengths < 1) | (lengths > width), f"prompt_length must lie in 1..{width}")
        room = limit - max_new_tokens
        message = f"prompt_length + max_new_tokens must fit the model's {limit} positions: prompt_length <= {room}"
        _check_rows(lengths, lengths > room, message)
        width = int(lengths.max())
        prompt = prompt[:, :width]
        if _concrete(prompt):
            ids = np.asarray(prompt)
            wrong = ((ids < 0) | (ids >= config.vocab_size)) & (np.arange(width) < lengths[:, None])
            _check_rows(ids[wrong], np.ones(wrong.sum(), bool), f"prompt ids must lie in 0..{config.vocab_size - 1}")
    elif width >= 2**31 - max_new_tokens:
        raise ValueError(f"prompt of width {width} is too wide")

    prompt = jnp.pad(prompt, ((0, 0), (0, bucket(width) - width))).astype(jnp.int32)
    inside = jnp.arange(prompt.shape[1]) < prompt_length[:, None]
    valid = (prompt_length >= 1) & (prompt_length <= min(width, limit - max_new_tokens))
    valid &= ~jnp.any(inside & ((prompt < 0) | (prompt >= config.vocab_size)), axis=1)
    return Request(
        prompt=jnp.where(inside, prompt, 0),
        prompt_length=jnp.where(valid, prompt_length, 1).astype(jnp.int32),
        valid=valid,
        keys=keys,
        sampling=jax.tree.map(jnp.asarray, sampling),
        eos_ids=jnp.asarray(eos_ids, jnp.int32).reshape(-1),
        pad_id=jnp.int32(pad_id),
    )


def _concrete(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer)


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
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must be an integer array, got dtype {array.dtype}")
    return array


def _row_keys(key: Any, batch: int) -> Array:
    if not isinstance(key, jax.Array):
        raise ValueError(f"key must be a JAX PRNG key, got {type(key).__name__}; make one with jax.random.key(seed)")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.dtype != jnp.uint32 or key.ndim not in (1, 2):
            raise ValueError(f"key must be a JAX PRNG key, got dtype {key.dtype} and shape {key.shape}")
        key = jax.random.wrap_key_data(key)
    if key.shape == (batch,):
        return key
    if key.shape != ():
        raise ValueError(f"key must be one PRNG key or one per row [{batch}], got shape {key.shape}")
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))
