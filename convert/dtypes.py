"""Parameter dtypes and casts that refuse to invent infinities."""

from typing import Any

import ml_dtypes
import numpy as np

from convert.errors import ConversionError

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
CHUNK_ELEMENTS = 4 << 20  # elements decoded at a time: bounds the float32 copy that a cast needs to 16 MiB

_EXPONENT_MASK = {2: {"float16": np.uint16(0x7C00), "bfloat16": np.uint16(0x7F80)}}


def target_dtype(name: Any) -> np.dtype:
    """The numpy dtype of 'float32', 'bfloat16' or 'float16' (or of anything that numpy names so).

    Raises:
        ConversionError: another dtype.
    """
    for known, dtype in DTYPES.items():
        if name == known:
            return dtype
    try:
        dtype = np.dtype(name)
    except TypeError:
        pass
    else:
        if dtype in DTYPES.values():
            return dtype
    raise ConversionError(f"dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")


def cast_into(out: np.ndarray, values: np.ndarray, name: str) -> None:
    """Writes `values` to `out` (same shape), rounding to nearest.

    Raises:
        ConversionError: a value is NaN or infinite, or becomes infinite in `out.dtype`.
    """
    with np.errstate(over="ignore"):
        out[...] = values
    if _all_finite(out):
        return
    if _all_finite(values):
        largest = np.abs(values.astype(np.float64)).max()
        raise ConversionError(f"{name}: values up to {largest:.4g} overflow {out.dtype}")
    raise ConversionError(f"{name}: contains NaN or infinite values")


def _all_finite(values: np.ndarray) -> bool:
    mask = _EXPONENT_MASK.get(values.dtype.itemsize, {}).get(values.dtype.name)
    if mask is None:
        return bool(np.isfinite(values).all())
    return not ((values.view(np.uint16) & mask) == mask).any()
