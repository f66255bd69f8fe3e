"""Fixtures for the tests of tools."""

import pytest


@pytest.fixture(autouse=True)
def process_local_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use limits of this process even if another test has connected it to a Ray cluster.

    Otherwise each of the many servers would get its own actor. Cluster-wide limits are tested with separate processes.
    """
    monkeypatch.setattr("toolroll.limiter.registry.is_connected", lambda: False)
