"""Figures of the service, compared with their definitions."""

from math import inf, isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .service_figures import (
    RateStep,
    ServiceRequest,
    allowed,
    arrived,
    max_in_window,
    max_rate_ratio,
    mean_concurrent,
    one_request,
    oscillation,
    refused_fraction,
    settled_after,
    throughput,
    throughput_per_bucket,
    tokens,
    utilisation,
)

WINDOW_S = 10.0
quarters = st.integers(-80, 240).map(lambda number: number / 4)


def request(
    arrival: float, size: float = 1.0, *, accepted: bool = True, duration: float | None = 0.1
) -> ServiceRequest:
    return ServiceRequest(arrival, "client", size, accepted, None if duration is None else arrival + duration)


requests_lists = st.lists(st.builds(request, quarters, st.integers(1, 50)), max_size=40)


@st.composite
def rate_steps(draw: st.DrawFn) -> list[RateStep]:
    times = sorted(draw(st.sets(quarters, min_size=1, max_size=4)))
    return [RateStep(since, draw(st.integers(1, 20))) for since in times]


def test_throughput_counts_accepted_requests_by_end() -> None:
    requests = [request(0.95), request(1.0, duration=None), request(1.2, accepted=False), request(1.5), request(2.9)]
    assert throughput(requests, 1.0, 2.75) == 2 / 1.75
    assert throughput(requests, 1.0, 3.5) == 3 / 2.5


def test_throughput_per_bucket_ignores_incomplete_bucket() -> None:
    requests = [request(number / 8, duration=1 / 16) for number in range(40)]
    assert throughput_per_bucket(requests, 1.0, 3.5) == [8.0, 8.0]
    assert len(throughput_per_bucket(requests, 1_700_000_000.1, 1_700_000_003.1)) == 3


def test_refused_fraction() -> None:
    assert refused_fraction([]) == 0.0
    assert refused_fraction([request(0, accepted=False), request(1), request(2), request(3)]) == 0.25


def test_arrived_excludes_end() -> None:
    assert [one.arrival for one in arrived(map(request, (0.0, 1.0, 2.0)), 1.0, 2.0)] == [1.0]


def test_oscillation() -> None:
    assert oscillation([100, 100, 75, 125]) == 0.25
    assert oscillation([5.0]) == 0.0
    assert oscillation([0.0, 0.0]) == inf


@given(st.lists(st.floats(1, 100), min_size=1, max_size=20), st.floats(0.01, 100))
def test_oscillation_does_not_depend_on_scale(values: list[float], factor: float) -> None:
    assert isclose(oscillation(values), oscillation([factor * value for value in values]), abs_tol=1e-9)


@given(st.lists(st.integers(0, 5), max_size=20), st.integers(0, 5))
def test_settled_after_matches_definition(values: list[float], minimum: int) -> None:
    number = settled_after(values, minimum)
    assert all(value >= minimum for value in values[number:])
    assert number == 0 or values[number - 1] < minimum


def test_max_in_window_of_bursts() -> None:
    requests = [request(moment, size) for moment, size in ((0, 1), (0, 2), (4, 3), (10, 4), (10.5, 5), (30, 9))]
    assert max_in_window(requests, WINDOW_S) == 4
    assert max_in_window(requests, WINDOW_S, tokens) == 12
    assert max_in_window([], WINDOW_S) == 0


@given(requests_lists, st.integers(1, 20))
def test_max_in_window_matches_definition(requests: list[ServiceRequest], window: int) -> None:
    counts = [sum(one.arrival <= other.arrival <= one.arrival + window for other in requests) for one in requests]
    assert max_in_window(requests, window) == max(counts, default=0)


def test_regular_requests_reach_the_rate_and_one_more() -> None:
    requests = [request(1_700_000_000 + number / 20) for number in range(1000)]
    assert max_rate_ratio(requests, [RateStep(-inf, 20)], WINDOW_S) == pytest.approx(201 / 200, abs=1 / 199)


def test_rate_change_allows_the_sum_of_both_rates() -> None:
    steps = [RateStep(0, 10), RateStep(5, 2)]
    requests = [request(number / 10) for number in range(1, 50)] + [request(5 + number / 2) for number in range(30)]
    assert allowed(steps, 0, 10) == 60
    assert max_rate_ratio(requests, steps, WINDOW_S) == pytest.approx(21 / 20)
    assert max_rate_ratio([*requests, *map(request, [7.1] * 40)], steps, WINDOW_S) > 1.5


@given(requests_lists, rate_steps())
def test_max_rate_ratio_matches_definition(requests: list[ServiceRequest], steps: list[RateStep]) -> None:
    """All times are multiples of 1/4, so that the windows between which the ratio is monotonic start at these."""
    begins = [number / 4 for number in range(-130, 250)]
    ratios = [
        sum(one.tokens for one in requests if begin <= one.arrival <= begin + WINDOW_S)
        / allowed(steps, begin, begin + WINDOW_S)
        for begin in begins
    ]
    assert isclose(max_rate_ratio(requests, steps, WINDOW_S, tokens), max(ratios))


@given(rate_steps(), quarters, st.integers(1, 80), st.integers(1, 80))
def test_allowed_amount_is_additive(steps: list[RateStep], begin: float, first: int, second: int) -> None:
    middle, end = begin + first / 4, begin + (first + second) / 4
    assert isclose(allowed(steps, begin, middle) + allowed(steps, middle, end), allowed(steps, begin, end))


def test_utilisation() -> None:
    requests = [request(number / 2, 10) for number in range(10)]
    assert utilisation(requests, 4, 0, 5, one_request) == 0.5
    assert utilisation(requests, 20, 0, 5, tokens) == 1.0


@given(requests_lists)
def test_mean_concurrent_is_total_time_per_second(requests: list[ServiceRequest]) -> None:
    assert isclose(mean_concurrent(requests, -100, 100), len(requests) * 0.1 / 200, abs_tol=1e-9)


def test_mean_concurrent_of_running_and_refused_requests() -> None:
    requests = [request(0, duration=None), request(0, accepted=False, duration=9), request(-5, duration=7)]
    assert mean_concurrent(requests, 0, 10) == pytest.approx(1.2)
