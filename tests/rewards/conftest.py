"""Fixtures of the tests of rewards."""

import pytest


@pytest.fixture(autouse=True)
def local_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use limits of this process only, even if another test has connected it to a cluster.

    Otherwise each of the many servers in these tests would start an actor in the cluster. Tests of the shared limit
    start separate processes that join a cluster.
    """
    monkeypatch.setattr("toolroll.limiter.registry.is_connected", lambda: False)
