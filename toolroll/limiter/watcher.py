"""NodeWatcher: sees the processes of its node die, and tells the limiters at once.

One small actor per node. A holder asks it to watch its process, and asks again from time to time in case the watcher
was started anew. When the kernel says that the process is gone, the watcher tells the holder's limiter. This is certain
knowledge, unlike what Ray can say from afar: to Ray a node behind a cut cable is dead, while its processes may go on.
Those are left to their leases' ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from toolroll.limiter.token_bucket import NAMESPACE, find

logger = logging.getLogger(__name__)

IDLE = 60.0
"""Seconds after which a watcher with nobody to watch ends."""

TELL_FOR = 30.0
"""Seconds for which a limiter that doesn't answer is told again."""


def birth(pid: int) -> str:
    """When a process was started, as the kernel counts. Tells it from another that got the same number later."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


class NodeWatcher:
    """Watches processes of one node. Ray makes the actor of it; see `node_watcher`."""

    def __init__(self, idle: float = IDLE) -> None:
        self._idle = idle
        self._watched: set[str] = set()
        self._telling: set[asyncio.Task[None]] = set()

    async def watch(self, pid: int, born: str, resource: str, holder: str) -> bool:
        """Watch a process, and tell the limiter when it ends. False: it can't be seen from here."""
        if holder in self._watched:
            return True
        try:
            if birth(pid) != born:
                raise ProcessLookupError("another process has its number")
            descriptor = os.pidfd_open(pid)
        except OSError as error:
            logger.warning("process %d can't be watched (%s): if it dies, its lease must run out first", pid, error)
            return False
        self._watched.add(holder)
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            self._telling.add(task := loop.create_task(self._tell(resource, holder)))
            task.add_done_callback(self._telling.discard)

        loop.add_reader(descriptor, ended)
        return True

    async def _tell(self, resource: str, holder: str) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + TELL_FOR
        while clock() < until:
            try:
                await find(resource).gone.remote(holder)
                break
            except (RayError, ValueError):
                await asyncio.sleep(0.2)
        else:
            logger.warning("the limiter of %s could not be told that %s is dead", resource, holder)
        self._watched.discard(holder)
        asyncio.get_running_loop().call_later(self._idle, self._end_if_idle)

    def _end_if_idle(self) -> None:
        if not self._watched:
            ray.kill(ray.get_runtime_context().current_actor)


def node_watcher() -> ActorHandle[NodeWatcher]:
    """The watcher of the node that this process is on."""
    node = ray.get_runtime_context().get_node_id()
    worker = ray.remote(NodeWatcher).options(
        name=f"watcher:{node}",
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=100_000,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    return cast("ActorHandle[NodeWatcher]", worker.remote())
