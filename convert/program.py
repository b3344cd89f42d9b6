"""Commands as programs of their own, which end on Ctrl-C."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

INTERRUPTED = 130


def jaxspec() -> NoReturn:
    """The `jaxspec` command. It is here because importing it takes a while, in which Ctrl-C may already arrive."""
    run_program(_jaxspec)


def _jaxspec() -> int:
    try:
        from jaxspec.cli import main
    except KeyboardInterrupt:
        print("jaxspec: interrupted", file=sys.stderr)
        return INTERRUPTED
    return main()


def run_program(main: Callable[[], int]) -> NoReturn:
    """Runs `main` and exits with the code that it returns; `INTERRUPTED` says that it was stopped by Ctrl-C.

    The first Ctrl-C raises KeyboardInterrupt, wherever it arrives; a second one kills the process at once.
    """
    # a shell that starts jobs in the background has it ignored
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        sys.unraisablehook = _raise_again
    code = main()
    if code == INTERRUPTED:
        # threads of an interrupted compilation go on, and Python would fault when it took itself down around them
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _interrupt(*_: Any) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def _raise_again(unraisable: Any) -> None:
    """JAX registers a callback of the garbage collector, and what is raised in one is lost: an interrupt is repeated
    a moment later, when the callback has ended."""
    if unraisable.exc_type is KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    else:
        sys.__unraisablehook__(unraisable)
