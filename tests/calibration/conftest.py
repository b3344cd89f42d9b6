import pytest
from calibration_cases import planted_model, random_pair


@pytest.fixture(scope="session")
def planted():
    return planted_model()


@pytest.fixture(scope="session")
def pair():
    return random_pair()
