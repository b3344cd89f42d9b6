"""Decoding methods, one file each. Each is a frozen dataclass; `generate(method=...)` takes any of them."""

import importlib
import pkgutil

from jaxspec.methods.base import Method, Models
from jaxspec.methods.draft_model import DraftModel
from jaxspec.methods.dustin import Dustin
from jaxspec.methods.knapspec import KnapSpec
from jaxspec.methods.plain import Plain
from jaxspec.methods.quest import Quest
from jaxspec.methods.self_dustin import SelfDustin
from jaxspec.methods.streaming import Streaming
from jaxspec.methods.vegas import Vegas

__all__ = [
    "DraftModel",
    "Dustin",
    "KnapSpec",
    "Method",
    "Models",
    "Plain",
    "Quest",
    "SelfDustin",
    "Streaming",
    "Vegas",
    "find_methods",
]


def find_methods() -> dict[str, type[Method]]:
    """Every method of this package by name: the file's, with hyphens."""
    found = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for value in vars(module).values():
            own = isinstance(value, type) and value.__module__ == module.__name__
            if own and issubclass(value, Method) and value is not Method:
                found[info.name.replace("_", "-")] = value
    return found
