"""Node watcher: it reports the death of processes and stops when idle."""

import subprocess
import time
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from toolroll.limiter.cluster import ClusterLimiter
from toolroll.limiter.node_watcher import NodeWatcher, process_start_time
from toolroll.limiter.token_bucket import limiter_status

pytestmark = pytest.mark.ray


def test_death_is_reported_and_idle_watcher_stops(cluster: str) -> None:
    limiter = ClusterLimiter("watched", 4, ttl=120)  # the lease does not end first
    with limiter.slot(hold=1):
        pass
    remote: Any = ray.remote
    watcher = remote(num_cpus=0)(NodeWatcher).remote(0.2)
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        start_time = process_start_time(process.pid)
        assert not ray.get(watcher.watch.remote(process.pid, "another time", "watched", "x"))
        assert ray.get(watcher.watch.remote(process.pid, start_time, "watched", limiter.holder))
        assert ray.get(watcher.watch.remote(process.pid, start_time, "watched", limiter.holder)), (
            "repeated registration"
        )
        assert limiter_status("watched").holders == 1
        process.kill()
        process.wait()
        killed = time.monotonic()
        while limiter_status("watched").holders:  # the killed process was registered as the limiter's
            assert time.monotonic() - killed < 60, "the death was not reported"
    with pytest.raises(RayActorError):
        poll_until_stopped(watcher)
    limiter.close()


def poll_until_stopped(actor: Any) -> None:
    for _ in range(1000):
        ray.get(actor.__ray_ready__.remote())
        time.sleep(0.05)
