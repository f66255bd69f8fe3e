"""Limiter whose slots are leased from the cluster's ledger.

A background thread exchanges reports and leases with the ledger, so that leases are renewed even if the event loops
that use the limiter are busy or short-lived. Slots are granted without a remote call: one call to the ledger is always
open, and the ledger answers it when the lease changes. Another call is sent when this process's demand changes, but not
more often than the ledger allows.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from typing import Any
from uuid import uuid4

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from toolroll._internal.event_loop_thread import shared_event_loop_thread
from toolroll.limiter.lease import HolderFence, Lease, LeasedSlots
from toolroll.limiter.ledger import LEASE_TTL_S, RENEWALS_PER_LEASE
from toolroll.limiter.limiter import Limiter
from toolroll.limiter.node_watcher import get_node_watcher, process_start_time
from toolroll.limiter.slot_queue import SlotQueue
from toolroll.limiter.token_bucket import TokenBucketWorker, get_or_create_token_bucket

logger = logging.getLogger(__name__)

MIN_REPORT_INTERVAL_S = 0.002
"""Minimum interval between two reports while slots are not contended. Groups the requests of a burst."""

LOST_CALL_RENEWAL_INTERVALS = 1.5
"""Number of renewal intervals after which an unanswered call is considered lost."""

WATCH_REFRESH_INTERVAL_S = 5.0
"""Interval between registrations with the node's watcher, which may have been restarted."""

LIMITER_RETRY_DELAY_S = 0.2
"""Average delay before the next attempt to reach the limiter."""


class ClusterLimiter(Limiter):
    """This process's part of a limit that the whole Ray cluster shares.

    Args:
        resource: Name of the resource.
        limit: Limit to create the resource with. If the cluster already has a limit for it, that one applies.
        ttl: Lifetime of a lease, in seconds.
        fence: Function that makes the resource reject the work of a dead process.
    """

    def __init__(self, resource: str, limit: int, ttl: float = LEASE_TTL_S, fence: HolderFence | None = None) -> None:
        self._requested_limit = limit
        self._ttl = ttl
        self._fence = fence
        self.holder = f"{os.uname().nodename}:{os.getpid()}:{uuid4().hex[:12]}"
        """Name of this process in the ledger."""
        self.reports_sent = 0
        """Number of reports sent, that is of remote calls."""
        self.watched = False
        """Whether the node's watcher would report the death of this process at once."""
        self._demand_changed = asyncio.Event()
        self._wake_scheduled = False
        self._logged_level = 0
        self._warned_version: int | None = None
        super().__init__(SlotQueue(resource, LeasedSlots(self.holder, Lease(limit=limit)), self._on_waiting))
        self._thread = shared_event_loop_thread("toolroll-limiter")
        self._tasks = [self._thread.submit(self._keep_lease()), self._thread.submit(self._keep_watched())]

    def set_limit(self, limit: int) -> None:
        """Change the limit for the whole cluster."""
        ray.get(self._worker().set_limit.remote(limit))

    def close(self) -> None:
        """Deregister from the ledger, so that the slots are available at once. Call it when no slot is in use."""
        for task in self._tasks:
            task.cancel()
        self._queue.terminate()
        if ray.is_initialized() and not self.in_use:
            try:
                ray.get(self._worker().deregister.remote(self.holder), timeout=self._ttl)
            except RayError as error:
                logger.info("%s: slots become available when the lease ends: %s", self.resource, error)

    def _worker(self) -> ActorHandle[TokenBucketWorker]:
        return get_or_create_token_bucket(self.resource, self._requested_limit, self._ttl, self._fence)

    def _on_waiting(self) -> None:
        """Wake the background thread, once for many waiters. Called from any thread.

        While slots are contended there is always a waiter, so the thread polls and need not be woken.
        """
        if not self._wake_scheduled and not self._queue.report_interval:
            self._wake_scheduled = True
            self._thread.call_soon_threadsafe(self._demand_changed.set)

    async def _keep_lease(self) -> None:
        while True:
            try:
                await _wait_until_connected()
                await self._exchange_reports(self._worker())
            except Exception as error:  # any error: the lease must be renewed before it expires
                self._log_failure(error)
                await asyncio.sleep(LIMITER_RETRY_DELAY_S * (0.5 + random.random()))  # noqa: S311

    def _log_failure(self, error: Exception) -> None:
        """Log a failure once while the lease is valid, and once after it has expired."""
        expired = self._queue.lease_expired
        level = logging.WARNING if expired else logging.INFO
        if level > self._logged_level:
            self._logged_level = level
            state = "expired, no slots can be granted" if expired else "still valid"
            logger.log(level, "%s: cannot reach the limiter (lease %s): %s", self.resource, state, error)

    async def _exchange_reports(self, worker: ActorHandle[TokenBucketWorker]) -> None:
        """Send reports and apply their answers, until a call fails or the process disconnects from the cluster."""
        while ray.is_initialized():  # otherwise a remote call would start another cluster
            sent_at = time.monotonic()
            call: asyncio.Future[Any] = asyncio.ensure_future(worker.report.remote(tuple(self._queue.report())))
            call.add_done_callback(_retrieve_exception)
            self.reports_sent += 1
            while not call.done() and not await self._must_report_again(call, sent_at):
                pass
            if call.done() and (answer := call.result()) is not None:
                self._apply_lease(Lease(*answer))

    async def _must_report_again(self, call: asyncio.Future[Any], sent_at: float) -> bool:
        """Wait for the answer to the open call, or for a change. Return True to send a report without the answer."""
        earliest = sent_at + max(MIN_REPORT_INTERVAL_S, self._queue.report_interval)
        await asyncio.wait({call}, timeout=max(0.0, earliest - time.monotonic()))
        call_timeout = LOST_CALL_RENEWAL_INTERVALS * max(self._ttl, self._queue.lease.ttl) / RENEWALS_PER_LEASE
        if not call.done():
            change = asyncio.ensure_future(self._demand_changed.wait())
            try:
                timeout = self._queue.report_interval or call_timeout
                await asyncio.wait({call, change}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            finally:
                change.cancel()
        self._demand_changed.clear()
        self._wake_scheduled = False
        return self._queue.should_report or time.monotonic() - sent_at > call_timeout

    def _apply_lease(self, lease: Lease) -> None:
        self._logged_level = 0
        requested = self._requested_limit
        if self._queue.apply(lease) and lease.limit != requested and lease.version != self._warned_version:
            self._warned_version = lease.version
            command = f"toolroll limiter set {self.resource!r} {requested}"
            message = "%s: limit=%d ignored: the cluster uses limit=%d. To change it for all processes: %s"
            logger.warning(message, self.resource, requested, lease.limit, command)

    async def _keep_watched(self) -> None:
        """Register with the node's watcher. Without it, the slots of a dead process return when its lease ends."""
        pid = os.getpid()
        while True:
            try:
                await _wait_until_connected()
                watch: Any = get_node_watcher().watch
                self.watched = await watch.remote(pid, process_start_time(pid), self.resource, self.holder)
            except (RayError, RuntimeError, OSError) as error:
                self.watched = False
                logger.info("%s: cannot register with the node watcher: %s", self.resource, error)
            await asyncio.sleep(WATCH_REFRESH_INTERVAL_S if self.watched else LIMITER_RETRY_DELAY_S)


def _retrieve_exception(call: asyncio.Future[Any]) -> None:
    """Keep asyncio from logging the exception of a call that a later one has superseded."""
    if not call.cancelled():
        call.exception()


async def _wait_until_connected() -> None:
    """Wait until this process is connected to Ray. A remote call before that would start another cluster."""
    while not ray.is_initialized():  # noqa: ASYNC110 (Ray has no event for it)
        await asyncio.sleep(LIMITER_RETRY_DELAY_S)
