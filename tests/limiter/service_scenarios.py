"""Changes of the limited service while processes use it, and the figures of their effect."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from .service_client import Service, ServiceLoads, Start, bare_throughput
from .service_figures import (
    arrived,
    max_in_window,
    oscillation,
    refused_fraction,
    settled_after,
    throughput,
    throughput_per_bucket,
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

Ideal = dict[int, float]
"""Throughput of a client that knows the capacity, by capacity."""


def adaptive_loads(service: Service, resource: str) -> ServiceLoads:
    """Return an adaptive load, of which four processes keep 200 requests waiting while the capacity is in use."""
    limits = {"limit": {"min": 4, "max": 256}}
    return ServiceLoads(service, resource=resource, limits=limits, concurrency=(200 + CAPACITY) // 4, hold=2.0)


def ideal_throughput(service: Service, start: Start) -> Ideal:
    """Measure the throughput without a limiter at both capacities. The capacity is `CAPACITY` afterwards."""
    return {capacity: bare_throughput(service, start, capacity) for capacity in (LOW_CAPACITY, CAPACITY)}


class CapacityStep(NamedTuple):
    """Effect of a change of the capacity."""

    capacity: int
    throughput_vs_ideal: float
    """Throughput after the limit has adapted, relative to a client that knows the capacity."""
    oscillation: float
    refused_fraction: float
    settled_after_s: int
    """Number of seconds after which the throughput stayed above its minimum."""
    per_second: list[int]
    """Throughput in each second after the change."""


def step_capacity(service: Service, ideal: Ideal, capacities: Sequence[int], measure_s: float) -> list[CapacityStep]:
    """Change the capacity several times. After each change, wait for the limit to adapt and measure the throughput."""
    begins = []
    for capacity in capacities:
        begins.append(service.set(capacity=capacity))
        time.sleep(SETTLE_S + measure_s)
    requests, steps = service.requests(), []
    for begin, capacity in zip(begins, capacities, strict=True):
        end = begin + SETTLE_S + measure_s
        per_second = throughput_per_bucket(requests, begin, end)
        steps.append(
            CapacityStep(
                capacity,
                throughput(requests, begin + SETTLE_S, end) / ideal[capacity],
                oscillation(per_second[int(SETTLE_S) :]),
                refused_fraction(arrived(requests, begin, end)),
                settled_after(per_second, MIN_THROUGHPUT * ideal[capacity]),
                [round(number) for number in per_second],
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
    """Throughput after the recovery, relative to a client that knows the capacity."""
    per_second: list[int]
    """Throughput in each second after the end of the period."""


def reject_everything(service: Service, ideal: Ideal, seconds: float) -> Rejection:
    """Let the service reject everything for some time, and measure the requests during and the throughput after it."""
    begin = service.set(rejecting=1)
    time.sleep(seconds)
    end = service.set(rejecting=0)
    back = end + RECOVERY_S
    time.sleep(RECOVERY_S + 5.0)
    requests = service.requests()
    probes = arrived(requests, begin + 2.0, end)
    return Rejection(
        len(arrived(requests, begin, begin + 2.0)),
        len(probes) / (end - begin - 2.0),
        max_in_window(probes, MIN_PROBE_INTERVAL_S) > 1,
        [round(probe.arrival - begin, 2) for probe in probes],
        throughput(requests, back, back + 5.0) / ideal[CAPACITY],
        [round(number) for number in throughput_per_bucket(requests, end, back + 5.0)],
    )


def wait_for_requests(service: Service, count: int) -> None:
    """Wait until `count` further requests have arrived."""
    before = len(service.requests())
    for _ in range(600):
        if len(service.requests()) >= before + count:
            return
        time.sleep(0.1)
    raise AssertionError(f"{len(service.requests()) - before} requests arrived instead of {count}")
