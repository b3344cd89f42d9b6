import jax
import pytest


# per module: a folder without __init__.py is no package to pytest, and the setting would outlast it
@pytest.fixture(autouse=True, scope="module")
def quick_compiles():
    # these tests compile small programs and hardly run them
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
