"""Markers that need something the machine may lack, and the switch for the full product of kernel shapes."""

import importlib.util
import os
from pathlib import Path

import jax
import pytest


def pytest_addoption(parser):
    parser.addoption("--kernels", action="store_true", help="run the full product of kernel shapes")


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
