"""Adaptive limit of a service whose capacity changes, with four processes on two Ray nodes.

The processes, the service and Ray share the processors, so that the figures are those of the limiter only if the
machine does nothing else. A measurement out of bounds is repeated if the machine was disturbed meanwhile, and fails if
it was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Self

import psutil
import pytest

from .service_client import bare_throughput
from .service_figures import longest_stall, mean_concurrent, refused_fraction, throughput
from .service_nodes import four_processes, service_on, start_on
from .service_scenarios import (
    CAPACITY,
    LOW_CAPACITY,
    MIN_THROUGHPUT,
    SETTLE_S,
    adaptive_loads,
    reject_everything,
    step_capacity,
)

if TYPE_CHECKING:
    from ray_nodes import NetnsNodes

pytestmark = pytest.mark.timing
MAX_REFUSED, MAX_OSCILLATION = 0.02, 0.25
MAX_CONCURRENT = 2.5
"""Maximum mean number of requests in a service that queues, relative to its capacity."""
MEASURE_S = 12.0
MAX_MEASUREMENTS = 3
MAX_LOST = 0.01
"""Maximum fraction of the processor time that a hypervisor or other processes may take on an undisturbed machine."""
MAX_STALL_S = 0.05
"""Maximum time for which the service, which shares no code with the limiter, may not run on an undisturbed machine."""


class ProcessorTime(NamedTuple):
    """Processor time of the machine since its start, in seconds."""

    total: float
    stolen: float
    """Time that the hypervisor took."""
    used: float
    used_by_test: float
    """Time that this process and its descendants used."""

    @classmethod
    def now(cls) -> Self:
        """Return the times up to now."""
        machine, used_by_test = psutil.cpu_times(), 0.0
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            with suppress(psutil.Error):  # it has just ended
                used_by_test += sum(process.cpu_times()[:4])
        return cls(sum(machine), machine.steal, machine.user + machine.nice + machine.system, used_by_test)

    def lost_since(self, earlier: ProcessorTime) -> float:
        """Return the fraction of the processor time since then that the hypervisor or other processes took."""
        total, stolen, used, used_by_test = (now - then for now, then in zip(self, earlier, strict=True))
        return (stolen + max(0.0, used - used_by_test)) / total


class Measurement(NamedTuple):
    """The bounds that a measurement exceeded, and disturbances of the machine meanwhile."""

    out_of_bounds: list[str]
    lost: float
    """Fraction of the processor time that the hypervisor or other processes took."""
    stall_s: float
    """Longest time for which the service did not run."""

    @property
    def is_valid(self) -> bool:
        """Whether the figures are within bounds, or out of bounds on an undisturbed machine."""
        return not self.out_of_bounds or (self.lost <= MAX_LOST and self.stall_s <= MAX_STALL_S)


def check(measure: Callable[[int], Measurement], report_figure: Callable[[str], None]) -> None:
    """Measure, again while a measurement is not valid, and fail if the last one is out of bounds."""
    for number in range(MAX_MEASUREMENTS):
        measurement = measure(number)
        report_figure(f"{measurement}")
        if measurement.is_valid:
            break
    assert not measurement.out_of_bounds, measurement


def test_limit_adapts_to_service(nodes: NetnsNodes, report_figure: Callable[[str], None]) -> None:
    """The capacity changes, and then the service rejects everything for a while."""

    def measure(number: int) -> Measurement:
        with service_on(nodes) as service:
            before = ProcessorTime.now()
            with adaptive_loads(service, f"capacity {number}") as loads:
                loads.start_all(four_processes(nodes))
                steps = step_capacity(service, (CAPACITY, LOW_CAPACITY, CAPACITY), MEASURE_S)
                requests = service.requests()
                rejection = reject_everything(service, 20.0)
                lost = ProcessorTime.now().lost_since(before)
        for step in steps:
            report_figure(f"{step}")
        report_figure(f"refused {refused_fraction(requests):.4f} of {len(requests)}")
        report_figure(f"{rejection}")
        # The bounds of what the limiter sends hold on any machine.
        assert rejection.requests_per_s <= 1.0
        assert not rejection.probed_too_often
        is_out_of_bounds = {
            "throughput": min(step.throughput_vs_ideal for step in steps) < MIN_THROUGHPUT,
            "oscillation": max(step.oscillation for step in steps) > MAX_OSCILLATION,
            "refused": refused_fraction(requests) >= MAX_REFUSED,
            "throughput after the rejection": rejection.throughput_vs_ideal < MIN_THROUGHPUT,
        }
        stall_s = max(part.longest_stall_s for part in (*steps, rejection))
        return Measurement([name for name, is_out in is_out_of_bounds.items() if is_out], lost, stall_s)

    check(measure, report_figure)


def test_limit_keeps_queue_of_service_short(nodes: NetnsNodes, report_figure: Callable[[str], None]) -> None:
    """A service that rejects nothing, but takes longer if it has more requests, is used in full and not flooded."""

    def measure(number: int) -> Measurement:
        with service_on(nodes) as service:
            before = ProcessorTime.now()
            ideal = bare_throughput(service, start_on(nodes, nodes.hosts[1]), CAPACITY)
            service.set(queueing=1)
            with adaptive_loads(service, f"queue {number}") as loads:
                begin = loads.start_all(four_processes(nodes)) + SETTLE_S
                end = begin + 2 * MEASURE_S
                time.sleep(max(0.0, end - time.time()))
                requests, stalls = service.requests(), service.stalls()
                lost = ProcessorTime.now().lost_since(before)
        per_s, concurrent = throughput(requests, begin, end), mean_concurrent(requests, begin, end)
        report_figure(f"ideal {ideal:.0f}/s: {per_s:.0f}/s, {concurrent:.1f} requests at a time")
        is_out_of_bounds = {
            "throughput": per_s < MIN_THROUGHPUT * ideal,
            "requests at a time": concurrent > MAX_CONCURRENT * CAPACITY,
        }
        stall_s = longest_stall(stalls, begin, end)
        return Measurement([name for name, is_out in is_out_of_bounds.items() if is_out], lost, stall_s)

    check(measure, report_figure)
