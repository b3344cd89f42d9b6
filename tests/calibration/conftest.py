import jax
import pytest
from calibration_cases import planted_model, random_pair


# per module: a folder without __init__.py is no package to pytest, and the setting would outlast it
@pytest.fixture(autouse=True, scope="module")
def quick_compiles():
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def planted():
    return planted_model()


@pytest.fixture(scope="session")
def pair():
    return random_pair()
