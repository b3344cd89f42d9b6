"""`python -m convert`."""

from convert.cli import entry

entry()
