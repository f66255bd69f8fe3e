"""The limited service itself, used by a process without a limiter."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from pathlib import Path

import pytest
from delays import max_overlap
from free_port import free_port

from .service_client import Service, ServiceLoads, bare_throughput, running_service, start_here
from .service_figures import mean_concurrent, refused_fraction, throughput

pytestmark = pytest.mark.timing
CAPACITY = 8


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with running_service(start_here, "127.0.0.1", free_port(), tmp_path) as service:
        service.set(capacity=CAPACITY)
        yield service


def test_capacity_is_reached_without_refusals(service: Service) -> None:
    assert bare_throughput(service, start_here, CAPACITY) == pytest.approx(CAPACITY / 0.1, rel=0.3)
    assert refused_fraction(service.bare_requests()) == 0.0


def test_request_beyond_capacity_is_refused(service: Service) -> None:
    with ServiceLoads(service, name="bare", concurrency=CAPACITY + 1, seconds=1.0) as loads:
        loads.start(start_here).result(timeout=30)
    requests = service.bare_requests()
    assert refused_fraction(requests) > 0.0
    assert max_overlap([(request.arrival, request.end or inf) for request in requests if request.accepted]) == CAPACITY


def test_rejecting_service_refuses_all_requests(service: Service) -> None:
    service.set(rejecting=1, retry_after=2)
    with ServiceLoads(service, name="bare", concurrency=1, seconds=0.2) as loads:
        counts = loads.start(start_here).result(timeout=30)
    assert counts.keys() == {"refused"}
    assert refused_fraction(service.bare_requests()) == 1.0


def test_queueing_service_slows_down(service: Service) -> None:
    service.set(queueing=1)
    with ServiceLoads(service, name="bare", concurrency=3 * CAPACITY, seconds=3.0) as loads:
        loads.start(start_here).result(timeout=30)
    requests = service.bare_requests()
    end = max(request.arrival for request in requests)  # the client ends some time after its last request
    assert refused_fraction(requests) == 0.0
    assert mean_concurrent(requests, end - 2.0, end) == pytest.approx(3 * CAPACITY, rel=0.2)
    assert throughput(requests, end - 2.0, end) == pytest.approx(CAPACITY / 0.1, rel=0.3)


def test_unknown_setting_is_an_error(service: Service) -> None:
    with pytest.raises(RuntimeError, match="404"):
        service.set(capacities=3)
