"""Node death and network partition, on several real Ray nodes in network namespaces."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from delays import max_overlap
from ray_nodes import Host, NetnsNodes

pytestmark = pytest.mark.timing
HERE = Path(__file__).parent
LIMIT, TTL, PORT = 32, 5.0, 8077
JOB = {"limit": LIMIT, "concurrency": 40, "ms": 100, "hold": 1.0, "patience": 30, "ttl": TTL, "seconds": 300}

POOL = """
import asyncio, json, os, ray, time
from toolroll.limiter.execution import init_execution_pool

ray.init(log_to_driver=False, logging_level="error", _node_ip_address=os.environ["RAY_NODES_IP"])

def nap():
    begin = time.monotonic()  # of the machine on which all nodes run
    time.sleep(2)
    return begin, time.monotonic()

async def main():
    pool = init_execution_pool(12, rate_limit=6, resource="two nodes")
    await pool.execute(time.sleep, 0)
    naps = await asyncio.gather(*(pool.execute(nap) for _ in range(6)))
    print("RESULT", json.dumps(naps), flush=True)

asyncio.run(main())
"""
STATS = f"import urllib.request; print(urllib.request.urlopen('http://{{}}:{PORT}/stats', timeout=30).read().decode())"


@pytest.fixture
def server(nodes: NetnsNodes) -> Iterator[Host]:
    process = nodes.popen(nodes.head, str(HERE / "counting_server.py"), nodes.head.ip, str(PORT))
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    yield nodes.head
    process.kill()
    process.communicate()


def stats(nodes: NetnsNodes) -> dict[str, Any]:
    return dict(json.loads(nodes.run(nodes.head, "-c", STATS.format(nodes.head.ip))))


def start_load(nodes: NetnsNodes, host: Host, resource: str, name: str) -> Any:
    job = {**JOB, "resource": resource, "server": [nodes.head.ip, PORT], "name": name}
    process = nodes.popen(host, str(HERE / "load.py"), json.dumps(job))
    assert process.stdout is not None
    line = process.stdout.readline()
    while line and line != "ready\n":
        line = process.stdout.readline()
    assert line == "ready\n"
    return process


def wait_for_level(nodes: NetnsNodes, name: str, expected: int, since: float) -> float:
    """Wait until a process has `expected` concurrent requests after a time. Return when it had."""
    for _ in range(60):
        level = 0
        for moment, by, change in stats(nodes)["events"]:
            level += change if by == name else 0
            if moment > since and level >= expected:
                return float(moment)
        time.sleep(0.5)
    raise AssertionError(f"{name} never had {expected} concurrent requests")


class TestMultiNodeRateLimiterCase:
    def test_twelve_calls_from_two_nodes_at_limit_six(self, nodes: NetnsNodes) -> None:
        drivers = [nodes.popen(host, "-c", POOL) for host in nodes.hosts[1:]]
        outputs = [driver.communicate(timeout=90)[0] for driver in drivers]
        results = [line for output in outputs for line in output.splitlines() if line.startswith("RESULT")]
        naps = [nap for line in results for nap in json.loads(line.removeprefix("RESULT"))]
        assert len(naps) == 12, outputs
        assert max_overlap(naps) == 6


def test_partition_and_healing(nodes: NetnsNodes, server: Host) -> None:
    """The partitioned node's slots return when its lease expires; healing does not exceed the limit."""
    cut_off, connected = nodes.hosts[1], nodes.hosts[2]
    loads = [
        start_load(nodes, host, "partition", name) for host, name in ((cut_off, "behind"), (connected, "survivor"))
    ]
    wait_for_level(nodes, "survivor", LIMIT // 2, 0.0)
    nodes.cut(cut_off)
    cut = time.time()
    assert wait_for_level(nodes, "survivor", LIMIT, cut) - cut > TTL / 2, "the lease was still valid"
    nodes.heal(cut_off)
    healed = time.time()
    wait_for_level(nodes, "behind", LIMIT // 2, healed)
    wait_for_level(nodes, "survivor", LIMIT // 2, healed)
    assert stats(nodes)["max_in_flight"] <= LIMIT
    for process in loads:
        process.kill()
        process.communicate()


def test_killed_node(nodes: NetnsNodes, server: Host) -> None:
    victim, survivor = nodes.hosts[1], nodes.hosts[2]
    nodes.kill_node(victim)  # in case an earlier test left processes
    nodes.start_node(victim)
    doomed = start_load(nodes, victim, "node", "victim")
    alive = start_load(nodes, survivor, "node", "survivor")
    wait_for_level(nodes, "survivor", LIMIT // 2, 0.0)
    nodes.kill_node(victim)
    killed = time.time()
    doomed.communicate(timeout=60)
    wait_for_level(nodes, "survivor", LIMIT, killed)
    assert stats(nodes)["max_in_flight"] <= LIMIT
    alive.kill()
    alive.communicate()
