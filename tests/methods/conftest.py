import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def quick_compiles():
    # these tests compile dozens of small programs and hardly run them
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
