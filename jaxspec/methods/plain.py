"""Plain decoding: one token per forward. The baseline of every comparison."""

from dataclasses import dataclass

from jaxspec.methods.base import Method


@dataclass(frozen=True)
class Plain(Method):
    """Autoregressive decoding with the target model: nothing is drafted."""
