"""The Python snippets of README and docs run as they stand, with a tiny checkpoint in place of those that they name."""

import json
import re
from pathlib import Path

import pytest

from jaxspec.planning import LatencyProfile, Line, save_profile

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
SNIPPETS = [
    pytest.param(code, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
]


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory):
    """What the snippets read."""
    folder = tmp_path_factory.mktemp("snippets")
    (folder / "checkpoints").mkdir()
    for name in ("smollm2", "qwen", "small"):
        (folder / "checkpoints" / name).symlink_to(checkpoint.converted)
    (folder / "SmolLM2-135M-Instruct").symlink_to(checkpoint.source)
    line = Line(1e-9, 1e-5)
    save_profile(folder / "profile.json", LatencyProfile(28, 1, 11, line, 1e-5, 1e-5, line, 1e-5, 1e-5, 0.0), {})
    heads = {name: [[0, [0]]] for name in ("target_heads", "draft_heads")}
    settings = {"sinks": 4, "window": 16, "num_draft": 4}
    dustin = {"kind": "dustin", "settings": settings, "budget": 64, "splits": {"64": 20}, **heads}
    tuned = {"kind": "tuned", "chosen": {"method": "vegas", "options": {"rho": 0.1}}}
    for name, record in (("dustin", dustin), ("tuned", tuned)):
        (folder / f"{name}.json").write_text(json.dumps({"schema_version": 1, **record}))
    return folder


@pytest.mark.parametrize("code", SNIPPETS)
def test_runs(code, folder, monkeypatch):
    # the check has tests of its own, and importing PyTorch for it would take seconds
    code = code.replace(", check=True", "")
    monkeypatch.chdir(folder)
    # a dataclass looks its module up
    exec(compile(code, "snippet", "exec"), {"__name__": __name__})
