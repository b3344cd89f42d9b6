"""Methods as plain data: a name with options, as the command line takes them and as files keep them."""

import json
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.calibration.records import read_record
from jaxspec.dustin.config import options_from_config
from jaxspec.dustin.verification import SparseVerification
from jaxspec.method_text import options_of, parse_text
from jaxspec.methods import KnapSpec, Method, find_methods
from jaxspec.methods.knapspec import selection_named
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.rope import RopeConfig
from jaxspec.planning.latency import LatencyProfile, ProfileWarning
from jaxspec.planning.plan import Plan

TUNED = "tuned"
# stands for a draft model that is not loaded yet, so that all other options can be checked: it lacks no head
ANY_DRAFT_MODEL = Decoder(ModelConfig("llama", 1, 1, 1, 2**31, 2**31, 2**31, 2, 1, RopeConfig()))


def parse_spec(text: str) -> dict[str, Any]:
    """`vegas` or `vegas:rho=0.05,num_draft=4` as {"method": ..., "options": {...}}; several numbers are joined by `+`.

    Raises:
        ValueError: an unknown method or option, or a value of the wrong type.
    """
    name, options = parse_text(text, _method)
    return {"method": name, "options": options}


def build_method(spec: Mapping[str, Any], draft_model: Decoder | None = None, config: Path | None = None) -> Method:
    """The method that a spec describes.

    Args:
        spec: {"method": name, "options": {...}}; an option may itself be such a spec, and `plan` of KnapSpec the fields
            of a `Plan`.
        draft_model: of methods that have one.
        config: what `jaxspec calibrate dustin` wrote, of methods that verify over few rows.

    Warns:
        ProfileWarning: more drafts are asked for than the latency profile was measured for.

    Raises:
        ValueError: an unknown method or option, a value out of range, or a draft model missing.
    """
    chosen = _method(spec.get("method"))
    known = {*options_of(chosen), *(("plan",) if chosen is KnapSpec else ())}
    options = dict(spec.get("options", {}))
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"{spec['method']} has no option {unknown[0]!r}; options: {', '.join(sorted(known))}")
    for key, value in options.items():
        if key == "plan":
            options[key] = _plan(value)
        elif isinstance(value, Mapping):
            options[key] = build_method(value)
        elif isinstance(value, list):
            options[key] = tuple(value)
    if config is not None and issubclass(chosen, SparseVerification):
        options = options_from_config(config, options.get("budget")) | options
    if chosen.needs_draft_params:
        if draft_model is None:
            raise ValueError(f"{spec['method']} needs a draft model")
        options["model"] = draft_model
    method = chosen(**options)
    # the default is more than a GPU's profile holds by design
    if "max_draft" in options and isinstance(profile := getattr(method, "profile", None), LatencyProfile):
        most = profile.rows - 1
        if method.max_draft > most:
            asked = f"max_draft is {method.max_draft}, the latency profile was measured for at most {most} drafts"
            warnings.warn(f"{asked}: no more are planned", ProfileWarning, stacklevel=2)
    return method


def describe(spec: Mapping[str, Any]) -> str:
    """A spec in the notation that `parse_spec` reads, but for plans and rows by layer, which stand in short."""

    def shown(value: Any) -> str:
        if isinstance(value, Mapping):
            return f"[{describe(value)}]" if "method" in value else f"[{_plan(value)}, {_digest(value)}]"
        if isinstance(value, list | tuple):
            # a number for each layer would fill the line
            by_layer = any(isinstance(x, float) for x in value)
            return f"[{len(value)} numbers, {_digest(value)}]" if by_layer else "+".join(map(str, value))
        return str(value)

    options = ",".join(f"{key}={shown(value)}" for key, value in spec.get("options", {}).items())
    return f"{spec['method']}:{options}" if options else spec["method"]


def load_method(path: str | Path, draft_model: Decoder | None = None) -> Method:
    """The method that `jaxspec tune` chose.

    Args:
        path: the file that it wrote.
        draft_model: of methods that have one; the file's `draft` names the checkpoint.

    Raises:
        ValueError: it cannot be read or is not such a file, or what `build_method` raises.
    """
    return method_of(read_tuned(path), draft_model)


def method_of(record: dict[str, Any], draft_model: Decoder | None = None) -> Method:
    """The method of what `read_tuned` returns; raises as `build_method`."""
    config = record.get("config")
    return build_method(record["chosen"], draft_model, None if config is None else Path(config))


def read_tuned(path: str | Path) -> dict[str, Any]:
    """What `jaxspec tune` wrote.

    Raises:
        ValueError: it cannot be read or is not such a file, or one of another schema version.
    """
    record = read_record(Path(path), TUNED)
    chosen = record.get("chosen")
    if not isinstance(chosen, dict) or not isinstance(chosen.get("method"), str):
        raise ValueError(f"{path}: chosen must be a method with options, got {chosen!r}")
    for name in ("draft", "config"):
        if not isinstance(record.get(name), str | None):
            raise ValueError(f"{path}: {name} must be a path or null, got {record[name]!r}")
    return record


def files_of(options: Mapping[str, Any]) -> list[str]:
    """The files that options name: latency profiles and rows by layer, also those of a selection.

    Raises:
        ValueError: a selection that `read_selection` refuses.
    """
    found = [options.get(name) for name in ("profile", "layer_shares")]
    selection = options.get("selection")
    if isinstance(selection, Mapping):
        found += files_of(selection.get("options", {}))
    elif isinstance(selection, str) and selection:
        found += files_of(parse_text(selection, selection_named)[1])
    return [name for name in found if isinstance(name, str) and name]


def _digest(value: Any) -> str:
    """Four digits that tell one long value from another."""
    return f"{zlib.crc32(json.dumps(value).encode()) & 0xFFFF:04x}"


def _plan(fields: Any) -> Plan:
    if not isinstance(fields, Mapping) or set(fields) != {"attn", "mlp", "num_draft"}:
        raise ValueError(f"plan must have attn, mlp and num_draft, got {fields!r}")
    return Plan(**fields)


def _method(name: Any) -> type[Method]:
    methods = find_methods()
    if name not in methods:
        raise ValueError(f"no method {name!r}; there are {', '.join(sorted(methods))}")
    return methods[name]
