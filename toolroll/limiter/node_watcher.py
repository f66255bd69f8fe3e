"""Ray actor that watches the processes of one node and reports their death to the limiters at once.

A holder registers its process, and repeats this from time to time in case the watcher was restarted. The kernel
notifies the watcher when the process ends, and the watcher notifies the holder's limiter. Ray's own information about
dead nodes is not used: the processes of a node behind a network partition may still run. Their leases expire instead.
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

from toolroll.limiter.token_bucket import find_token_bucket, shared_actor

logger = logging.getLogger(__name__)

WATCHER_IDLE_TIMEOUT_S = 60.0
"""Time after which a watcher without processes stops."""

DEATH_NOTICE_TIMEOUT_S = 30.0
"""Timeout for notifying a limiter. If it fails, the holder's lease expires."""

DEATH_NOTICE_RETRY_DELAY_S = 0.2
"""Delay between two attempts to notify a limiter."""


def process_start_time(pid: int) -> str:
    """Return the start time of a process in kernel ticks, which distinguishes it from others with the same id."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


class NodeWatcher:
    """Watches processes of one node. Created as a Ray actor by `get_node_watcher`."""

    def __init__(self, idle_timeout: float = WATCHER_IDLE_TIMEOUT_S) -> None:
        self._idle_timeout = idle_timeout
        self._watched: set[str] = set()
        self._notices: set[asyncio.Task[None]] = set()

    async def watch(self, pid: int, start_time: str, resource: str, holder: str) -> bool:
        """Watch a process and notify its limiter when it ends. Return False if the process is not visible here."""
        if holder in self._watched:
            return True
        try:
            if process_start_time(pid) != start_time:
                raise ProcessLookupError("another process has this id")
            descriptor = os.pidfd_open(pid)
        except OSError as error:
            logger.warning("cannot watch process %d (%s): if it dies, its slots return when its lease ends", pid, error)
            return False
        self._watched.add(holder)
        loop = asyncio.get_running_loop()

        def on_exit() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            self._notices.add(task := loop.create_task(self._notify_limiter(resource, holder)))
            task.add_done_callback(self._notices.discard)

        loop.add_reader(descriptor, on_exit)
        return True

    async def _notify_limiter(self, resource: str, holder: str) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + DEATH_NOTICE_TIMEOUT_S
        while loop.time() < deadline:
            try:
                await find_token_bucket(resource).mark_dead.remote(holder)
                break
            except (RayError, ValueError):
                await asyncio.sleep(DEATH_NOTICE_RETRY_DELAY_S)
        else:
            logger.warning("%s: could not notify the limiter that %s is dead", resource, holder)
        self._watched.discard(holder)
        loop.call_later(self._idle_timeout, self._stop_if_idle)

    def _stop_if_idle(self) -> None:
        if not self._watched:
            ray.kill(ray.get_runtime_context().current_actor)


def get_node_watcher() -> ActorHandle[NodeWatcher]:
    """Return the watcher of this process's node, creating it if necessary."""
    node = ray.get_runtime_context().get_node_id()
    on_node = NodeAffinitySchedulingStrategy(node, soft=False)
    worker = shared_actor(NodeWatcher, f"watcher:{node}", max_concurrency=100_000, scheduling_strategy=on_node)
    return cast("ActorHandle[NodeWatcher]", worker.remote())
