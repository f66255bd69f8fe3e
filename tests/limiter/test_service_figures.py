"""Figures of the service, compared with their definitions."""

from math import inf, isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .service_figures import (
    RateStep,
    ServiceRequest,
    Stall,
    allowed,
    arrived,
    cycle_throughput,
    earliest_arrival,
    longest_stall,
    max_in_window,
    max_rate_ratio,
    mean_concurrent,
    median_utilisation,
    one_request,
    oscillation,
    refused_fraction,
    settled_after,
    throughput,
    throughput_per_bucket,
    throughput_vs_ideal,
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


@st.composite
def stalls_lists(draw: st.DrawFn) -> list[Stall]:
    times = sorted(draw(st.sets(quarters, max_size=8)))
    return [Stall(begin, end) for begin, end in zip(times[::2], times[1::2], strict=False)]


def test_throughput_counts_accepted_requests_by_end() -> None:
    requests = [request(0.95), request(1.0, duration=None), request(1.2, accepted=False), request(1.5), request(2.9)]
    assert throughput(requests, 1.0, 2.75) == 2 / 1.75
    assert throughput(requests, 1.0, 3.5) == 3 / 2.5


@given(st.integers(1, 8), st.floats(0, 0.5))
def test_cycle_throughput_does_not_depend_on_phase(concurrency: int, begin: float) -> None:
    bursts = [request(number / 4 + one / 1000, duration=0.25) for number in range(20) for one in range(concurrency)]
    assert cycle_throughput(bursts, concurrency, begin, begin + 3.0) == pytest.approx(4 * concurrency)


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


@given(requests_lists, rate_steps(), stalls_lists())
def test_max_rate_ratio_matches_definition(
    requests: list[ServiceRequest], steps: list[RateStep], stalls: list[Stall]
) -> None:
    """All times are multiples of 1/4, so that the windows between which the ratio is monotonic start at these."""
    begins = [number / 4 for number in range(-130, 250)]
    arrivals = [(earliest_arrival(one.arrival, stalls), one.arrival, one.tokens) for one in requests]
    ratios = [
        sum(size for earliest, latest, size in arrivals if begin <= earliest and latest <= begin + WINDOW_S)
        / allowed(steps, begin, begin + WINDOW_S)
        for begin in begins
    ]
    assert isclose(max_rate_ratio(requests, steps, WINDOW_S, tokens, stalls), max(ratios))


def test_longest_stall_ignores_stalls_outside_of_period() -> None:
    stalls = [Stall(0.0, 1.5), Stall(2.0, 2.25), Stall(3.0, 3.5), Stall(4.0, 6.0)]
    assert longest_stall(stalls, 1.0, 5.0) == 0.5
    assert longest_stall(stalls, 1.0, 1.5) == 0.0


def test_requests_of_a_stall_count_in_windows_that_contain_it() -> None:
    """The service records the requests of half a second at its end, of a client that keeps the rate or doubles it."""
    stalls = [Stall(8.0, 8.5)]
    for per_second, ratio in ((20, 1.0), (40, 2.0)):
        sent = [number / per_second for number in range(20 * per_second)]
        requests = [request(8.505 if 8.0 <= moment < 8.5 else moment) for moment in sent]
        assert max_rate_ratio(requests, [RateStep(0, 20)], WINDOW_S) > 1.04 * ratio
        measured = max_rate_ratio(requests, [RateStep(0, 20)], WINDOW_S, stalls=stalls)
        assert measured == pytest.approx(ratio, abs=0.01)


@given(rate_steps(), quarters, st.integers(1, 80), st.integers(1, 80))
def test_allowed_amount_is_additive(steps: list[RateStep], begin: float, first: int, second: int) -> None:
    middle, end = begin + first / 4, begin + (first + second) / 4
    assert isclose(allowed(steps, begin, middle) + allowed(steps, middle, end), allowed(steps, begin, end))


def test_utilisation() -> None:
    requests = [request(number / 2, 10) for number in range(10)]
    assert utilisation(requests, 4, 0, 5, one_request) == 0.5
    assert utilisation(requests, 20, 0, 5, tokens) == 1.0


def test_median_utilisation_ignores_a_pause() -> None:
    requests = [request(number / 4) for number in range(80) if not 20 <= number < 26]
    assert utilisation(requests, 4, 0, 20, one_request) == 74 / 80
    assert median_utilisation(requests, 4, 0, 20, 5, one_request) == 1.0


@given(requests_lists)
def test_mean_concurrent_is_total_time_per_second(requests: list[ServiceRequest]) -> None:
    assert isclose(mean_concurrent(requests, -100, 100), len(requests) * 0.1 / 200, abs_tol=1e-9)


def test_mean_concurrent_of_running_and_refused_requests() -> None:
    requests = [request(0, duration=None), request(0, accepted=False, duration=9), request(-5, duration=7)]
    assert mean_concurrent(requests, 0, 10) == pytest.approx(1.2)


@pytest.mark.parametrize("duration", [0.1, 0.2])
def test_throughput_vs_ideal_does_not_depend_on_duration(duration: float) -> None:
    requests = [request(number * duration, duration=duration * 0.75) for number in range(200) for _ in range(8)]
    assert throughput_vs_ideal(requests, 8, 0.0, 10.0) == pytest.approx(0.75)
