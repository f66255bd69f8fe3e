"""Adaptive limit of a service whose capacity changes, with four processes on two Ray nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from .service_figures import mean_concurrent, refused_fraction, throughput
from .service_nodes import four_processes, service_on, start_on
from .service_scenarios import (
    CAPACITY,
    LOW_CAPACITY,
    MIN_THROUGHPUT,
    SETTLE_S,
    adaptive_loads,
    ideal_throughput,
    reject_everything,
    step_capacity,
)

if TYPE_CHECKING:
    from ray_nodes import NetnsNodes

pytestmark = pytest.mark.timing
MAX_REFUSED, MAX_OSCILLATION = 0.02, 0.25
MAX_CONCURRENT = 2.5
"""Maximum mean number of requests in a service that queues, relative to its capacity."""
MEASURE_S = 6.0
MAX_MEASUREMENTS = 3
MAX_STOLEN = 0.01
"""Maximum fraction of the processor time that a hypervisor may take away during a valid measurement."""


def stolen_fraction(before: Any, after: Any) -> float:
    """Return the fraction of the processor time that a hypervisor took away between two `psutil.cpu_times()`."""
    return float((after.steal - before.steal) / (sum(after) - sum(before)))


def test_limit_adapts_to_service(nodes: NetnsNodes, report_figure: Callable[[str], None]) -> None:
    """The capacity changes, and then the service rejects everything for a while.

    If the hypervisor took processor time away meanwhile, the capacity of the service was another one than measured, and
    the measurement is repeated. A measurement out of bounds on an undisturbed machine fails.
    """
    for number in range(MAX_MEASUREMENTS):
        before = psutil.cpu_times()
        with service_on(nodes) as service:
            ideal = ideal_throughput(service, start_on(nodes, nodes.hosts[1]))
            with adaptive_loads(service, f"capacity {number}") as loads:
                loads.start_all(four_processes(nodes))
                steps = step_capacity(service, ideal, (CAPACITY, LOW_CAPACITY, CAPACITY), MEASURE_S)
                requests = service.requests()
                rejection = reject_everything(service, ideal, 20.0)
        for step in steps:
            report_figure(f"ideal {ideal[step.capacity]:.0f}/s: {step}")
        report_figure(f"refused {refused_fraction(requests):.4f} of {len(requests)}")
        report_figure(f"{rejection}")
        # The bounds of what the limiter sends hold on any machine.
        assert rejection.requests_per_s <= 1.0
        assert not rejection.probed_too_often
        out_of_bounds = {
            "throughput": min(step.throughput_vs_ideal for step in steps) < MIN_THROUGHPUT,
            "oscillation": max(step.oscillation for step in steps) > MAX_OSCILLATION,
            "refused": refused_fraction(requests) >= MAX_REFUSED,
            "throughput after the rejection": rejection.throughput_vs_ideal < MIN_THROUGHPUT,
        }
        stolen = stolen_fraction(before, psutil.cpu_times())
        report_figure(f"stolen by the hypervisor: {stolen:.3f}")
        if not any(out_of_bounds.values()) or stolen <= MAX_STOLEN:
            break
    assert out_of_bounds == dict.fromkeys(out_of_bounds, False)


def test_limit_keeps_queue_of_service_short(nodes: NetnsNodes, report_figure: Callable[[str], None]) -> None:
    """A service that rejects nothing, but takes longer if it has more requests, is used in full and not flooded."""
    with service_on(nodes) as service:
        ideal = ideal_throughput(service, start_on(nodes, nodes.hosts[1]))[CAPACITY]
        service.set(queueing=1)
        with adaptive_loads(service, "queue") as loads:
            settled_at = loads.start_all(four_processes(nodes)) + SETTLE_S
            time.sleep(max(0.0, settled_at + 2 * MEASURE_S - time.time()))
            requests = service.requests()
    measured = settled_at, settled_at + 2 * MEASURE_S
    per_s, concurrent = throughput(requests, *measured), mean_concurrent(requests, *measured)
    report_figure(f"ideal {ideal:.0f}/s: {per_s:.0f}/s, {concurrent:.1f} requests at a time")
    assert per_s >= MIN_THROUGHPUT * ideal
    assert concurrent <= MAX_CONCURRENT * CAPACITY
