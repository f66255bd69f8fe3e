"""ClusterLimiter: a gate whose slots are leased from the cluster's ledger.

The reports are carried by a thread of the process's own, so that the lease is renewed however busy or short-lived the
event loops are that use it. No call is made per execution: one call is open to the ledger, which answers when there is
something new; another is sent when this process has news, no oftener than the ledger asks for.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any
from uuid import uuid4

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from toolroll.limiter.gate import Gate
from toolroll.limiter.lease import Allowance, Lease
from toolroll.limiter.ledger import LEASE_TTL, RENEWALS_PER_LEASE
from toolroll.limiter.limiter import Limiter
from toolroll.limiter.token_bucket import TokenBucketWorker, token_bucket
from toolroll.limiter.watcher import birth, node_watcher

logger = logging.getLogger(__name__)

BURST = 0.002
"""Seconds between two reports while slots are plenty: a burst of requests is told of once."""

PATIENCE = 1.5
"""How many renewal times a call may stay open before it is taken for lost."""

WATCH_AGAIN = 5.0
"""Seconds after which the node's watcher is asked again, in case that it was started anew."""

RETRY = 0.2
"""Seconds before a limiter that could not be reached is tried again, on average."""


class ClusterLimiter(Limiter):
    """This process's part of a limit that the whole cluster shares."""

    def __init__(self, resource: str, limit: int, ttl: float = LEASE_TTL) -> None:
        self._asked = limit
        self._ttl = ttl
        self.holder = f"{os.uname().nodename}:{os.getpid()}:{uuid4().hex[:12]}"
        """This process's name in the ledger."""
        self.reports = 0
        """How many reports have been sent: what the limiter costs, in calls."""
        self.watched = False
        """Whether the death of this process would be noticed at once, and not only when its lease runs out."""
        self._news = asyncio.Event()
        self._told = False
        self._trouble = 0
        self._warned_of: int | None = None
        super().__init__(Gate(resource, Allowance(self.holder, limit), self._on_news))
        self._carrier = _carrier()
        self._tasks: list[Future[None]] = [self._carrier.run(self._carry()), self._carrier.run(self._be_watched())]

    def set_limit(self, limit: int) -> None:
        """Change the limit for the whole cluster, at once."""
        ray.get(self._worker().set_limit.remote(limit))

    def close(self) -> None:
        """Say goodbye, so that the slots needn't wait for the lease to run out. Call it when none is in use."""
        for task in self._tasks:
            task.cancel()
        self._gate.end()
        if ray.is_initialized() and not self.in_use:
            ray.get(self._worker().leave.remote(self.holder))

    def _worker(self) -> ActorHandle[TokenBucketWorker]:
        return token_bucket(self.resource, self._asked, self._ttl, heir=self._gate.ttl > 0)

    def _on_news(self) -> None:
        """Somebody has to wait. Called from any thread, often: the carrier is woken once for all of them.

        In a shortage it isn't woken at all: somebody waits all the time then, and it looks by itself.
        """
        if not self._told and not self._gate.interval:
            self._told = True
            self._carrier.loop.call_soon_threadsafe(self._news.set)

    async def _carry(self) -> None:
        while True:
            try:
                await _connected()
                await self._exchange(self._worker())
            except (
                Exception
            ) as error:  # whatever it is: the lease that we have goes on, and must be renewed before its end
                self._note_trouble(error)
                await asyncio.sleep(RETRY * (0.5 + random.random()))  # noqa: S311

    def _note_trouble(self, error: Exception) -> None:
        """Say it once when the limiter can't be reached, and once more when that begins to matter."""
        level = logging.WARNING if self._gate.lapsed else logging.INFO
        if level > self._trouble:
            what = "so nothing can be begun" if self._gate.lapsed else "the lease goes on meanwhile"
            logger.log(level, "%s: the limiter can't be reached, %s: %s", self.resource, what, error)
        self._trouble = max(self._trouble, level)

    async def _exchange(self, worker: ActorHandle[TokenBucketWorker]) -> None:
        """Send reports and heed their answers, until something fails, or this process has left the cluster."""
        while ray.is_initialized():  # a call without that would start a cluster of its own
            opened = time.monotonic()
            call = asyncio.ensure_future(_result(worker.report.remote(tuple(self._gate.report()))))
            self.reports += 1
            while not call.done() and not await self._news_came(call, opened):
                pass
            if call.done() and (answer := call.result()) is not None:
                self._heed(Lease(*answer))

    async def _news_came(self, call: asyncio.Future[Any], opened: float) -> bool:
        """Wait a while for the answer to the open call. True: there is news to send without it, or it is lost."""
        earliest = opened + max(BURST, self._gate.interval)
        await asyncio.wait({call}, timeout=max(0.0, earliest - time.monotonic()))
        patience = PATIENCE * max(self._ttl, self._gate.ttl) / RENEWALS_PER_LEASE
        if not call.done():
            news = asyncio.ensure_future(self._news.wait())
            try:
                pause = self._gate.interval or patience
                await asyncio.wait({call, news}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
        self._news.clear()
        self._told = False
        return self._gate.has_news or time.monotonic() - opened > patience

    def _heed(self, lease: Lease) -> None:
        self._trouble = 0
        if self._gate.apply(lease) and lease.limit != self._asked and lease.version != self._warned_of:
            self._warned_of = lease.version
            logger.warning(
                "%s: asked for a limit of %d, but the cluster's is %d, and that holds. To change it for all: "
                "toolroll limiter set %r %d",
                self.resource,
                self._asked,
                lease.limit,
                self.resource,
                self._asked,
            )

    async def _be_watched(self) -> None:
        """Have the death of this process noticed at once. Without it, its lease must run out first."""
        pid = os.getpid()
        while True:
            try:
                await _connected()
                watching: Any = node_watcher().watch.remote(pid, birth(pid), self.resource, self.holder)
                self.watched = await watching
            except (RayError, RuntimeError, OSError) as error:
                self.watched = False
                logger.info("%s: not watched for the moment: %s", self.resource, error)
            await asyncio.sleep(WATCH_AGAIN if self.watched else RETRY)


async def _connected() -> None:
    """Wait until this process is connected to Ray. To call an actor without that would start a cluster of its own."""
    while not ray.is_initialized():  # noqa: ASYNC110 (Ray tells nobody)
        await asyncio.sleep(RETRY)


async def _result(reference: Any) -> Any:
    return await reference


class _Carrier:
    """A thread with an event loop, for the calls of all limiters of this process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="toolroll-limiter", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)


_the_carrier: _Carrier | None = None


def _carrier() -> _Carrier:
    global _the_carrier
    if _the_carrier is None or _the_carrier.pid != os.getpid():  # a forked process hasn't its parent's threads
        _the_carrier = _Carrier()
    return _the_carrier
