"""Figures of a limited service, computed from the requests that it received. Pure functions."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from math import inf
from statistics import median
from typing import NamedTuple


class ServiceRequest(NamedTuple):
    """A request, as the service recorded it. Times are in seconds."""

    arrival: float
    by: str
    """Name of the client."""
    tokens: float
    accepted: bool
    end: float | None
    """Time at which the request was answered, or None if it is still running."""


class Stall(NamedTuple):
    """A period in which the service did not run although it should have."""

    begin: float
    end: float


BACKLOG_S = 0.01
"""Time after a stall in which the service reads the requests that arrived during the stall."""


class RateStep(NamedTuple):
    """A rate and the time from which it applies."""

    since: float
    per_second: float


Amount = Callable[[ServiceRequest], float]
"""Function that returns the amount of one request, in the unit that is counted."""


def one_request(_: ServiceRequest) -> float:
    """Count requests."""
    return 1.0


def tokens(request: ServiceRequest) -> float:
    """Count tokens."""
    return request.tokens


def arrived(requests: Iterable[ServiceRequest], begin: float, end: float) -> list[ServiceRequest]:
    """Return the requests that arrived in [begin, end)."""
    return [request for request in requests if begin <= request.arrival < end]


def throughput(requests: Iterable[ServiceRequest], begin: float, end: float) -> float:
    """Return the number of accepted requests per second that ended in [begin, end)."""
    ends = [request.end for request in requests if request.accepted and request.end is not None]
    return sum(begin <= moment < end for moment in ends) / (end - begin)


def cycle_throughput(requests: Iterable[ServiceRequest], concurrency: int, begin: float, end: float) -> float:
    """Return the throughput of a client that keeps a number of requests running, over whole cycles in [begin, end).

    Such requests end in bursts, so that their number in a fixed time would depend on the phase of the bursts.
    """
    ends = sorted(
        request.end
        for request in requests
        if request.accepted and request.end is not None and begin <= request.end < end
    )
    count = (len(ends) - 1) // concurrency * concurrency
    return count / (ends[count] - ends[0])


def refused_fraction(requests: Sequence[ServiceRequest]) -> float:
    """Return the fraction of requests that were refused; 0 if there are none."""
    return sum(not request.accepted for request in requests) / max(1, len(requests))


def throughput_per_bucket(
    requests: Sequence[ServiceRequest], begin: float, end: float, bucket: float = 1.0
) -> list[float]:
    """Return the throughput in each bucket of `bucket` seconds. An incomplete bucket at the end is ignored."""
    starts = [begin + number * bucket for number in range(int((end - begin) / bucket + 1e-6))]
    return [throughput(requests, start, start + bucket) for start in starts]


def oscillation(values: Sequence[float]) -> float:
    """Return the largest deviation of a value from the mean, relative to the mean; infinity if the mean is 0."""
    mean = sum(values) / len(values)
    return max(abs(value - mean) for value in values) / mean if mean else inf


def settled_after(values: Sequence[float], minimum: float) -> int:
    """Return the number of values before those, up to the last one, that are not below a minimum."""
    return next((number for number in range(len(values), 0, -1) if values[number - 1] < minimum), 0)


def earliest_arrival(recorded: float, stalls: Iterable[Stall]) -> float:
    """Return the earliest time at which a request may have arrived, which is the start of a stall right before it."""
    return min((stall.begin for stall in stalls if stall.begin <= recorded <= stall.end + BACKLOG_S), default=recorded)


def longest_stall(stalls: Iterable[Stall], begin: float, end: float) -> float:
    """Return the length of the longest stall in a period, in seconds; 0 if there is none."""
    return max((stall.end - stall.begin for stall in stalls if begin <= stall.begin and stall.end <= end), default=0.0)


def max_in_window(
    requests: Iterable[ServiceRequest],
    window: float,
    amount: Amount = one_request,
    stalls: Sequence[Stall] = (),
) -> float:
    """Return the maximum amount that certainly arrived in any window of `window` seconds.

    A window includes both of its ends. For `stalls` see `max_rate_ratio`.
    """
    series = _Series(requests, amount, stalls)
    return max((series.between(moment, moment + window) for moment in series.earliest), default=0.0)


def max_rate_ratio(
    requests: Iterable[ServiceRequest],
    steps: Sequence[RateStep],
    window: float,
    amount: Amount = one_request,
    stalls: Sequence[Stall] = (),
) -> float:
    """Return the maximum, over all windows, of the amount that arrived relative to the amount that the rate allows.

    Args:
        requests: Requests in any order.
        steps: Rates in order of time. The first one also applies earlier.
        window: Length of the windows, in seconds. A window includes both of its ends.
        amount: Function that returns the amount of a request.
        stalls: Stalls of the service in order of time. A request that was recorded in one or right after it is counted
            only in windows that contain the stall up to there, because it may have arrived at its start.

    Returns:
        1.0 if the rate was used up in one window and exceeded in none; 0 if there are no requests.
    """
    series = _Series(requests, amount, stalls)
    # While no request and no step enters or leaves the window, the allowed amount changes linearly. So the maximum is
    # at a window that starts or ends at a request or at a step.
    changes = [step.since for step in steps[1:]]
    windows = [(moment, moment + window) for moment in series.earliest + changes]
    windows += [(moment - window, moment) for moment in series.times + changes]
    return max((series.between(*span) / allowed(steps, *span) for span in windows), default=0.0)


class _Series:
    """Amounts by arrival time, with their sums."""

    def __init__(self, requests: Iterable[ServiceRequest], amount: Amount, stalls: Sequence[Stall]) -> None:
        ordered = sorted(requests, key=lambda request: request.arrival)
        self.times = [request.arrival for request in ordered]
        self.earliest = [earliest_arrival(moment, stalls) for moment in self.times]
        """In order, because stalls do not overlap."""
        self._sums = [0.0, *accumulate(amount(request) for request in ordered)]

    def between(self, begin: float, end: float) -> float:
        """Return the amount that certainly arrived in [begin, end]."""
        first, last = bisect_left(self.earliest, begin), bisect_right(self.times, end)
        return self._sums[last] - self._sums[first] if first < last else 0.0


def allowed(steps: Sequence[RateStep], begin: float, end: float) -> float:
    """Return the amount that the rates allow in a period."""
    first, *later = steps
    bounded = [RateStep(-inf, first.per_second), *later, RateStep(inf, 0.0)]
    return sum(
        step.per_second * max(0.0, min(end, following.since) - max(begin, step.since))
        for step, following in pairwise(bounded)
    )


def utilisation(requests: Iterable[ServiceRequest], rate: float, begin: float, end: float, amount: Amount) -> float:
    """Return the amount that arrived in [begin, end), relative to the amount that the rate allows."""
    return sum(map(amount, arrived(requests, begin, end))) / (rate * (end - begin))


def median_utilisation(
    requests: Sequence[ServiceRequest], rate: float, begin: float, end: float, windows: int, amount: Amount
) -> float:
    """Return the median of the utilisation in `windows` parts of [begin, end), so that a short pause does not count."""
    length = (end - begin) / windows
    starts = [begin + number * length for number in range(windows)]
    return median(utilisation(requests, rate, start, start + length, amount) for start in starts)


def mean_concurrent(requests: Iterable[ServiceRequest], begin: float, end: float) -> float:
    """Return the mean number of accepted requests that were running in a period."""
    spans = ((request.arrival, end if request.end is None else request.end) for request in requests if request.accepted)
    return sum(max(0.0, min(end, stop) - max(begin, start)) for start, stop in spans) / (end - begin)


def throughput_vs_ideal(requests: Iterable[ServiceRequest], capacity: int, begin: float, end: float) -> float:
    """Return the throughput relative to that of a service that is always full: the mean used part of its capacity.

    The service could do `capacity` requests in the time that a request takes, which is longer on a busy machine.
    """
    return mean_concurrent(requests, begin, end) / capacity
