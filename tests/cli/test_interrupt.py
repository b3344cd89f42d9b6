"""Ctrl-C ends the program at once: threads that still compile must not outlive Python's own end."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("code", "late"), [(130, ""), (0, "late\n"), (2, "late\n")])
def test_an_interrupted_program_does_not_take_python_down(code, late):
    script = (
        "import atexit, jaxspec.cli as cli\n"
        f"cli.main = lambda: {code}\n"
        "atexit.register(print, 'late')\n"
        "print('shown')\n"
        "cli.entry()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (code, "shown\n" + late)
