"""The `jaxspec` command."""

import argparse
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from convert.program import INTERRUPTED
from jaxspec import __version__
from jaxspec.cli import bench, calibrate, generate, profile, tune, verify
from jaxspec.methods import find_methods
from jaxspec.planning import ProfileWarning


class _Parser(argparse.ArgumentParser):
    """Errors are one line, like all others of the command; `--help` shows the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown flags itself: argparse leaves them to the outermost parser, which names no subcommand."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def show_help(self, _: argparse.Namespace) -> int:
        """What a command does that lacks its subcommand."""
        self.print_help(sys.stderr)
        return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 0, 1 when a check failed, 2 for wrong input, 130 when
    interrupted."""
    # transformers advises everybody without PyTorch to install it; only its tokenizers are used here
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    parser = _Parser(prog="jaxspec", description="Fast long-context decoding in JAX.")
    parser.add_argument("--version", action="version", version=f"jaxspec {__version__}")
    parser.set_defaults(run=parser.show_help)
    commands = parser.add_subparsers(metavar="COMMAND")
    generate.add_command(commands)
    verify.add_command(commands)
    calibrate.add_command(commands)
    profile.add_command(commands)
    bench.add_command(commands)
    tune.add_command(commands)
    args = parser.parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(_show_warning, args, warnings.showwarning)
            return args.run(args)
    except KeyboardInterrupt:
        print("jaxspec: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the reader of our output has left; what is still buffered must not be written when Python exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, OSError) as error:
        print(f"jaxspec: {in_flags(_one_line(error), args)}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        advice = "use a shorter context, fewer rows or fewer new tokens"
        print(f"jaxspec: out of memory; {advice} ({_one_line(error)})", file=sys.stderr)
        return 2


def in_flags(message: str, args: argparse.Namespace) -> str:
    """A message of the library in the command's words: what it says of arguments, it says of flags.

    Args:
        message: such as 'sampling top_k must be ...' or 'Vegas rho must be ...'. Others stay as they are: what they
            name may be an option in a text or in a file.
        args: the command's; its `words`, where it has some, are what it calls other arguments.
    """
    found = re.match(r"(?:(\w+) )?(\w+(?: (?:\+|and) \w+)*)(?= (?:must|is) )", message)
    if found is None:
        return message
    owner, subject = found.groups()
    # options that --tuned or --selection brought are nobody's flags
    method = find_methods().get(getattr(args, "method", None))
    given = method is not None and getattr(args, "tuned", None) is None and owner == method.__name__
    flags = {name: "--" + name.replace("_", "-") for name in vars(args)} | getattr(args, "words", {})
    named = re.findall(r"\w+", subject.replace(" and ", " "))
    if not (owner in (None, "sampling") or given) or not all(name in flags for name in named):
        return message
    return re.sub(r"\w+", lambda name: flags.get(name[0], name[0]), subject) + message[found.end() :]


def _show_warning(
    args: argparse.Namespace, show: Callable[..., None], message: Any, category: type[Warning], *where: Any
) -> None:
    """Warnings of the library are one line, like all that the command says; others stay as they are."""
    if issubclass(category, ProfileWarning):
        print(f"jaxspec: warning: {in_flags(str(message), args)}", file=sys.stderr)
    else:
        show(message, category, *where)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot access {error.filename}: {error.strerror}"
    return " ".join(str(error).split())[:500] or type(error).__name__
