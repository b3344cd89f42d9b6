"""The JSON files of calibration: written whole or not at all, and checked when read."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert.atomic import replace_file
from convert.errors import ConversionError
from convert.json_file import read_object
from jaxspec.models import Decoder
from jaxspec.types import Params

SCHEMA_VERSION = 1
HEADS, DUSTIN, ROWS = "retrieval-heads", "dustin", "layer-rows"
_SAMPLED = 256  # values of each leaf that enter the hash


def model_hash(model: Decoder, params: Params) -> str:
    """Names a model by its sizes and a sample of every weight, the same in float32 and bfloat16; 16 hex digits."""
    digest = hashlib.sha256(json.dumps(asdict(model.config), sort_keys=True).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        flat = leaf.reshape(-1)
        sample = flat[:: max(flat.size // _SAMPLED, 1)].astype(jnp.bfloat16)
        digest.update(jax.tree_util.keystr(path).encode() + np.asarray(sample).tobytes())
    return digest.hexdigest()[:16]


def describe(name: str, model: Decoder, params: Params) -> dict[str, Any]:
    """What a record says about a model."""
    config = model.config
    sizes = {"num_layers": config.num_layers, "num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads}
    return {"name": name, "hash": model_hash(model, params), **sizes}


def write_record(path: Path, kind: str, record: dict[str, Any]) -> None:
    """Writes a record; a killed or interrupted writer leaves what was there before."""
    whole = {"schema_version": SCHEMA_VERSION, "kind": kind, **record}
    replace_file(path, json.dumps(whole, ensure_ascii=False, indent=1) + "\n")


def read_record(path: Path, kind: str) -> dict[str, Any]:
    """Reads a record.

    Raises:
        ValueError: no JSON object, of another kind, or of another schema version.
    """
    try:
        record = read_object(path)
    except ConversionError as error:
        raise ValueError(str(error)) from None
    if record.get("kind") != kind:
        found = f"its kind is {record['kind']!r}" if "kind" in record else "it states no kind"
        raise ValueError(f"{path}: not a {kind} file ({found})")
    if record.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"{path}: schema version {record.get('schema_version')!r} instead of {SCHEMA_VERSION}")
    return record
