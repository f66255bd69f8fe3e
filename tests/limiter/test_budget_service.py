"""Budget of a service, with four processes on two Ray nodes, two of which are killed and replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from .service_client import ServiceLoads
from .service_nodes import four_processes, service_on, start_on
from .service_scenarios import slow_requests, wait_for_requests

if TYPE_CHECKING:
    from ray_nodes import NetnsNodes

pytestmark = pytest.mark.timing
BUDGET, MIN_USED = 3000, 0.98
CONCURRENCY = 16
LIMITS = {"limit": 16, "budget": {"calls": BUDGET}}


def test_budget_holds_despite_killed_processes(nodes: NetnsNodes, report_figure: Callable[[str], None]) -> None:
    with service_on(nodes) as service:
        service.set(capacity=1000)
        with ServiceLoads(service, resource="budget", limits=LIMITS, concurrency=CONCURRENCY, hold=2.0) as loads:
            with slow_requests(service):
                loads.start_all(four_processes(nodes))
            victims = [loads.all[0], loads.all[2]]
            for victim, host in zip(victims, nodes.hosts[1:], strict=True):
                wait_for_requests(service, BUDGET // 10)
                victim.kill()
                assert len(service.requests()) < BUDGET, "The budget was spent before a process was killed."
                with slow_requests(service):
                    loads.start(start_on(nodes, host)).wait_until_ready()
            results = [load.result(timeout=60) for load in loads.all if load not in victims]
        arrived = len(service.requests())
    report_figure(f"{arrived} of {BUDGET} calls arrived; counts: {results}")
    assert MIN_USED * BUDGET <= arrived <= BUDGET
    assert all(result["BudgetExhausted"] == CONCURRENCY for result in results)
