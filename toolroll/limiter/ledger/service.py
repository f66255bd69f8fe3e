"""Service that runs the ledger of one resource: receives reports and answers them.

A report is answered when its lease changes, or after a fraction of the lease's lifetime. So each holder has one open
call, and changes reach all holders at once. Slots are divided once per tick, independently of the number of reports.
Ticks take at most a tenth of the service's time.

The checkpoint is saved before any holder gets a lease that a restarted service must know of. A renewal does not change
it, so that it is rarely written.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from toolroll.limiter.ledger.lease import HolderFence, HolderReport, Lease
from toolroll.limiter.ledger.ledger import Ledger, LimiterStatus

logger = logging.getLogger(__name__)

MIN_TICK_INTERVAL_S = 0.002
"""Minimum interval between two divisions. Reports that arrive meanwhile are handled together."""

SAVE_RETRY_DELAY_S = 1.0
"""Delay before the next attempt to save the checkpoint."""

FENCE_INTERVAL_S = 0.5
"""Interval at which a resource is asked how much work of dead holders still runs."""

FENCE_RETRY_DELAY_S = 5.0
"""Delay before the next question if the resource could not answer any."""


class LedgerService:
    """Ledger of one resource, with the open calls of its holders.

    Args:
        resource: Name of the resource.
        ledger: The ledger.
        is_saved: Whether the ledger's checkpoint is saved.
        fence: Function that makes the resource reject the work of a dead holder.
    """

    def __init__(
        self, resource: str, ledger: Ledger, *, is_saved: bool = False, fence: HolderFence | None = None
    ) -> None:
        self._resource = resource
        self._ledger = ledger
        self._fence = fence
        self._saved_revision = ledger.revision if is_saved else 0
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

    async def deregister(self, holder: str, spent: Mapping[str, float]) -> None:
        """Remove a holder that uses no slots any more, and has spent these amounts in total."""
        self._ledger.deregister(holder, time.monotonic(), spent)
        self._answer(holder, None)
        self._changed.set()

    async def set_limits(
        self,
        limit: int | None = None,
        minimum: int | None = None,
        rates: Mapping[str, float] | None = None,
        budgets: Mapping[str, float] | None = None,
    ) -> int:
        """Change limits for all holders. Return their version.

        Args:
            limit: New limit, or maximum of a limit that adapts.
            minimum: New minimum of a limit that adapts.
            rates: New rates per second, by unit. The other rates remain.
            budgets: New totals, by unit. The other budgets remain.
        """
        policy = self._ledger.policy.changed(limit, minimum, rates or {}, budgets or {})
        version = self._ledger.set_policy(policy, time.monotonic())
        logger.info("%s: limits changed: %s", self._resource, policy)
        await self._save()
        self._answer_all()
        return version

    async def restore_spent(self, spent: Mapping[str, float]) -> None:
        """Make sure that at least these amounts of budgets count as spent, by unit."""
        self._ledger.restore_spent(spent)
        await self._save()
        self._answer_all()

    async def status(self) -> tuple[Any, ...]:
        """Return the current `LimiterStatus` as a tuple."""
        self._ledger.divide(time.monotonic())
        return tuple(self._ledger.status())

    async def get_current_count(self) -> int:
        """Return the number of slots in use, over all processes."""
        return LimiterStatus(*await self.status()).in_use

    def close(self) -> None:
        """Stop the background tasks and end the open calls. Called in the event loop of the service."""
        for task in self._tasks.values():
            task.cancel()
        for holder in list(self._open):
            self._answer(holder, None)

    async def _write_checkpoint(self, saved: str) -> None:
        """Save a checkpoint where a replacement of this service finds it."""
        raise NotImplementedError

    def _answer_all(self) -> None:
        """Answer all open calls in the next tick."""
        for holder, (answer, _) in self._open.items():
            self._open[holder] = answer, time.monotonic()
        self._changed.set()

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
            elif self._ledger.required_revision(holder) > self._saved_revision:
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
            await self._write_checkpoint(saved)
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
