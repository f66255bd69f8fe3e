"""Retry policy, choice of endpoint and classification of failures: pure functions, with a clock that the test sets."""

import asyncio
import logging
from collections import Counter
from email.utils import formatdate
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolroll._internal.retry_after import parse_retry_after
from toolroll.http.endpoints import (
    ENDPOINT_COOLDOWN_S,
    MAX_COOLDOWN_S,
    Endpoint,
    affinity_endpoint,
    choose_endpoint,
    connections_per_endpoint,
)
from toolroll.http.failures import (
    AttemptFailed,
    error_detail,
    failure_from_exception,
    failure_from_status,
)
from toolroll.http.request import BACKOFF_LIMIT_S, AttemptHistory, RetryPolicy

DOWN = AttemptFailed("can't be reached", retryable=True, endpoint_down=True)
BUSY = AttemptFailed("HTTP 429: full", retryable=True)
BROKEN = AttemptFailed("connection lost", retryable=True, processed=True)
FAILURES = st.builds(
    AttemptFailed,
    reason=st.just("failed"),
    retryable=st.sampled_from([True, True, True, False]),
    endpoint_down=st.booleans(),
    processed=st.booleans(),
    retry_after_s=st.none() | st.floats(0, 100),
)


def endpoints_at(*urls: str) -> list[Endpoint]:
    return [Endpoint(url, asyncio.Semaphore(1)) for url in urls]


def run_request(
    policy: RetryPolicy, failures: list[AttemptFailed], jitter: float
) -> tuple[AttemptHistory, list[float]]:
    """Fail every attempt, each taking one second. Return the history and the start times of the attempts."""
    history, now, starts = AttemptHistory(), 0.0, []
    for failure in failures:
        starts.append(now)
        history.by_url["http://a"] += 1
        now += 1.0
        history.record(failure, now)
        delay = policy.next_delay(history, now, jitter=jitter)
        if delay is None:
            break
        now += delay
    return history, starts


# Retry policy


@given(
    failures=st.lists(FAILURES, min_size=1, max_size=40),
    jitter=st.floats(0, 1),
    deadline=st.floats(0.1, 200),
    start_by=st.none() | st.floats(0.1, 200),
    max_attempts=st.integers(1, 20),
    max_processed=st.integers(1, 5),
)
def test_limits_are_never_exceeded(
    failures: list[AttemptFailed],
    jitter: float,
    deadline: float,
    start_by: float | None,
    max_attempts: int,
    max_processed: int,
) -> None:
    policy = RetryPolicy(
        deadline=deadline, start_by=start_by, max_attempts=max_attempts, max_processed_attempts=max_processed
    )
    history, starts = run_request(policy, failures, jitter)
    assert history.attempts == len(starts) <= max_attempts
    assert history.processed <= max_processed
    assert all(start < min(deadline, inf if start_by is None else start_by) for start in starts[1:])
    for failure, ended, restarted in zip(failures, starts, starts[1:], strict=False):
        assert failure.retryable
        assert restarted - (ended + 1.0) >= (failure.retry_after_s or 0.0) - 1e-9


@given(attempts=st.integers(1, 99), jitter=st.floats(0, 1))
def test_backoff_is_bounded_and_jittered(attempts: int, jitter: float) -> None:
    history = AttemptHistory(by_url=Counter({"http://a": attempts}))
    history.record(BUSY, 0.0)
    delay = RetryPolicy(deadline=1000.0).next_delay(history, 0.0, jitter=jitter)
    assert delay == pytest.approx(jitter * min(BACKOFF_LIMIT_S, 0.1 * 2 ** (attempts - 1)))


def test_outage_longer_than_allowed_ends_request() -> None:
    policy, history = RetryPolicy(deadline=1000.0, max_outage_s=30.0), AttemptHistory(by_url=Counter(a=1))
    history.record(DOWN, 10.0)
    history.record(DOWN, 40.0)
    assert policy.next_delay(history, 40.0, jitter=0.0) == 0.0
    assert policy.next_delay(history, 40.1, jitter=0.0) is None
    history.record(BUSY, 41.0)
    history.record(DOWN, 42.0)
    assert policy.next_delay(history, 42.0, jitter=0.0) == 0.0, "an answer ends the outage"


def test_retry_after_does_not_apply_to_another_endpoint() -> None:
    failure, history = failure_from_status(429, "60", b""), AttemptHistory(by_url=Counter(a=1))
    history.record(failure, 0.0, can_move=True)
    assert RetryPolicy(deadline=5.0).next_delay(history, 0.0, jitter=0.5) == pytest.approx(0.05)
    history.record(failure, 0.0, can_move=False)
    assert RetryPolicy(deadline=5.0).next_delay(history, 0.0, jitter=0.5) is None
    assert RetryPolicy(deadline=500.0).next_delay(history, 0.0, jitter=0.5) == pytest.approx(60.05)


# Endpoints


@given(names=st.lists(st.text(max_size=8), min_size=1, max_size=30), count=st.integers(1, 8))
def test_new_endpoint_moves_only_its_own_requests(names: list[str], count: int) -> None:
    all_endpoints = endpoints_at(*(f"http://10.0.0.{number}" for number in range(count + 1)))
    for name in names:
        before = choose_endpoint(all_endpoints[:-1], name, {}, 0.0)
        after = choose_endpoint(all_endpoints, name, {}, 0.0)
        assert after in (before, all_endpoints[-1])
        assert after is affinity_endpoint(list(reversed(all_endpoints)), name), "in any order"


def test_affinities_are_spread_evenly() -> None:
    endpoints = endpoints_at(*(f"http://10.0.0.{number}" for number in range(4)))
    counts = Counter(affinity_endpoint(endpoints, f"trajectory-{number}").url for number in range(1000))
    assert all(180 < counts[endpoint.url] < 320 for endpoint in endpoints)


def test_least_loaded_endpoint_that_is_up_and_untried() -> None:
    busy, idle, down = endpoints = endpoints_at("http://a", "http://b", "http://c")
    busy.outstanding = 1
    down.record_failure(DOWN, 0.0)
    assert choose_endpoint(endpoints, None, {}, 1.0) is idle
    assert choose_endpoint(endpoints, None, {"http://b": 1}, 1.0) is busy
    assert choose_endpoint(endpoints, None, {"http://a": 1, "http://b": 1}, 5.0) is down, "its cool-down is over"
    idle.record_failure(DOWN, 1.0)
    busy.record_failure(DOWN, 1.0)
    assert choose_endpoint(endpoints, None, {}, 1.5) is down, "the first that will be available"


def test_equal_endpoints_are_chosen_at_random() -> None:
    endpoints = endpoints_at("http://a", "http://b")
    assert {choose_endpoint(endpoints, None, {}, 0.0).url for _ in range(50)} == {"http://a", "http://b"}


def test_affinity_moves_while_its_endpoint_is_down() -> None:
    endpoints = endpoints_at("http://a", "http://b")
    home = affinity_endpoint(endpoints, "t7")
    home.record_failure(DOWN, 0.0)
    assert choose_endpoint(endpoints, "t7", {}, 1.0) is not home
    assert choose_endpoint(endpoints, "t7", {}, ENDPOINT_COOLDOWN_S) is home


def test_cooldown_doubles_with_each_outage() -> None:
    [endpoint] = endpoints_at("http://a")
    now, pauses = 0.0, []
    for _ in range(6):
        endpoint.record_failure(DOWN, now)
        endpoint.record_failure(DOWN, now)  # concurrent: the same outage
        pauses.append(endpoint.cooldown_until - now)
        now = endpoint.cooldown_until
    assert pauses == [2.0, 4.0, 8.0, 16.0, MAX_COOLDOWN_S, MAX_COOLDOWN_S]


def test_retry_after_starts_cooldown_of_limited_length() -> None:
    [endpoint] = endpoints_at("http://a")
    endpoint.record_failure(failure_from_status(429, "3", b""), 0.0)
    assert (endpoint.cooldown_until, endpoint.outages) == (3.0, 0)
    endpoint.record_failure(DOWN, 2.0)
    assert (endpoint.cooldown_until, endpoint.outages) == (4.0, 1)
    endpoint.record_failure(failure_from_status(503, "inf", b""), 5.0)
    assert endpoint.cooldown_until == 5.0 + MAX_COOLDOWN_S


def test_connections_are_limited_by_open_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))
    with caplog.at_level(logging.INFO):
        assert connections_per_endpoint(4, 1024) == 192
        assert connections_per_endpoint(1, 100) == 100
    assert "ulimit -n" in caplog.text


# Failures


@pytest.mark.parametrize(
    ("header", "delay"),
    [
        ("0.4", 0.4),
        ("-5", 0.0),
        ("inf", inf),
        ("9" * 400, inf),
        (formatdate(1000.0, usegmt=True), 100.0),
        (formatdate(100.0, usegmt=True), 0.0),
        *((invalid, None) for invalid in (None, "", "soon", "nan", "Wed, 99 Foo 2026 99:99:99 GMT")),
    ],
)
def test_retry_after_header(header: str | None, delay: float | None) -> None:
    assert parse_retry_after(header, 900.0) == delay


@given(st.text())
def test_retry_after_header_never_raises(header: str) -> None:
    delay = parse_retry_after(header, 0.0)
    assert delay is None or delay >= 0


@pytest.mark.parametrize(
    ("status", "retryable", "down"),
    [
        (429, True, False),
        (502, True, True),
        (503, True, True),
        (504, True, True),
        (500, False, False),
        (302, False, False),
    ],
)
def test_status_decides_about_retry(status: int, retryable: bool, down: bool) -> None:
    failure = failure_from_status(status, "7", b"out of order.")
    assert str(failure) == f"HTTP {status}: out of order"
    assert (failure.retryable, failure.endpoint_down, failure.processed) == (retryable, down, False)
    assert failure.retry_after_s == (7.0 if retryable else None)


@pytest.mark.parametrize(
    ("content", "detail"),
    [
        (b'{"error": {"message": "too long."}}', "too long"),
        (b'{"error": "unknown field"}', "unknown field"),
        (b'{"detail": "full"}', "full"),
        (b'{"message": "no such file"}', "no such file"),
        (b'{"detail": [{"loc": ["body", "language"], "msg": "Input should be"}]}', "language: Input should be"),
        (b'{"detail": {"odd": 1}}', '{"detail": {"odd": 1}}'),
        (b"[1]", "[1]"),
        (b"<html>\xff", "<html>�"),
        (b"", ""),
    ],
)
def test_error_detail(content: bytes, detail: str) -> None:
    assert error_detail(content) == detail


@given(st.binary(max_size=2000) | st.recursive(st.text(), st.lists).map(lambda value: repr(value).encode()))
def test_error_detail_is_short_for_any_content(content: bytes) -> None:
    assert len(error_detail(content)) <= 500


def test_parse_errors_are_not_retried() -> None:
    errors: list[Any] = [ValueError("x"), KeyError("x"), TypeError("x"), AttributeError("x")]
    for error in errors:
        failure = failure_from_exception(error)
        assert failure.reason.startswith(f"invalid response: {type(error).__name__}: ")
        assert not failure.retryable
    assert failure_from_exception(BROKEN) is BROKEN
    assert failure_from_exception(OSError("x")).processed
