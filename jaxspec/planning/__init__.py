"""Planning of layer-skipped drafts: latency model, knapsack, choice of a plan."""

from jaxspec.planning.latency import (
    LatencyProfile,
    Line,
    ProfileWarning,
    expected_tokens,
    fit_line,
    load_profile,
    save_profile,
)
from jaxspec.planning.plan import Candidate, Plan, Planned, PlannerOptions, plan

__all__ = [
    "Candidate",
    "LatencyProfile",
    "Line",
    "Plan",
    "Planned",
    "PlannerOptions",
    "ProfileWarning",
    "expected_tokens",
    "fit_line",
    "load_profile",
    "plan",
    "save_profile",
]
