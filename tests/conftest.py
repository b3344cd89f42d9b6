"""Quick compiles, markers that need something the machine may lack, and the switch for the full product of kernel
shapes."""

import gc
import importlib.util
import os
from importlib.metadata import version
from pathlib import Path

import pytest

# The suite compiles thousands of small programs and hardly runs them, so on a CPU it asks XLA for quick compiles: no
# optimisation, and its plain emitters in place of the MLIR ones, which together take a fifth of the time. Whoever sets
# XLA_FLAGS, also to nothing, gets XLA's defaults.
QUICK_FLAGS = "--xla_cpu_use_fusion_emitters=false"
# the workers of pytest-xdist inherit what was set here
QUICK = os.environ.get("XLA_FLAGS", QUICK_FLAGS) == QUICK_FLAGS


# XLA ends the process at a flag that it does not know, and this one left with JAX 0.11
if QUICK and version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] = QUICK_FLAGS

import jax  # noqa: E402  it reads the flags

MAPS_KEPT = 20_000


def pytest_addoption(parser):
    parser.addoption("--kernels", action="store_true", help="run the full product of kernel shapes")


def pytest_configure(config):
    # before test modules are imported: some make their models there
    jax.config.update("jax_disable_most_optimizations", QUICK and jax.default_backend() == "cpu")


@pytest.fixture(autouse=True, scope="module")
def optimised_for_gpus(request):
    """Where what XLA makes of a program for a GPU is what is looked at."""
    before = jax.config.values["jax_disable_most_optimizations"]
    if request.node.get_closest_marker("gpu_compile"):
        jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """A program takes hundreds of memory maps, and at Linux's limit of 65,530 a process dies: programs of earlier
    modules go before that."""
    yield
    maps = Path("/proc/self/maps")
    if maps.is_file() and maps.read_bytes().count(b"\n") > MAPS_KEPT:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def default_environment():
    """The environment for a process that compiles as a user's does."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS" or not QUICK}


def _weights_missing() -> bool:
    root = os.environ.get("JAXSPEC_WEIGHTS")
    return root is None or not (Path(root) / "smollm2.gguf").is_file()


def pytest_collection_modifyitems(config, items):
    all_shapes = config.getoption("--kernels") or os.environ.get("JAXSPEC_ALL_KERNEL_SHAPES") == "1"
    conditions = {
        "gpu": (lambda: jax.default_backend() != "gpu", "needs an NVIDIA GPU"),
        "gpu_compile": (
            lambda: importlib.util.find_spec("jax_cuda13_plugin") is None,
            "needs the extra gpu-compile: the CUDA plugin in jax's own version",
        ),
        "weights": (_weights_missing, "needs smollm2.gguf in the directory $JAXSPEC_WEIGHTS"),
        "kernels": (lambda: not all_shapes, "needs --kernels or JAXSPEC_ALL_KERNEL_SHAPES=1"),
    }
    for name, (missing, reason) in conditions.items():
        # not `item.keywords`: the names of folders are among those
        marked = [item for item in items if item.get_closest_marker(name)]
        if marked and missing():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))
