"""What decoding steps cost on one device, by context length (the latency model of KnapSpec, arXiv 2602.20217)."""

import dataclasses
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from convert.atomic import replace_file
from convert.json_file import read_object

SCHEMA_VERSION = 1
# a larger error than this is no property of the device
POOR_FIT = 0.25


class ProfileWarning(UserWarning):
    """A latency profile is used that describes the device poorly, or for more than it holds."""


class Line(NamedTuple):
    """slope * n + intercept."""

    slope: float  # seconds per cached row
    intercept: float  # seconds

    def at(self, n: Any) -> Any:
        """Seconds at context length n, a number or an array."""
        return self.slope * n + self.intercept


class RoundCosts(NamedTuple):
    """The latency model of one kind of drafts. Its values may be traced, so that new figures do not recompile."""

    num_layers: Any
    rows: Any  # query rows of the measured verification
    attention: Line
    mlp: Any
    head: Any
    verify_attention: Line
    verify_mlp: Any
    verify_head: Any
    overhead: Any
    draft_attention: Line  # of a draft step, over all rows or selected ones
    scoring: Line  # per layer and round; 0 where nothing is selected

    def draft_step(self, num_attention: Any, num_mlp: Any, n: Any) -> Any:
        """Seconds of one draft step that runs so many sublayers of each kind at context length n."""
        return num_attention * self.draft_attention.at(n) + num_mlp * self.mlp + self.head

    def plain_step(self, n: Any) -> Any:
        """Seconds of a step of plain decoding at context length n."""
        return self._one_row(n) + self.overhead

    def _one_row(self, n: Any) -> Any:
        return self.num_layers * (self.attention.at(n) + self.mlp) + self.head

    def verify(self, num_draft: Any, n: Any) -> Any:
        """Seconds of verifying `num_draft` drafts, num_draft + 1 query rows, at context length n."""
        one = self._one_row(n)
        most = self.num_layers * (self.verify_attention.at(n) + self.verify_mlp) + self.verify_head
        return one + (most - one) * num_draft / (self.rows - 1) + self.num_layers * self.scoring.at(n)

    def round(self, num_attention: Any, num_mlp: Any, num_draft: Any, n: Any) -> Any:
        """Seconds of a whole round at context length n; without drafts, of a plain step that may score rows."""
        return num_draft * self.draft_step(num_attention, num_mlp, n) + self.verify(num_draft, n) + self.overhead


@dataclass(frozen=True)
class LatencyProfile:
    """Seconds of a model's parts at one batch size and dtype on one device. Hashable, so that a method may hold it.

    `attention` is t_attn(n) = c2 n + c3 of the paper and `mlp` its t_mlp, both of one layer with one query row per
    sequence. The published model ends there; `head` (embedding, final norm and output head), verification at `rows`
    query rows and `overhead` (accepting, bookkeeping) are what it leaves out. Verification with fewer rows is
    interpolated. `selected` is attention to the rows that a selection keeps, and `scoring` what scoring and selecting
    them adds to verification, per layer; None where no selection was measured.
    """

    num_layers: int
    batch: int
    rows: int
    attention: Line
    mlp: float
    head: float
    verify_attention: Line
    verify_mlp: float
    verify_head: float
    overhead: float
    selected: Line | None = None
    scoring: Line | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for values that no measurement gives."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("num_layers", "batch", "rows"):
                least = 2 if field.name == "rows" else 1
                if not isinstance(value, int) or isinstance(value, bool) or value < least:
                    raise ValueError(f"latency profile: {field.name} must be an integer >= {least}, got {value!r}")
            elif field.name in ("attention", "verify_attention", "selected", "scoring"):
                if value is None and field.name in ("selected", "scoring"):
                    continue
                if not isinstance(value, tuple | list) or len(value) != 2 or not all(map(_is_figure, value)):
                    raise ValueError(
                        f"latency profile: {field.name} must be (seconds per row, seconds), both finite and >= 0, "
                        f"got {value!r}"
                    )
                object.__setattr__(self, field.name, Line(*map(float, value)))
            elif not _is_figure(value):
                raise ValueError(f"latency profile: {field.name} must be finite seconds >= 0, got {value!r}")
        if self.mlp + self.attention.at(1) <= 0 or self.verify_mlp + self.verify_attention.at(1) <= 0:
            raise ValueError("latency profile: a layer must take time, got 0 seconds for attention and MLP")

    def costs(self, sparse: bool = False) -> RoundCosts:
        """The latency model of rounds whose drafts attend to all rows, or with `sparse` to selected ones.

        Raises:
            ValueError: `sparse`, and no selection was measured.
        """
        if sparse and (self.selected is None or self.scoring is None):
            raise ValueError("the latency profile lacks sparse attention: measure it with the same selection")
        names = [name for name in RoundCosts._fields if name not in ("draft_attention", "scoring")]
        return RoundCosts(
            **{name: getattr(self, name) for name in names},
            draft_attention=self.selected if sparse else self.attention,
            scoring=self.scoring if sparse else Line(0.0, 0.0),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return dataclasses.asdict(self)


def fit_line(lengths: Sequence[float], seconds: Sequence[float]) -> tuple[Line, float]:
    """The least-squares line through measured times, and its largest relative error at those points.

    Neither slope nor intercept comes out below 0: where noise would have it so, the other one is fitted alone.

    Args:
        lengths: context lengths, at least one.
        seconds: as many times.
    """
    n, t = np.asarray(lengths, np.float64), np.asarray(seconds, np.float64)
    if len(set(n.tolist())) < 2:
        slope, intercept = 0.0, float(np.mean(t))
    else:
        slope, intercept = np.polyfit(n, t, 1)
    if slope < 0:
        slope, intercept = 0.0, float(np.mean(t))
    elif intercept < 0:
        slope, intercept = float(np.sum(n * t) / np.sum(n * n)), 0.0
    line = Line(float(slope), float(intercept))
    error = float(np.max(np.abs(line.at(n) - t) / np.maximum(t, 1e-12)))
    return line, error


def expected_tokens(alpha: Any, num_draft: Any) -> Any:
    """Mean tokens per round: (1 - alpha^(g+1)) / (1 - alpha), and g + 1 at alpha = 1 (Leviathan et al., eq. 1).

    That is the sum of alpha^i over i = 0..g, expanded around 1 where the fraction loses its digits, and exactly 1 at
    g = 0.

    Args:
        alpha: chance that a draft token is accepted, in 0..1; a number or an array.
        num_draft: g, of a shape that broadcasts with alpha's.
    """
    xp = np if isinstance(alpha, float | int | np.ndarray | np.generic) else jnp
    rest = 1 - alpha
    near = rest < 1e-3
    fraction = (1 - alpha ** (num_draft + 1)) / xp.where(near, 1, rest)
    # binomial coefficients of (1 - rest)^(g + 1), up to the fourth
    g = num_draft
    series = (g + 1) * (1 - rest * g / 2 * (1 - rest * (g - 1) / 3 * (1 - rest * (g - 2) / 4)))
    return xp.where(num_draft == 0, 1.0, xp.where(near, series, fraction))


def poor_fit(attention_error: float, plain_error: float) -> str | None:
    """What to say where the latency model misses what was measured by more than `POOR_FIT`; else None.

    Args:
        attention_error: largest relative error of the fitted attention times.
        plain_error: largest relative error of the predicted plain steps.
    """
    if max(attention_error, plain_error) <= POOR_FIT:
        return None
    return (
        f"the model misses what was measured by up to {attention_error:.0%} (attention) and {plain_error:.0%} (plain "
        "steps); measure again on an idle device or with more --repeats"
    )


def profile_record(profile: LatencyProfile, details: dict[str, Any]) -> dict[str, Any]:
    """A profile as JSON, with device, versions, shapes and raw measurements beside it."""
    return {"schema_version": SCHEMA_VERSION, **details, "profile": profile.as_dict()}


def save_profile(path: str | os.PathLike[str], profile: LatencyProfile, details: dict[str, Any]) -> None:
    """Writes `profile_record` to a file; an old file at `path` is replaced in one step or stays.

    Args:
        path: the file; its directory must exist.
        profile: the figures.
        details: what is kept beside them.
    """
    replace_file(Path(path), json.dumps(profile_record(profile, details), indent=1) + "\n")


def load_profile(path: str | os.PathLike[str]) -> LatencyProfile:
    """Reads what `save_profile` or `jaxspec profile --out` wrote.

    Warns:
        ProfileWarning: the file says that its figures fit poorly to what was measured, see `poor_fit`.

    Raises:
        ValueError: the file cannot be read or is not such a profile, and what is wrong with it.
    """
    record = read_object(Path(path))
    if "profile" not in record:
        raise ValueError(f"{path}: {_what_it_is(record)}, not a latency profile, which jaxspec profile --out writes")
    if record.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"{path}: not a latency profile of schema version {SCHEMA_VERSION}")
    values = record.get("profile")
    names = {field.name for field in dataclasses.fields(LatencyProfile)}
    if not isinstance(values, dict) or set(values) != names:
        raise ValueError(f"{path}: a profile must have the fields {', '.join(sorted(names))}")
    try:
        profile = LatencyProfile(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    measured = record.get("measured")
    errors = [measured.get(name) for name in ("fit_error", "plain_error")] if isinstance(measured, dict) else []
    # a profile of one's own may come without
    if errors and all(map(_is_figure, errors)) and (poor := poor_fit(*errors)):
        warnings.warn(f"{path}: {poor}", ProfileWarning, stacklevel=2)
    return profile


def _what_it_is(record: dict[str, Any]) -> str:
    if "kind" in record:
        return f"a file of kind {record['kind']!r}"
    # what jaxspec generate --trace writes states no kind
    return "a trace" if {"rows", "metrics"} <= set(record) else "a file without a profile"


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value)) and value >= 0
