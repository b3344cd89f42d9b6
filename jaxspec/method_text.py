"""A method with options on one line: `vegas:rho=0.05,num_draft=4`. Which methods there are is the caller's to say."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any


def options_of(method: type) -> dict[str, dataclasses.Field]:
    """The fields of a method that are options, by name."""
    return {field.name: field for field in dataclasses.fields(method) if field.metadata}


def parse_text(text: str, find: Callable[[str], type]) -> tuple[str, dict[str, Any]]:
    """The name and the options in a text. A value in brackets may hold commas.

    Args:
        text: the text.
        find: the method of a name; raises ValueError if there is none.

    Raises:
        ValueError: an unknown method or option, or a value of the wrong type.
    """
    name, _, rest = text.partition(":")
    known = options_of(find(name))
    options: dict[str, Any] = {}
    for item in filter(None, re.split(r",(?![^\[]*\])", rest)):
        key, equals, value = item.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or key not in known:
            raise ValueError(f"{text!r}: {item!r} is no option=value of {name}; options: {', '.join(sorted(known))}")
        if value.startswith("[") and value.endswith("]"):
            value = value[1:-1]
        kind = type(known[key].default)
        try:
            options[key] = [int(part) for part in value.split("+") if value] if kind is tuple else kind(value)
        except ValueError:
            form = "integers joined by +" if kind is tuple else f"a value of type {kind.__name__}"
            raise ValueError(f"{text!r}: {key} must be {form}, got {value!r}") from None
    return name, options
