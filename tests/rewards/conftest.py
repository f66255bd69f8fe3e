"""What the tests of scores share."""

import pytest

from toolroll import runner
from toolroll.limiter.limiter import LocalLimiter


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has limits of its own, whether or not another test has connected it to a cluster."""
    limiters: dict[str, LocalLimiter] = {}

    def get_limiter(resource: str, limit: int) -> LocalLimiter:
        return limiters.setdefault(resource, LocalLimiter(limit, resource))

    monkeypatch.setattr(runner, "get_limiter", get_limiter)
