"""The `jaxspec` command."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from convert.program import INTERRUPTED
from jaxspec import __version__
from jaxspec.cli import bench, calibrate, generate, profile, tune, verify


class _Parser(argparse.ArgumentParser):
    """Errors are one line, like all others of the command; `--help` shows the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

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
        return args.run(args)
    except KeyboardInterrupt:
        print("jaxspec: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the reader of our output has left; what is still buffered must not be written when Python exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, OSError) as error:
        print(f"jaxspec: {_one_line(error)}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        advice = "use a shorter context, fewer rows or fewer new tokens"
        print(f"jaxspec: out of memory; {advice} ({_one_line(error)})", file=sys.stderr)
        return 2


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot access {error.filename}: {error.strerror}"
    return " ".join(str(error).split())[:500] or type(error).__name__
