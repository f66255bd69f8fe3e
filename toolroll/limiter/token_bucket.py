"""Ray actor that runs the ledger of one resource for the whole cluster.

The actor is detached, is restarted without limit, and has the resource's name in toolroll's own namespace. Every job of
the cluster finds the same actor, and no job stops it by ending. It runs on the head node, without which there is no
cluster.

A report is answered when its lease changes, or after a fraction of the lease's lifetime. So each holder has one open
call, and changes reach all holders at once. Slots are divided once per tick, independently of the number of reports.
Ticks take at most a tenth of the actor's time.

The ledger's checkpoint is in Ray's key-value store. It is saved before any holder gets a lease that a restarted actor
must know of. A renewal does not change it, so that it is rarely written.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from toolroll.limiter.lease import HolderFence, HolderReport, Lease
from toolroll.limiter.ledger import LEASE_TTL_S, Checkpoint, Ledger, LimiterStatus

logger = logging.getLogger(__name__)

RAY_NAMESPACE = "toolroll"
"""Ray namespace of toolroll's actors. Not the job's namespace, as all jobs share a limit."""

ACTOR_NAME_PREFIX = "limiter:"

MAX_OPEN_CALLS = 1_000_000
"""Maximum number of concurrent calls. Each holder has one or two; Ray's default is 1,000."""

MIN_TICK_INTERVAL_S = 0.002
"""Minimum interval between two divisions. Reports that arrive meanwhile are handled together."""

SAVE_RETRY_DELAY_S = 1.0
"""Delay before the next attempt to save the checkpoint."""

FENCE_INTERVAL_S = 0.5
"""Interval at which a resource is asked how much work of dead holders still runs."""

FENCE_RETRY_DELAY_S = 5.0
"""Delay before the next question if the resource could not answer any."""


class TokenBucketWorker:
    """Ledger of one resource. Created as a Ray actor by `get_or_create_token_bucket`."""

    def __init__(self, resource: str, limit: int, ttl: float = LEASE_TTL_S, fence: HolderFence | None = None) -> None:
        self._resource = resource
        self._fence = fence
        if saved := _internal_kv_get(ACTOR_NAME_PREFIX + resource, namespace=RAY_NAMESPACE):
            self._ledger = Ledger.restore(Checkpoint(*json.loads(saved)), time.monotonic())
        else:
            self._ledger = Ledger(limit, ttl)
        self._saved_revision = self._ledger.revision if saved else 0
        self._save_lock = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Background tasks by name."""
        self._open: dict[str, tuple[asyncio.Future[Lease | None], float]] = {}
        """Pending answers by holder, each with the time at which it is due."""
        self._changed = asyncio.Event()

    async def report(self, report: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Record a holder's report and return its lease, or None if the report is void or superseded."""
        self._run("ticks", self._run_ticks)
        received, now = HolderReport(*report), time.monotonic()
        if not self._ledger.report(received, now):
            return None
        self._answer(received.holder, None)
        answer: asyncio.Future[Lease | None] = asyncio.get_running_loop().create_future()
        self._open[received.holder] = answer, now + self._ledger.renewal_interval
        self._changed.set()
        lease = await answer
        return None if lease is None else tuple(lease)

    async def mark_dead(self, holder: str) -> None:
        """Remove a holder whose process is certainly dead."""
        self._ledger.mark_dead(holder, time.monotonic())
        self._answer(holder, None)
        self._changed.set()

    async def deregister(self, holder: str) -> None:
        """Remove a holder that uses no slots any more."""
        self._ledger.deregister(holder, time.monotonic())
        self._answer(holder, None)
        self._changed.set()

    async def set_limit(self, limit: int) -> int:
        """Change the limit for all holders. Return its version."""
        version = self._ledger.set_limit(limit)
        logger.info("%s: limit set to %d", self._resource, limit)
        await self._save()
        for holder, (answer, _) in self._open.items():  # all answers are due, as each carries the new limit
            self._open[holder] = answer, time.monotonic()
        self._changed.set()
        return version

    async def status(self) -> tuple[Any, ...]:
        """Return the current `LimiterStatus` as a tuple."""
        self._ledger.divide(time.monotonic())
        return tuple(self._ledger.status())

    async def get_current_count(self) -> int:
        """Return the number of slots in use, over all processes."""
        return LimiterStatus(*await self.status()).in_use

    async def pid(self) -> int:
        """Return the process id of the actor."""
        return os.getpid()

    def _answer(self, holder: str, lease: Lease | None) -> None:
        """Answer the open call of a holder, if it has one."""
        pending = self._open.pop(holder, None)
        if pending and not pending[0].done():  # Ray cancels the calls of a dead process
            pending[0].set_result(lease)

    async def _run_ticks(self) -> None:
        while True:
            start = time.monotonic()
            self._changed.clear()
            try:
                self._tick(start)
            except Exception:  # a failed tick must not stop the ticker
                logger.exception("%s: failed to divide the slots", self._resource)
            elapsed = time.monotonic() - start
            await asyncio.sleep(max(MIN_TICK_INTERVAL_S, 9 * elapsed))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._ledger.max_tick_interval)

    def _tick(self, now: float) -> None:
        self._ledger.divide(now)
        if self._ledger.revision > self._saved_revision:
            self._run("save", self._save_in_background)
        if self._fence and self._ledger.fences():
            self._run("fence", self._fence_holders)
        for holder, (_, due_at) in list(self._open.items()):
            if holder not in self._ledger.holders:
                self._answer(holder, None)
            elif max(self._ledger.holders[holder].revision, self._ledger.ttl_revision) > self._saved_revision:
                continue
            elif lease := self._ledger.answer(holder, due=now >= due_at):
                self._answer(holder, lease)

    def _run(self, name: str, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a function in the background, unless it is running."""
        if name not in self._tasks or self._tasks[name].done():
            self._tasks[name] = asyncio.create_task(function())

    async def _save_in_background(self) -> None:
        try:
            await self._save()
        except Exception:  # the next tick tries again
            logger.exception("%s: failed to save the state of the limiter", self._resource)
            await asyncio.sleep(SAVE_RETRY_DELAY_S)

    async def _save(self) -> None:
        """Save the checkpoint. If it changes meanwhile, the next tick saves it again."""
        async with self._save_lock:
            revision, saved = self._ledger.revision, json.dumps(self._ledger.checkpoint())
            key = ACTOR_NAME_PREFIX + self._resource
            await asyncio.to_thread(_internal_kv_put, key, saved, namespace=RAY_NAMESPACE)
            self._saved_revision = revision
        self._changed.set()

    async def _fence_holders(self) -> None:
        """Ask the resource to reject the work of holders whose leases have ended, until no such work runs."""
        assert self._fence is not None
        while fences := self._ledger.fences():
            calls = (self._fence(name, lease) for name, lease in fences.items())
            answers = await asyncio.gather(*calls, return_exceptions=True)
            for (name, lease), running in zip(fences.items(), answers, strict=True):
                if isinstance(running, int):
                    self._ledger.confirm_fence(name, lease, running)
            self._changed.set()
            is_supported = any(isinstance(running, int) for running in answers)
            await asyncio.sleep(FENCE_INTERVAL_S if is_supported else FENCE_RETRY_DELAY_S)


def get_or_create_token_bucket(
    resource: str, limit: int, ttl: float = LEASE_TTL_S, fence: HolderFence | None = None
) -> ActorHandle[TokenBucketWorker]:
    """Return the cluster's actor of a resource, creating it if necessary.

    Args:
        resource: Name of the resource.
        limit: Limit to create the actor with.
        ttl: Lifetime of a lease, in seconds.
        fence: Function that makes the resource reject the work of a dead holder.
    """
    options = {"max_concurrency": MAX_OPEN_CALLS, "resources": {"node:__internal_head__": 0.001}}
    worker = shared_actor(TokenBucketWorker, ACTOR_NAME_PREFIX + resource, **options)
    return cast("ActorHandle[TokenBucketWorker]", worker.remote(resource, limit, ttl, fence))


def shared_actor(actor_class: type, name: str, **options: Any) -> Any:
    """Return the Ray class of a detached actor that all jobs of the cluster find by its name."""
    found_by_all = {"name": name, "namespace": RAY_NAMESPACE, "get_if_exists": True, "lifetime": "detached"}
    return ray.remote(actor_class).options(**found_by_all, max_restarts=-1, num_cpus=0, **options)


def find_token_bucket(resource: str) -> ActorHandle[TokenBucketWorker]:
    """Return the cluster's actor of a resource.

    Raises:
        ValueError: If the cluster has none.
    """
    return ray.get_actor(ACTOR_NAME_PREFIX + resource, RAY_NAMESPACE)


def limited_resources() -> list[str]:
    """Return the names of all limited resources of the cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = (actor["name"] for actor in actors if actor["namespace"] == RAY_NAMESPACE)
    return sorted(name.removeprefix(ACTOR_NAME_PREFIX) for name in names if name.startswith(ACTOR_NAME_PREFIX))


def limiter_status(resource: str, timeout: float = 10.0) -> LimiterStatus:
    """Return the current status of a resource. Raises ValueError if the cluster has no limit for it."""
    return LimiterStatus(*ray.get(find_token_bucket(resource).status.remote(), timeout=timeout))


def set_limit(resource: str, limit: int, timeout: float = 10.0) -> int:
    """Change a resource's limit for the whole cluster. Return the version of the new limit."""
    return cast("int", ray.get(find_token_bucket(resource).set_limit.remote(limit), timeout=timeout))
