"""TokenBucketWorker: the ledger as a Ray actor, one per resource for the whole cluster.

It is detached, restarted without end, and named after its resource in a namespace of its own, so that every job on the
cluster finds the same one and none takes it along when it ends. It lives on the head node, which the cluster can't
lose.

A report is answered when there is something new to say, at the latest after a part of the lease's life: so every holder
has one call open here, and a change reaches all at once. Slots are divided once per tick, whatever the number of
reports; a tick takes no more than a tenth of the actor's time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import warnings
from typing import Any, cast

import ray
from ray.actor import ActorHandle

from toolroll.limiter.lease import Lease, Report
from toolroll.limiter.ledger import LEASE_TTL, Ledger, Standing

logger = logging.getLogger(__name__)

NAMESPACE = "toolroll"
"""Ray's namespace for all actors of ours: not the job's own, or each job would have its own limit."""

PREFIX = "limiter:"

MAX_OPEN_CALLS = 1_000_000
"""Each holder has a call open here, and one more for a moment while it sends the next. Ray's own default is 1,000."""

TICK = 0.002
"""Seconds between a report and the division that heeds it, at the least: what arrives meanwhile is divided with it."""

CLOCKWORK = 0.05
"""Seconds after which is divided at the latest, to see what has run out."""


class TokenBucketWorker:
    """One resource's ledger. Ray makes the actor of it; see `token_bucket`."""

    def __init__(self, resource: str, limit: int, ttl: float = LEASE_TTL, heir: bool = False) -> None:
        with warnings.catch_warnings():  # Ray's own call, of a function that Ray has deprecated
            warnings.simplefilter("ignore")
            restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._ledger = Ledger(limit, ttl, restarted=time.monotonic() if restarted or heir else None)
        self._resource = resource
        self._open: dict[str, tuple[asyncio.Future[Lease | None], float]] = {}
        """The answers that are owed, with the time at which each is due."""
        self._news = asyncio.Event()
        self._clock: asyncio.Task[None] | None = None

    async def report(self, report: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """A holder's report; the lease that answers it, or None where it is void or overtaken by a later one."""
        self._start()
        told, now = Report(*report), time.monotonic()
        if not self._ledger.report(told, now):
            return None
        self._drop(told.holder)
        answer: asyncio.Future[Lease | None] = asyncio.get_running_loop().create_future()
        self._open[told.holder] = answer, now + self._ledger.renewal
        self._news.set()
        lease = await answer
        return None if lease is None else tuple(lease)

    async def gone(self, holder: str) -> None:
        """A holder's process has died, for certain."""
        self._ledger.gone(holder, time.monotonic())
        self._drop(holder)
        self._news.set()

    async def leave(self, holder: str) -> None:
        """A holder says goodbye."""
        self._ledger.leave(holder, time.monotonic())
        self._drop(holder)
        self._news.set()

    async def set_limit(self, limit: int) -> int:
        """Change the limit for all, at once. Its version."""
        version = self._ledger.set_limit(limit)
        logger.info("limit of %s set to %d", self._resource, limit)
        for holder in self._open:  # all should know, also those whose share stays the same
            self._open[holder] = self._open[holder][0], time.monotonic()
        self._news.set()
        return version

    async def standing(self) -> tuple[Any, ...]:
        """What `toolroll limiter status` shows."""
        self._ledger.divide(time.monotonic())
        return tuple(self._ledger.standing(time.monotonic()))

    async def pid(self) -> int:
        """Of the actor's process."""
        return os.getpid()

    def _start(self) -> None:
        if self._clock is None:
            self._clock = asyncio.create_task(self._run())

    def _drop(self, holder: str) -> None:
        """An answer that is owed no longer."""
        if owed := self._open.pop(holder, None):
            _settle(owed[0], None)

    async def _run(self) -> None:
        while True:
            began = time.monotonic()
            self._news.clear()
            try:
                self._tick(began)
            except Exception:  # a tick that fails must not be the last one
                logger.exception("%s: dividing failed", self._resource)
            took = time.monotonic() - began
            await asyncio.sleep(max(TICK, 9 * took))
            try:
                await asyncio.wait_for(self._news.wait(), CLOCKWORK)
            except TimeoutError:
                continue

    def _tick(self, now: float) -> None:
        self._ledger.divide(now)
        for holder in list(self._open):
            answer, due = self._open[holder]
            if holder not in self._ledger.holders:
                self._drop(holder)
            elif lease := self._ledger.answer(holder, now, due=now >= due):
                del self._open[holder]
                _settle(answer, lease)


def _settle(answer: asyncio.Future[Lease | None], lease: Lease | None) -> None:
    if not answer.done():  # it is, where Ray has cancelled the call of a process that died
        answer.set_result(lease)


def token_bucket(
    resource: str, limit: int, ttl: float = LEASE_TTL, *, heir: bool = False
) -> ActorHandle[TokenBucketWorker]:
    """The cluster's limiter of a resource, made with `limit` if there is none.

    `heir`: there was one, by whose leases somebody may still go. One that is made now has to listen first.
    """
    worker = ray.remote(TokenBucketWorker).options(
        name=PREFIX + resource,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=MAX_OPEN_CALLS,
        num_cpus=0,
        resources={"node:__internal_head__": 0.001},
    )
    return cast("ActorHandle[TokenBucketWorker]", worker.remote(resource, limit, ttl, heir))


def resources() -> list[str]:
    """The resources that have a limiter on the cluster."""
    named = ray.util.list_named_actors(all_namespaces=True)
    ours = (actor["name"] for actor in named if actor["namespace"] == NAMESPACE)
    return sorted(name.removeprefix(PREFIX) for name in ours if name.startswith(PREFIX))


def find(resource: str) -> ActorHandle[TokenBucketWorker]:
    """The cluster's limiter of a resource. Raises ValueError where there is none."""
    return ray.get_actor(PREFIX + resource, NAMESPACE)


def standing(resource: str, timeout: float = 10.0) -> Standing:
    """How a resource stands now."""
    return Standing(*ray.get(find(resource).standing.remote(), timeout=timeout))


def set_limit(resource: str, limit: int, timeout: float = 10.0) -> int:
    """Change a resource's limit for the whole cluster, at once. Its version."""
    return cast("int", ray.get(find(resource).set_limit.remote(limit), timeout=timeout))
