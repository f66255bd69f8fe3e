"""Changes of the limited service while processes use it, and the figures of their effect."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from .service_client import Service, ServiceLoads
from .service_figures import (
    arrived,
    longest_stall,
    max_in_window,
    oscillation,
    refused_fraction,
    settled_after,
    throughput_per_bucket,
    throughput_vs_ideal,
)

CAPACITY, LOW_CAPACITY = 32, 8
MIN_THROUGHPUT = 0.9
"""Minimum throughput, relative to the ideal one."""
SETTLE_S = 10.0
"""Time after a change of the capacity in which the limit adapts."""
RECOVERY_S = 5.0
"""Time in which the throughput recovers after the service rejected everything."""
MIN_PROBE_INTERVAL_S = 0.9
"""Minimum interval between two probes of a service that rejects everything, with a tolerance for delays on the way."""
REQUEST_MS, SLOW_REQUEST_MS = 100, 1000
"""Duration of a request, normally and while processes start."""


def adaptive_loads(service: Service, resource: str) -> ServiceLoads:
    """Return an adaptive load, of which four processes keep 200 requests waiting while the capacity is in use."""
    limits = {"limit": {"min": 4, "max": 256}}
    return ServiceLoads(service, resource=resource, limits=limits, concurrency=(200 + CAPACITY) // 4, hold=2.0)


class CapacityStep(NamedTuple):
    """Effect of a change of the capacity."""

    capacity: int
    throughput_vs_ideal: float
    """Throughput after the limit has adapted, relative to that of a service that is always full."""
    oscillation: float
    refused_fraction: float
    settled_after_s: int
    """Number of seconds after which the throughput stayed above its minimum."""
    per_second: list[int]
    """Throughput in each second after the change."""
    longest_stall_s: float
    """Longest time for which the service did not run although it should have."""


def step_capacity(service: Service, capacities: Sequence[int], measure_s: float) -> list[CapacityStep]:
    """Change the capacity several times. After each change, wait for the limit to adapt and measure the throughput."""
    begins = []
    for capacity in capacities:
        begins.append(service.set(capacity=capacity))
        time.sleep(SETTLE_S + measure_s)
    requests, stalls, steps = service.requests(), service.stalls(), []
    for begin, capacity in zip(begins, capacities, strict=True):
        end = begin + SETTLE_S + measure_s
        per_second = throughput_per_bucket(requests, begin, end)
        seconds = [begin + number for number in range(len(per_second))]
        used = [throughput_vs_ideal(requests, capacity, second, second + 1.0) for second in seconds]
        steps.append(
            CapacityStep(
                capacity,
                throughput_vs_ideal(requests, capacity, begin + SETTLE_S, end),
                oscillation(per_second[int(SETTLE_S) :]),
                refused_fraction(arrived(requests, begin, end)),
                settled_after(used, MIN_THROUGHPUT),
                [round(number) for number in per_second],
                longest_stall(stalls, begin, end),
            )
        )
    return steps


class Rejection(NamedTuple):
    """Effect of a period in which the service rejected everything."""

    first_requests: int
    """Number of requests in the first 2 s."""
    requests_per_s: float
    """Requests per second after the first 2 s."""
    probed_too_often: bool
    probes: list[float]
    """Times of the requests after the first 2 s, since the start of the period."""
    throughput_vs_ideal: float
    """Throughput after the recovery, relative to that of a service that is always full."""
    per_second: list[int]
    """Throughput in each second after the end of the period."""
    longest_stall_s: float
    """Longest time for which the service did not run although it should have, after the end of the period."""


def reject_everything(service: Service, seconds: float) -> Rejection:
    """Let the service reject everything for some time, and measure the requests during and the throughput after it."""
    begin = service.set(rejecting=1)
    time.sleep(seconds)
    end = service.set(rejecting=0)
    back = end + RECOVERY_S
    time.sleep(RECOVERY_S + 5.0)
    requests, stalls = service.requests(), service.stalls()
    probes = arrived(requests, begin + 2.0, end)
    return Rejection(
        len(arrived(requests, begin, begin + 2.0)),
        len(probes) / (end - begin - 2.0),
        max_in_window(probes, MIN_PROBE_INTERVAL_S, stalls=stalls) > 1,
        [round(probe.arrival - begin, 2) for probe in probes],
        throughput_vs_ideal(requests, CAPACITY, back, back + 5.0),
        [round(number) for number in throughput_per_bucket(requests, end, back + 5.0)],
        longest_stall(stalls, end, back + 5.0),
    )


@contextmanager
def slow_requests(service: Service) -> Iterator[None]:
    """Let requests take long until the block ends, so that little of a budget is spent while processes start."""
    service.set(ms=SLOW_REQUEST_MS)
    yield
    service.set(ms=REQUEST_MS)


def wait_for_requests(service: Service, count: int) -> None:
    """Wait until `count` further requests have arrived."""
    before = len(service.requests())
    for _ in range(600):
        if len(service.requests()) >= before + count:
            return
        time.sleep(0.1)
    raise AssertionError(f"{len(service.requests()) - before} requests arrived instead of {count}")
