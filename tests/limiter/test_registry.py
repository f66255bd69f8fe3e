"""The limiters of a process, and what they log."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from toolroll import ResourceLimits, get_limiter
from toolroll.limiter import token_bucket
from toolroll.limiter.cluster import ClusterLimiter
from toolroll.limiter.ledger.lease import Lease
from toolroll.limiter.ledger.policy import LimitPolicy
from toolroll.limiter.registry import remove_limiter

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_LIMITS = ResourceLimits().policy()


@pytest.fixture
def apply_policy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that makes a limiter with a policy, and applies a lease of a cluster with another one."""
    monkeypatch.setattr(ClusterLimiter, "_is_connected", lambda _: False)
    made: list[ClusterLimiter] = []

    def apply(requested: LimitPolicy, of_cluster: LimitPolicy) -> None:
        made.append(limiter := ClusterLimiter("judge", requested))
        assert limiter._apply_lease(Lease(limiter._queue.report().seq, 1, 10.0, policy=of_cluster))

    yield apply
    for limiter in made:
        limiter.close()


def test_limiter_without_limits_logs_no_difference(apply_policy: Any, caplog: pytest.LogCaptureFixture) -> None:
    apply_policy(NO_LIMITS, LimitPolicy.fixed(3))
    assert caplog.text == ""


def test_warning_has_a_command_with_the_exact_limits(apply_policy: Any, caplog: pytest.LogCaptureFixture) -> None:
    limits = ResourceLimits(limit=4, rpm=700, budget={"usd": 20, "tokens": 123_456_789})
    apply_policy(limits.policy(), LimitPolicy.fixed(3))
    assert "limit=4, 700 requests per minute, budget of 20 usd, budget of 123456789 tokens ignored" in caplog.text
    command = "judge' 4 --rate requests=11.666666666666666 --budget usd=20 --budget tokens=123456789"
    assert f"toolroll limiter set '{command}" in caplog.text
    assert float("11.666666666666666") == limits.policy().rates["requests"]


@pytest.mark.parametrize(
    ("requested", "current", "options"),
    [
        (LimitPolicy.fixed(64), LimitPolicy(4, 256), "64 --min 64"),
        (LimitPolicy(4, 256), LimitPolicy.fixed(64), "256 --min 4"),
        (LimitPolicy.fixed(4)._replace(rates={"tokens": 10.0}), LimitPolicy.fixed(4), "--rate tokens=10"),
        (LimitPolicy.fixed(64), LimitPolicy.fixed(32), "64"),
    ],
)
def test_command_of_the_warning_sets_the_limits(requested: LimitPolicy, current: LimitPolicy, options: str) -> None:
    assert requested.command_to_replace(current, "judge") == f"toolroll limiter set 'judge' {options}"
    limit, minimum, rate = re.fullmatch(r"(\d+)?(?: --min (\d+))?(?:--rate tokens=(\d+))?", options).groups()  # type: ignore[union-attr]
    rates = {"tokens": float(rate)} if rate else {}
    assert current.changed(limit and int(limit), minimum and int(minimum), rates, {}) == requested


def test_limits_that_cannot_be_set_are_removed() -> None:
    current = LimitPolicy.fixed(4)._replace(rates={"tokens": 100.0})
    assert LimitPolicy.fixed(4).command_to_replace(current, "judge") == "toolroll limiter remove 'judge'"


def test_naming_a_resource_logs_no_difference(caplog: pytest.LogCaptureFixture) -> None:
    resource = f"resource-{uuid4().hex}"
    limiter = get_limiter(resource, 2)
    assert get_limiter(resource, ResourceLimits(resource=resource)) is limiter
    assert caplog.text == ""


def test_interrupted_removal_restores_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    statuses = iter([SimpleNamespace(max=7, holders=0, reserved=0, learning=False)] * 2)

    def status(resource: str) -> Any:
        if (found := next(statuses, None)) is None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(token_bucket, "limiter_status", status)
    monkeypatch.setattr(token_bucket, "set_limit", lambda resource, limit: limits.append(limit))
    with pytest.raises(KeyboardInterrupt):
        remove_limiter("judge")
    assert limits == [0, 7]


def test_limits_of_another_cluster_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = iter(["one", "one", "two"])
    created: list[SimpleNamespace] = []

    def create(resource: str, connected: bool, *_: object) -> SimpleNamespace:
        created.append(limiter := SimpleNamespace(is_closed=False))
        limiter.close = lambda: setattr(limiter, "is_closed", True)
        return limiter

    monkeypatch.setattr("toolroll.limiter.registry._limiters", {})
    monkeypatch.setattr("toolroll.limiter.registry.cluster_id", lambda: next(clusters))
    monkeypatch.setattr("toolroll.limiter.registry._create_limiter", create)
    found: list[Any] = [get_limiter("judge", limit) for limit in (3, 3, 5)]
    assert found == [created[0], created[0], created[1]]
    assert [limiter.is_closed for limiter in created] == [True, False]
