"""The limited service on the head of a cluster of real Ray nodes, and four processes on its two workers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from .service_client import Service, Start, running_service

if TYPE_CHECKING:
    from ray_nodes import Host, NetnsNodes

PORT = 8078

CONNECT = """
import json, os, ray, signal, sys, time
from toolroll.limiter.token_bucket import find_token_bucket, set_limit
ray.init(log_to_driver=False, logging_level="error", _node_ip_address=os.environ["RAY_NODES_IP"])
resource = sys.argv[1]
"""
KILL_ACTOR = CONNECT + "os.kill(ray.get(find_token_bucket(resource).pid.remote()), signal.SIGKILL)"
SET_RATES = """
begin = time.time()
set_limit(resource, rates=json.loads(sys.argv[2]))
print("CHANGED", begin, time.time())
"""


@contextmanager
def service_on(nodes: NetnsNodes) -> Iterator[Service]:
    """Run the service on the head until the block ends."""
    with running_service(start_on(nodes, nodes.head), nodes.head.ip, PORT, nodes.directory) as service:
        yield service


def start_on(nodes: NetnsNodes, host: Host) -> Start:
    """Return a function that starts Python on a host."""
    return partial(nodes.popen, host)


def four_processes(nodes: NetnsNodes) -> list[Start]:
    """Return functions that start Python, two on each worker."""
    return [start_on(nodes, host) for host in (nodes.hosts[1], nodes.hosts[2]) for _ in range(2)]


def restart_node(nodes: NetnsNodes, host: Host) -> None:
    """Restart a node that was killed or cut off."""
    nodes.kill_node(host)
    nodes.start_node(host)


def kill_actor(nodes: NetnsNodes, resource: str) -> float:
    """Send SIGKILL to the actor of a resource and return the time."""
    nodes.run(nodes.head, "-c", KILL_ACTOR, resource)
    return time.time()


def set_rates(nodes: NetnsNodes, resource: str, rates: dict[str, float]) -> tuple[float, float]:
    """Change the rates of a resource. Return the times before and after the change."""
    output = nodes.run(nodes.head, "-c", CONNECT + SET_RATES, resource, json.dumps(rates))
    changed = next(line for line in output.splitlines() if line.startswith("CHANGED"))
    before, after = map(float, changed.split()[1:])
    return before, after
