"""What `import jaxspec` costs."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "orbax", "matplotlib", "tokenizers", "safetensors", "gguf", "huggingface_hub")


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_heavy_packages_are_imported_where_they_are_used():
    for module in ("jaxspec.cli", "convert"):
        loaded = python(f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})").split()
        assert not set(loaded) & set(HEAVY), (module, set(loaded) & set(HEAVY))


def test_import_takes_little_more_than_jax():
    """At most 0.3 s of processor time: wall time would measure what else the machine does. The best of several runs,
    in turns, because other work can only add."""

    def seconds(module):
        return float(python(f"import time, {module}; print(time.process_time())"))

    jax, jaxspec = zip(*[(seconds("jax"), seconds("jaxspec")) for _ in range(3)], strict=True)
    assert min(jaxspec) - min(jax) <= 0.3, (jax, jaxspec)
