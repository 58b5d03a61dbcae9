"""Shared by all tests; its place makes tests/reference.py importable."""

import sys

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("gossamer", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gossamer")


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors on shared cores: torch's threads would only wait for each other."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
