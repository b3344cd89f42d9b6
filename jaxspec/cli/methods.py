"""Methods as command-line flags: their options are read from the dataclasses, so a new method brings its own."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from jaxspec.checkpoint import Loaded, load
from jaxspec.dustin.verification import SparseVerification
from jaxspec.method_specs import ANY_DRAFT_MODEL, describe, method_of, read_tuned
from jaxspec.method_text import options_of
from jaxspec.methods import Method, find_methods
from jaxspec.types import Params


def add_method_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--method`, `--draft` and one flag per option of any method."""
    methods = find_methods()
    group = parser.add_argument_group("decoding method")
    group.add_argument("--method", choices=sorted(methods), help="default: plain")
    drafted = ", ".join(sorted(name for name, method in methods.items() if method.needs_draft_params))
    group.add_argument("--draft", metavar="MODEL", help=f"the draft model of {drafted}: anything that --model takes")
    group.add_argument("--tuned", type=Path, metavar="FILE", help="the method and options that jaxspec tune chose")
    configured = ", ".join(sorted(_configured(methods)))
    group.add_argument("--config", type=Path, metavar="FILE", help=f"what jaxspec calibrate wrote, of {configured}")
    for flag, users in _options(methods).items():
        field = next(iter(users.values()))
        several = isinstance(field.default, tuple)
        kind = int if several else type(field.default)
        group.add_argument(
            flag,
            type=kind,
            nargs="+" if several else None,
            choices=field.metadata["choices"],
            metavar=None if field.metadata["choices"] else field.metadata["metavar"] or kind.__name__.upper(),
            help=f"{field.metadata['help']} ({_defaults(users)})",
        )


def method_from_flags(args: argparse.Namespace, *, lossy: bool = True) -> Method:
    """The chosen method, before any model is loaded; fills in `args.method`, `args.draft` and `args.config`.

    A method that has a draft model holds `ANY_DRAFT_MODEL` until `load_draft`.

    Args:
        args: the command's.
        lossy: whether methods are allowed whose output is not the target's own.

    Raises:
        ValueError: a flag that the method does not have, a value out of range, a draft model that is missing or not
            wanted, or a method that is not allowed.
    """
    methods = find_methods()
    if args.tuned is not None:
        record = read_tuned(args.tuned)
        tuned = record["chosen"]["method"]
        options = [getattr(args, next(iter(users.values())).name) for users in _options(methods).values()]
        if args.method not in (None, tuned) or any(value is not None for value in (args.config, *options)):
            raise ValueError("--tuned brings a method with all its options: leave out --method, --config and options")
        args.method, args.draft, args.config = tuned, args.draft or record.get("draft"), record.get("config")
    else:
        args.method, options = args.method or "plain", {}
        for flag, users in _options(methods).items():
            field = next(iter(users.values()))
            value = getattr(args, field.name)
            if value is None:
                continue
            if args.method not in users:
                raise ValueError(f"{flag} does not apply to --method {args.method}; it belongs to {', '.join(users)}")
            options[field.name] = value
        if args.config is not None and args.method not in _configured(methods):
            raise ValueError(f"--config does not apply to --method {args.method}")
        record = {"chosen": {"method": args.method, "options": options}, "config": args.config}
    chosen = methods.get(args.method)
    if chosen is not None and not (lossy or chosen.lossless):
        raise ValueError(f"--method {args.method} is lossy by design: its output is not the target's")
    needs_draft = chosen is not None and chosen.needs_draft_params
    if needs_draft != (args.draft is not None):
        raise ValueError(f"--method {args.method} {'needs' if needs_draft else 'takes no'} --draft MODEL")
    method = method_of(record, ANY_DRAFT_MODEL)
    if args.tuned is not None:
        case = f"batch {record.get('batch', '?')} and {record.get('context', '?')} tokens of context"
        print(f"jaxspec: {args.tuned} chose {describe(record['chosen'])}, at {case}", file=sys.stderr)
    return method


def load_draft(
    args: argparse.Namespace, method: Method, target: Loaded, dtype: str | None
) -> tuple[Method, Params | None]:
    """The method of `method_from_flags` with its draft model, and that model's parameters, where it has one.

    Raises:
        ValueError: the draft model has another vocabulary, or lacks heads that the method names.
    """
    if not method.needs_draft_params:
        return method, None
    draft = load(args.draft, dtype=dtype)
    check_vocabularies(target, draft)
    return dataclasses.replace(method, model=draft.model), draft.params


def _configured(methods: dict[str, type[Method]]) -> set[str]:
    return {name for name, method in methods.items() if issubclass(method, SparseVerification)}


def option_values(method: Method) -> dict[str, Any]:
    """The values of a method's options, for records."""
    values = {name: getattr(method, name) for name in options_of(type(method))}
    return {name: dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v for name, v in values.items()}


def _options(methods: dict[str, type[Method]]) -> dict[str, dict[str, dataclasses.Field]]:
    """Flag -> method name -> field."""
    options: dict[str, dict[str, dataclasses.Field]] = {}
    for name, method in sorted(methods.items()):
        for option, field in options_of(method).items():
            options.setdefault("--" + option.replace("_", "-"), {})[name] = field
    return options


def _defaults(users: dict[str, dataclasses.Field]) -> str:
    by_default: dict[Any, list[str]] = {}
    for name, field in users.items():
        by_default.setdefault(field.default, []).append(name)
    by_default = {"none" if default in ("", ()) else default: names for default, names in by_default.items()}
    return "default: " + "; ".join(f"{default} with {', '.join(names)}" for default, names in by_default.items())


def check_vocabularies(target: Loaded, draft: Loaded) -> None:
    """Raises ValueError unless the tokenizers give the same ids to the tokens that both have."""
    if target.tokenizer is None or draft.tokenizer is None:
        raise ValueError("--draft: both models need a tokenizer, so that their vocabularies can be compared")
    small, large = sorted((target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()), key=len)
    different = [token for token, number in small.items() if large.get(token) != number]
    if different:
        raise ValueError(f"--draft: the vocabularies differ in {len(different)} tokens, such as {different[0]!r}")
