"""Rotary position embeddings (RoFormer, arXiv 2104.09864, and the scalings that checkpoints use)."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.types import Array

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of the rotary embedding; the names are those of Hugging Face's `rope_parameters`.

    `original_max_positions` is `original_max_position_embeddings` (the model's `max_position_embeddings` when absent).
    """

    theta: float = 10_000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    truncate: bool = True  # yarn: correction range rounded to whole dimensions

    @property
    def limit(self) -> int | None:
        """The longest capacity that this type supports, or None: 'dynamic' changes its base with the longest call."""
        return self.original_max_positions if self.rope_type == "dynamic" else None


def rope_config(hf: dict[str, Any]) -> RopeConfig:
    """Reads the rope settings of a Hugging Face config dict.

    They may stand in `rope_parameters` (transformers >= 5), in `rope_scaling` plus a top-level `rope_theta`, or at top
    level alone; stated twice, they must agree.

    Raises:
        ValueError: unknown rope type, partial rotary dimensions, per-layer-type settings, contradicting or missing
            values.
    """
    new, old = hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}
    for name, group in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(group, dict):
            raise ValueError(f"{name} must be an object, got {group!r}")
        if any(isinstance(value, dict) for value in group.values()):
            raise ValueError(f"{name} differs by layer type: {sorted(group)}; one rope for all layers is supported")

    def setting(*names: str, default: Any = None, top_level: bool = False) -> Any:
        groups = (new, old, hf) if top_level else (new, old)
        found = [group[n] for group in groups for n in names if group.get(n) is not None]
        if any(value != found[0] for value in found):
            raise ValueError(f"the config states {names[0]} more than once and differently: {found}")
        return found[0] if found else default

    rope_type = setting("rope_type", "type", default="default")
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if setting("partial_rotary_factor", default=1.0, top_level=True) != 1.0:
        raise ValueError("partial_rotary_factor != 1 is not supported: the whole head must rotate")

    def number(name: str, default: float | None = None, *, above: float = 0, top_level: bool = False) -> float:
        value = setting(name, default=default, top_level=top_level)
        # far beyond any rope setting, and still a float32
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < 1e30:
            raise ValueError(f"rope type {rope_type!r} needs {name} > {above}, got {value!r}")
        return float(value)

    # yarn divides by the base's logarithm
    theta = number("rope_theta", 10_000.0, above=int(rope_type == "yarn"), top_level=True)
    max_positions = hf.get("max_position_embeddings")
    original = setting("original_max_position_embeddings", default=max_positions, top_level=True)
    if rope_type == "dynamic":
        original = max_positions  # transformers scales by max_position_embeddings here
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if isinstance(original, bool) or not isinstance(original, int) or not 1 <= original < 2**31:
        raise ValueError(f"rope type {rope_type!r} needs original_max_position_embeddings >= 1, got {original!r}")
    factor = number("factor")
    if rope_type in ("linear", "dynamic"):
        return RopeConfig(theta, rope_type, factor, original)
    if rope_type == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if low >= high:
            raise ValueError(f"rope type 'llama3' needs low_freq_factor < high_freq_factor, got {low} and {high}")
        return RopeConfig(theta, rope_type, factor, original, low, high)
    fast, slow = number("beta_fast", 32.0), number("beta_slow", 1.0)
    if slow > fast:
        raise ValueError(f"rope type 'yarn' needs beta_slow <= beta_fast, got {slow} and {fast}")
    truncate = setting("truncate", default=True)
    if not isinstance(truncate, bool):
        raise ValueError(f"rope type 'yarn' needs truncate to be true or false, got {truncate!r}")
    if setting("attention_factor") is not None:
        attention_factor = number("attention_factor")
    elif setting("mscale") and setting("mscale_all_dim"):
        attention_factor = _yarn_mscale(factor, number("mscale")) / _yarn_mscale(factor, number("mscale_all_dim"))
    else:
        attention_factor = _yarn_mscale(factor, 1.0)
    return RopeConfig(
        theta,
        rope_type,
        factor,
        original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=attention_factor,
        truncate=truncate,
    )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each rotated pair, float32 [H / 2].

    Sources: linear (Chen et al., arXiv 2306.15595), llama3 (Llama 3.1's published scaling), yarn (arXiv 2309.00071,
    sections 3.2 and 3.3). 'dynamic' equals 'default' up to `RopeConfig.limit`.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv_freq = np.float32(1) / np.power(np.float32(rope.theta), exponent)
    if rope.rope_type == "linear":
        inv_freq = inv_freq / np.float32(rope.factor)
    elif rope.rope_type == "llama3":
        inv_freq = _llama3(inv_freq, rope)
    elif rope.rope_type == "yarn":
        inv_freq = _yarn(inv_freq, rope, head_dim)
    return inv_freq.astype(np.float32)


def rope_tables(rope: RopeConfig, head_dim: int, positions: Array) -> tuple[Array, Array]:
    """cos and sin of `positions` (int32 [...]), each float32 [..., H / 2], scaled by the attention factor."""
    angle = positions[..., None].astype(jnp.float32) * inverse_frequencies(rope, head_dim)
    factor = jnp.float32(rope.attention_factor)
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def _llama3(inv_freq: np.ndarray, rope: RopeConfig) -> np.ndarray:
    wavelength = 2 * math.pi / inv_freq
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smooth = np.clip(smooth, 0, 1)
    return (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq


def _yarn(inv_freq: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    def dimension(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp's width must not be zero
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
