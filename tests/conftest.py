"""What every test shares: which toolroll is under test, and how hard hypothesis looks."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import toolroll

ROOT = Path(__file__).parent.parent

# The machines are shared and noisy: a slow example is no failure.
settings.register_profile("default", deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")


def pytest_report_header() -> str:
    return f"toolroll {toolroll.__version__} from {Path(toolroll.__file__).parent}"


@pytest.fixture
def root() -> Path:
    """The checkout: examples, docs and benchmarks are used from there."""
    return ROOT
