"""Ctrl-C ends the program at once: threads that still compile must not outlive Python's own end."""

import signal
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("code", "late"), [(130, ""), (0, "late\n"), (2, "late\n")])
def test_an_interrupted_program_does_not_take_python_down(code, late):
    script = (
        "import atexit, convert.program, jaxspec.cli as cli\n"
        f"cli.main = lambda: {code}\n"
        "atexit.register(print, 'late')\n"
        "print('shown')\n"
        "convert.program.jaxspec()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (code, "shown\n" + late)


PROGRAM = """
import gc, os, signal, time
from convert.program import run_program

# a shell that starts the tests in the background has it ignored
signal.signal(signal.SIGINT, signal.default_int_handler)


def press():
    os.kill(os.getpid(), signal.SIGINT)


def collected(*_):
    gc.callbacks.remove(collected)
    press()


def main():
    try:
        {body}
    except KeyboardInterrupt:
        {interrupted}
        return 130
    return 0


run_program(main)
"""


def run(body, interrupted):
    script = PROGRAM.format(body=body, interrupted=interrupted)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)


def test_an_interrupt_in_a_callback_of_the_garbage_collector_is_not_lost():
    done = run("gc.callbacks.append(collected); gc.collect(); time.sleep(60)", "print('interrupted')")
    assert (done.returncode, done.stdout, done.stderr) == (130, "interrupted\n", "")


def test_a_second_interrupt_kills():
    done = run("press(); time.sleep(60)", "press(); time.sleep(60)")
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_other_errors_in_callbacks_are_shown():
    done = run("gc.callbacks.append(lambda *_: 1 / 0); gc.collect(); gc.callbacks.pop()", "pass")
    assert done.returncode == 0
    assert "ZeroDivisionError" in done.stderr


def test_an_interrupted_load_is_no_damaged_checkpoint(checkpoint):
    """Orbax turns whatever arrives in its event loop into errors of its own."""
    script = (
        "import os, signal, sys, time\n"
        "import orbax.checkpoint as ocp\n"
        "from convert.program import jaxspec\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def restore(*_, **__):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(5)\n"
        "    except BaseException as error:\n"
        "        raise ValueError('cannot read') from error\n"
        "ocp.Checkpointer.restore = restore\n"
        "jaxspec()\n"
    )
    command = [sys.executable, "-c", script, "generate", "--model", checkpoint.converted, "--prompt", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 130
    assert done.stderr.endswith("jaxspec: interrupted\n")


def test_an_interrupt_while_the_command_is_imported():
    script = """
import os, signal, sys
from convert.program import jaxspec


class Interrupting:
    def find_spec(self, name, *_):
        if name == "jaxspec.cli":
            os.kill(os.getpid(), signal.SIGINT)


sys.meta_path.insert(0, Interrupting())
signal.signal(signal.SIGINT, signal.default_int_handler)
jaxspec()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "jaxspec: interrupted\n")
