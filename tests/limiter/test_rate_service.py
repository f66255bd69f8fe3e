"""Rates of a service, with four processes on two Ray nodes, while processes and the limiter die and rates change."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from .service_client import ServiceLoads
from .service_figures import RateStep, max_rate_ratio, median_utilisation, one_request, tokens
from .service_nodes import four_processes, kill_actor, restart_node, service_on, set_rates, start_on

if TYPE_CHECKING:
    from ray_nodes import NetnsNodes

pytestmark = pytest.mark.timing
RESOURCE = "rates"
RPM, TPM = 1800.0, 240_000.0
HIGH_REQUEST_RATE, LOW_TOKEN_RATE = 45.0, 1500.0
TOKENS, TRUE_TOKENS = 100, (50, 100)
"""Estimated and true tokens of a request. Requests are limited by RPM until the rate of tokens is lowered."""
TTL_S, HOLD_S = 4.0, 1.0
WINDOW_S = 10.0
MEASURE_S, MEASURED_PARTS = 20.0, 5
"""Period in which a rate is used undisturbed, and the number of its parts, of which the median utilisation counts."""
MIN_UTILISATION, MAX_OVERSHOOT = 0.95, 1.05
JOB = {"limits": {"rpm": RPM, "tpm": TPM}, "tokens": TOKENS, "true_tokens": TRUE_TOKENS, "concurrency": 12}


def test_rates_hold_despite_failures_and_changes(nodes: NetnsNodes, report_figure: Callable[[str], None]) -> None:
    cut_off = nodes.hosts[1]
    restart_node(nodes, cut_off)  # in case an earlier test killed it
    with service_on(nodes) as service:
        service.set(capacity=1000)
        with ServiceLoads(service, resource=RESOURCE, ttl=TTL_S, hold=HOLD_S, patience=30, **JOB) as loads:
            undisturbed = loads.start_all(four_processes(nodes)) + 3.0
            time.sleep(3.0 + MEASURE_S)
            loads.all[2].kill()
            loads.start(start_on(nodes, nodes.hosts[2])).wait_until_ready()
            kill_actor(nodes, RESOURCE)
            time.sleep(4.0)
            nodes.cut(cut_off)
            time.sleep(TTL_S + HOLD_S + 3.0)
            nodes.heal(cut_off)
            time.sleep(4.0)
            raised, _ = set_rates(nodes, RESOURCE, {"requests": HIGH_REQUEST_RATE, "tokens": TPM / 60})
            time.sleep(4.0)
            _, lowered = set_rates(nodes, RESOURCE, {"requests": HIGH_REQUEST_RATE, "tokens": LOW_TOKEN_RATE})
            time.sleep(1.0 + MEASURE_S)
            requests, stalls = service.requests(), service.stalls()
    restart_node(nodes, cut_off)  # Ray declared the node dead while it was cut off
    request_rates = [RateStep(0.0, RPM / 60), RateStep(raised, HIGH_REQUEST_RATE)]
    token_rates = [RateStep(0.0, TPM / 60), RateStep(lowered, LOW_TOKEN_RATE)]
    request_ratio = max_rate_ratio(requests, request_rates, WINDOW_S, one_request, stalls)
    token_ratio = max_rate_ratio(requests, token_rates, WINDOW_S, tokens, stalls)
    end, low_begin = undisturbed + MEASURE_S, lowered + 1.0
    used = median_utilisation(requests, RPM / 60, undisturbed, end, MEASURED_PARTS, one_request)
    low_end = low_begin + MEASURE_S
    low_used = median_utilisation(requests, LOW_TOKEN_RATE, low_begin, low_end, MEASURED_PARTS, tokens)
    report_figure(
        f"requests: at most {request_ratio:.3f} of the rate, utilisation {used:.3f}; "
        f"tokens: at most {token_ratio:.3f}, utilisation {low_used:.3f}; "
        f"stalls of the service: at most {max((stall.end - stall.begin for stall in stalls), default=0.0):.3f} s"
    )
    assert request_ratio <= MAX_OVERSHOOT
    assert token_ratio <= MAX_OVERSHOOT
    assert used >= MIN_UTILISATION
    assert low_used >= MIN_UTILISATION
