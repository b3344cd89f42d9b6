"""Fast long-context decoding of Hugging Face checkpoints in JAX.

>>> model, params, tokenizer = jaxspec.load("path/or/hub-id")
>>> output = jaxspec.generate(model, params, prompt, prompt_length, jax.random.key(0), max_new_tokens=256)
"""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from convert.errors import ConversionError
from jaxspec.checkpoint import Loaded, load
from jaxspec.decode import generate
from jaxspec.method_specs import load_method
from jaxspec.methods import DraftModel, Dustin, KnapSpec, Method, Plain, Quest, SelfDustin, Streaming, Vegas
from jaxspec.models import Decoder, ModelConfig
from jaxspec.planning import LatencyProfile, Plan
from jaxspec.sampling import Sampling
from jaxspec.stream import Chunk, stream
from jaxspec.types import Finish, Output, Stats

__all__ = [
    "Chunk",
    "ConversionError",
    "Decoder",
    "DraftModel",
    "Dustin",
    "Finish",
    "KnapSpec",
    "LatencyProfile",
    "Loaded",
    "Method",
    "ModelConfig",
    "Output",
    "Plan",
    "Plain",
    "Quest",
    "Sampling",
    "SelfDustin",
    "Stats",
    "Streaming",
    "Vegas",
    "generate",
    "load",
    "load_method",
    "stream",
]


def _version() -> str:
    try:
        return version("jaxspec")
    except PackageNotFoundError:  # a source tree that was never installed
        import tomllib
    try:
        project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        # a copy inside another project lies beside that one's file
        return project["version"] if project["name"] == "jaxspec" else "0+unknown"
    except (OSError, ValueError, KeyError):
        return "0+unknown"


__version__ = _version()
