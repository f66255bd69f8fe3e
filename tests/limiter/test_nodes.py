"""Several real Ray nodes, each in a network namespace: a node dies, a cable is cut and mended. The server counts."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import Host, NetnsNodes, can_make_namespaces

pytestmark = pytest.mark.alone
HERE = Path(__file__).parent
LIMIT, TTL, HOLD, PORT = 32, 5.0, 0.4, 8077
JOB = {"limit": LIMIT, "concurrency": 40, "ms": 20, "hold": HOLD, "patience": 30, "ttl": TTL}

POOL = """
import asyncio, os, ray, time
from toolroll.limiter.execution import init_execution_pool

ray.init(log_to_driver=False, logging_level="error", _node_ip_address=os.environ["RAY_NODES_IP"])

async def main():
    pool = init_execution_pool(12, rate_limit=6, resource="two nodes")
    await pool.execute(time.sleep, 0)
    began = time.time()
    await asyncio.gather(*(pool.execute(time.sleep, 2) for _ in range(6)))
    print("RESULT", began, time.time(), flush=True)

asyncio.run(main())
"""
STATS = f"import urllib.request; print(urllib.request.urlopen('http://{{}}:{PORT}/stats', timeout=30).read().decode())"


@pytest.fixture(scope="module")
def nodes() -> Iterator[NetnsNodes]:
    if reason := can_make_namespaces():
        pytest.skip(f"NOT TESTED: node death and partition need network namespaces, which can't be made here: {reason}")
    with NetnsNodes(workers=2) as nodes:
        yield nodes


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


def start(nodes: NetnsNodes, host: Host, name: str, seconds: float, resource: str) -> Any:
    job = {**JOB, "resource": resource, "server": [nodes.head.ip, PORT], "name": name, "seconds": seconds}
    process = nodes.popen(host, str(HERE / "load.py"), json.dumps(job))
    assert process.stdout is not None
    line = process.stdout.readline()
    while line and line != "ready\n":
        line = process.stdout.readline()
    assert line == "ready\n"
    return process


def reached(events: list[Any], name: str, level: int, since: float) -> float:
    """When one process first had so many in flight, after a moment."""
    now = 0
    for moment, by, change in events:
        if by == name:
            now += change
            if moment > since and now >= level:
                return float(moment)
    return float("inf")


def most_between(events: list[Any], since: float, until: float) -> int:
    now = most = 0
    for moment, _, change in events:
        now += change
        if since <= moment <= until:
            most = max(most, now)
    return most


class TestMultiNodeRateLimiterCase:
    def test_twelve_calls_from_two_nodes_at_a_limit_of_six(self, nodes: NetnsNodes) -> None:
        drivers = [nodes.popen(host, "-c", POOL) for host in nodes.hosts[1:]]
        outputs = [driver.communicate(timeout=90)[0] for driver in drivers]
        times = [line.split()[1:] for output in outputs for line in output.splitlines() if line.startswith("RESULT")]
        assert len(times) == 2, outputs
        began, ended = min(float(began) for began, _ in times), max(float(ended) for _, ended in times)
        assert 4 <= ended - began < 10


def test_a_partition_and_its_healing(nodes: NetnsNodes, server: Host) -> None:
    """The slots of the cut-off node come back when its lease has run out; after healing nothing comes on top."""
    cut_off, connected = nodes.hosts[1], nodes.hosts[2]
    behind = start(nodes, cut_off, "behind", 24, "partition")
    survivor = start(nodes, connected, "survivor", 24, "partition")
    time.sleep(2)
    nodes.cut(cut_off)
    cut = time.time()
    time.sleep(TTL + HOLD + 2)
    nodes.heal(cut_off)
    healed = time.time()
    for process in (behind, survivor):
        process.communicate(timeout=90)
    found = stats(nodes)
    assert found["most"] <= LIMIT
    assert reached(found["events"], "survivor", LIMIT, cut) - cut <= TTL + HOLD + 0.5
    assert most_between(found["events"], healed, healed + 60) <= LIMIT


def test_kill_9_of_a_node(nodes: NetnsNodes, server: Host) -> None:
    victim, survivor = nodes.hosts[1], nodes.hosts[2]
    nodes.kill_node(victim)  # whatever the test before left of it
    nodes.start_node(victim)
    doomed = start(nodes, victim, "victim", 60, "node")
    alive = start(nodes, survivor, "survivor", 15, "node")
    time.sleep(2)
    nodes.kill_node(victim)
    killed = time.time()
    doomed.communicate(timeout=10)
    alive.communicate(timeout=60)
    found = stats(nodes)
    assert found["most"] <= LIMIT
    assert reached(found["events"], "survivor", LIMIT, killed) - killed <= TTL + HOLD + 0.5
