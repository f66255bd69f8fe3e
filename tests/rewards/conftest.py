"""What the tests of scores share."""

import pytest


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has limits of its own, though another test has connected it to a cluster.

    Else each of the many servers here would have an actor of its own there. What holds for a cluster is tested with
    processes that join one.
    """
    monkeypatch.setattr("toolroll.limiter.limiter._is_connected", lambda: False)
