"""Limiter whose slots and credit are leased from a ledger.

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
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any
from uuid import uuid4

from toolroll._internal.event_loop_thread import shared_event_loop_thread
from toolroll.limiter.ledger.lease import Lease, LeasedSlots
from toolroll.limiter.ledger.ledger import LEASE_TTL_S, RENEWALS_PER_LEASE, Ledger, LimiterStatus
from toolroll.limiter.ledger.policy import LimitPolicy
from toolroll.limiter.ledger.service import LedgerService
from toolroll.limiter.limiter import Limiter
from toolroll.limiter.slot_queue import SlotQueue

logger = logging.getLogger(__name__)

MIN_REPORT_INTERVAL_S = 0.002
"""Minimum interval between two reports while slots are not contended. Groups the requests of a burst."""

LOST_CALL_RENEWAL_INTERVALS = 1.5
"""Number of renewal intervals after which an unanswered call is considered lost."""

LIMITER_RETRY_DELAY_S = 0.2
"""Average delay before the next attempt to reach the limiter."""

SendReport = Callable[[tuple[Any, ...]], Awaitable[tuple[Any, ...] | None]]
"""Function that sends a report to the ledger and returns its answer."""

SaveBudgets = Callable[[Mapping[str, float]], None]
"""Function that saves the amounts of budgets that may be spent from now on, by unit. Called in a thread."""


class LeasedLimiter(Limiter):
    """Limiter that leases slots and credit from a ledger.

    Args:
        resource: Name of the resource.
        policy: Limits of the resource.
        ttl: Lifetime of a lease, in seconds.
    """

    def __init__(self, resource: str, policy: LimitPolicy, ttl: float = LEASE_TTL_S) -> None:
        self._policy = policy
        self._ttl = ttl
        self.holder = f"{os.uname().nodename}:{os.getpid()}:{uuid4().hex[:12]}"
        """Name of this process in the ledger."""
        self.reports_sent = 0
        """Number of reports sent, that is of calls to the ledger."""
        self._demand_changed = asyncio.Event()
        self._wake_scheduled = False
        self._logged_level = 0
        lease = Lease(limit=policy.max)
        super().__init__(SlotQueue(resource, LeasedSlots(self.holder, lease), self._on_waiting))
        self._thread = shared_event_loop_thread("toolroll-limiter")
        self._tasks = [self._thread.submit(task) for task in self._background_tasks()]

    def close(self) -> None:
        """Return this process's unused slots and credit. Call it when no slot is in use."""
        for task in self._tasks:
            task.cancel()
        self._queue.terminate()

    def _background_tasks(self) -> list[Coroutine[Any, Any, None]]:
        return [self._keep_lease()]

    async def _connect(self) -> SendReport:
        """Wait until the ledger can be reached, and return the function that sends reports to it."""
        raise NotImplementedError

    def _is_connected(self) -> bool:
        """Return False if reports must not be sent any more before `_connect` is called again."""
        return True

    def _on_waiting(self) -> None:
        """Wake the background thread, once for many waiters. Called from any thread.

        While slots are contended there is always a waiter, so the thread polls and need not be woken, except for a
        rejection, which must be reported at once.
        """
        is_urgent = self._queue.has_unreported_rejection
        if not self._wake_scheduled and (is_urgent or not self._queue.lease.contended):
            self._wake_scheduled = True
            self._thread.call_soon_threadsafe(self._demand_changed.set)

    async def _keep_lease(self) -> None:
        while True:
            try:
                await self._exchange_reports(await self._connect())
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

    async def _exchange_reports(self, send: SendReport) -> None:
        """Send reports and apply their answers, until a call fails or the process is disconnected from the ledger."""
        while self._is_connected():
            sent_at = time.monotonic()
            call: asyncio.Future[Any] = asyncio.ensure_future(send(tuple(self._queue.report())))
            call.add_done_callback(_retrieve_exception)
            self.reports_sent += 1
            while not call.done() and not await self._must_report_again(call, sent_at):
                pass
            if call.done() and (answer := call.result()) is not None:
                self._apply_lease(Lease(*answer))

    async def _must_report_again(self, call: asyncio.Future[Any], sent_at: float) -> bool:
        """Wait for the answer to the open call, or for a change. Return True to send a report without the answer."""
        await self._wait(call, sent_at + MIN_REPORT_INTERVAL_S)
        earliest = sent_at + self._queue.report_interval
        if not call.done() and not self._queue.has_unreported_rejection and earliest > time.monotonic():
            await self._wait(call, earliest, self._demand_changed)
        call_timeout = LOST_CALL_RENEWAL_INTERVALS * max(self._ttl, self._queue.lease.ttl) / RENEWALS_PER_LEASE
        if not call.done() and not self._queue.has_unreported_rejection:
            timeout = self._queue.report_interval or call_timeout
            await self._wait(call, time.monotonic() + timeout, self._demand_changed)
        self._demand_changed.clear()
        self._wake_scheduled = False
        return self._queue.should_report or time.monotonic() - sent_at > call_timeout

    async def _wait(self, call: asyncio.Future[Any], until: float, change: asyncio.Event | None = None) -> None:
        """Wait for the answer to a call, or for a change, until a point in time."""
        awaited = {call} if change is None else {call, asyncio.ensure_future(change.wait())}
        try:
            timeout = max(0.0, until - time.monotonic())
            await asyncio.wait(awaited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in awaited - {call}:
                future.cancel()

    def _apply_lease(self, lease: Lease) -> bool:
        """Apply an answer. Return False if it was ignored."""
        self._logged_level = 0
        return self._queue.apply(lease)


class LocalLedgerLimiter(LeasedLimiter):
    """Limits of a single process that adapt, or have rates or budgets. Does not use Ray.

    Args:
        resource: Name of the resource.
        policy: Limits of the resource.
    """

    def __init__(self, resource: str, policy: LimitPolicy) -> None:
        self._service: LedgerService | None = None
        self._budget_savers: list[SaveBudgets] = []
        super().__init__(resource, policy)

    def add_budget_saver(self, save: SaveBudgets) -> None:
        """Have a function save the amounts of budgets before credit for them is granted.

        Args:
            save: The function. Credit is granted when it has returned.
        """
        self._budget_savers.append(save)

    def remove_budget_saver(self, save: SaveBudgets) -> None:
        """Undo `add_budget_saver`."""
        self._budget_savers.remove(save)

    def restore_spent(self, spent: Mapping[str, float]) -> None:
        """Make sure that at least these amounts of budgets count as spent. See `Limiter.restore_spent`."""
        self._thread.submit(self._restore_spent(spent)).result()

    def set_limit(
        self,
        limit: int | None = None,
        *,
        minimum: int | None = None,
        rates: Mapping[str, float] | None = None,
        budgets: Mapping[str, float] | None = None,
    ) -> None:
        """Change limits.

        Args:
            limit: New limit, or maximum of a limit that adapts.
            minimum: New minimum of a limit that adapts.
            rates: New rates per second, by unit.
            budgets: New totals, by unit.
        """
        self._thread.submit(self._set_limits(limit, minimum, rates, budgets)).result()

    def status(self) -> LimiterStatus:
        """Return the current status of the limits."""
        return LimiterStatus(*self._thread.submit(self._get_status()).result())

    def close(self) -> None:
        """Stop the limiter. Call it when no slot is in use."""
        super().close()
        if self._service is not None:
            self._thread.call_soon_threadsafe(self._service.close)

    async def _connect(self) -> SendReport:
        return self._get_service().report

    async def _restore_spent(self, spent: Mapping[str, float]) -> None:
        await self._get_service().restore_spent(spent)

    async def _set_limits(self, *limits: Any) -> None:
        await self._get_service().set_limits(*limits)

    async def _get_status(self) -> tuple[Any, ...]:
        return await self._get_service().status()

    def _get_service(self) -> LedgerService:
        """Return the ledger's service, created in the background thread whose event loop it uses."""
        if self._service is None:
            self._service = LocalLedgerService(self.resource, Ledger(self._policy, self._ttl), self._budget_savers)
        return self._service


class LocalLedgerService(LedgerService):
    """Ledger of one process. It ends with the process, so that only the amounts of its budgets are worth saving.

    Args:
        resource: Name of the resource.
        ledger: The ledger.
        budget_savers: Functions that save the amounts that may be spent. The caller may change the list.
    """

    def __init__(self, resource: str, ledger: Ledger, budget_savers: Sequence[SaveBudgets]) -> None:
        super().__init__(resource, ledger)
        self._budget_savers = budget_savers

    async def _write_checkpoint(self, saved: str) -> None:
        amounts = self._ledger.credit.committed()
        for save in list(self._budget_savers):
            await asyncio.to_thread(save, amounts)


def _retrieve_exception(call: asyncio.Future[Any]) -> None:
    """Keep asyncio from logging the exception of a call that a later one has superseded."""
    if not call.cancelled():
        call.exception()
