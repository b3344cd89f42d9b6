"""Decoding methods. Each is a frozen dataclass; `generate(method=...)` takes any of them."""

from jaxspec.methods.base import Method, Models
from jaxspec.methods.plain import Plain

__all__ = ["Method", "Models", "Plain"]
