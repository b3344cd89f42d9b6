"""Fast long-context decoding of Hugging Face checkpoints in JAX.

model, params, tokenizer = jaxspec.load("path/or/hub-id")
output = jaxspec.generate(model, params, prompt, prompt_length, jax.random.key(0), max_new_tokens=256)
"""

from importlib.metadata import PackageNotFoundError, version

from jaxspec.checkpoint import load
from jaxspec.decode import generate
from jaxspec.methods import Method, Plain
from jaxspec.models import Decoder, ModelConfig
from jaxspec.sampling import Sampling
from jaxspec.stream import Chunk, stream
from jaxspec.types import Finish, Output, Stats

__all__ = [
    "Chunk",
    "Decoder",
    "Finish",
    "Method",
    "ModelConfig",
    "Output",
    "Plain",
    "Sampling",
    "Stats",
    "generate",
    "load",
    "stream",
]

try:
    __version__ = version("jaxspec")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
