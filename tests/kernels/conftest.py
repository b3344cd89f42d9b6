"""`--kernels` and the environment variable are one switch, which test modules read while they are collected."""

import os


def pytest_configure(config):
    if config.getoption("--kernels"):
        os.environ["JAXSPEC_ALL_KERNEL_SHAPES"] = "1"
