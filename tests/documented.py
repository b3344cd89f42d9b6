"""What the documentation says of JSON files."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "measuring.md"


def documented(command: str, table: int = 0) -> set[str]:
    """The fields of a table in the section of a command's file, `schema_version` among those of the first."""
    section = PAGE.read_text(encoding="utf-8").partition("## JSON files")[2].partition(f"### jaxspec {command}\n")[2]
    tables = re.findall(r"\| field \| \|\n\|---\|---\|\n((?:\|.*\n)+)", section.partition("\n### ")[0])
    first_cells = "".join(line.split("|")[1] for line in tables[table].splitlines())
    return {*re.findall(r"`(\w+)`", first_cells), *(() if table else ["schema_version"])}
