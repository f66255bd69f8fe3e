"""The watcher of a node: it sees processes die, and ends when there is nobody to watch."""

import subprocess
import time
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from toolroll.limiter.cluster import ClusterLimiter
from toolroll.limiter.token_bucket import standing
from toolroll.limiter.watcher import NodeWatcher, birth


def test_a_death_is_told_and_an_idle_watcher_ends(cluster: str) -> None:
    limiter = ClusterLimiter("watched", 4)
    with limiter.slot(hold=1):
        pass
    remote: Any = ray.remote
    watcher = remote(num_cpus=0)(NodeWatcher).remote(0.2)
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        born = birth(process.pid)
        assert not ray.get(watcher.watch.remote(process.pid, "another time", "watched", "x"))
        assert ray.get(watcher.watch.remote(process.pid, born, "watched", limiter.holder))
        assert ray.get(watcher.watch.remote(process.pid, born, "watched", limiter.holder)), "asked again"
        assert standing("watched").holders == 1
        process.kill()
        process.wait()
        killed = time.monotonic()
        while standing("watched").holders:  # it is taken for the limiter's process here
            assert time.monotonic() - killed < 5
    with pytest.raises(RayActorError):
        ask_until_it_ends(watcher)
    limiter.close()


def ask_until_it_ends(actor: Any) -> None:
    for _ in range(100):
        ray.get(actor.__ray_ready__.remote())
        time.sleep(0.05)
