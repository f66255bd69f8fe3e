"""Limiter whose slots and credit are leased from the ledger of a Ray cluster."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine, Mapping
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from toolroll.limiter.leased_limiter import LIMITER_RETRY_DELAY_S, LeasedLimiter, SendReport
from toolroll.limiter.ledger.lease import HolderFence, Lease
from toolroll.limiter.ledger.ledger import LEASE_TTL_S, LimiterStatus
from toolroll.limiter.ledger.policy import LimitPolicy
from toolroll.limiter.node_watcher import get_node_watcher, process_start_time
from toolroll.limiter.token_bucket import TokenBucketWorker, get_or_create_token_bucket

logger = logging.getLogger(__name__)

SPENT_TIMEOUT_S = 2.0
"""Timeout of a question for the spent budgets."""

WATCH_REFRESH_INTERVAL_S = 5.0
"""Interval between registrations with the node's watcher, which may have been restarted."""


class ClusterLimiter(LeasedLimiter):
    """This process's part of limits that the whole Ray cluster shares.

    Args:
        resource: Name of the resource.
        policy: Limits to create the resource with, or a fixed limit. If the cluster already has limits for the
            resource, those apply.
        ttl: Lifetime of a lease, in seconds.
        fence: Function that makes the resource reject the work of a dead process.
    """

    def __init__(
        self, resource: str, policy: LimitPolicy | int, ttl: float = LEASE_TTL_S, fence: HolderFence | None = None
    ) -> None:
        self._fence = fence
        self.watched = False
        """Whether the node's watcher would report the death of this process at once."""
        self._cluster_id = connected_cluster()
        """Identifier of the limiter's cluster; None if the process was not connected at the start."""
        self._warned_version: int | None = None
        self._fetched_spent: dict[str, float] = {}
        """What all processes had spent of each budget when it was fetched last."""
        super().__init__(resource, LimitPolicy.fixed(policy) if isinstance(policy, int) else policy, ttl)

    def set_limit(self, limit: int) -> None:
        """Change the limit for the whole cluster."""
        ray.get(self._worker().set_limits.remote(limit))

    def restore_spent(self, spent: Mapping[str, float]) -> None:
        """Make sure that at least these amounts of budgets count as spent. See `Limiter.restore_spent`."""
        ray.get(self._worker().restore_spent.remote(dict(spent)))

    def fetch_spent(self) -> dict[str, float]:
        """Return what all processes have spent of each budget. See `Limiter.fetch_spent`."""
        try:
            status = LimiterStatus(*ray.get(self._worker().status.remote(), timeout=SPENT_TIMEOUT_S))
        except RayError as error:
            logger.info("%s: cannot fetch the spent budgets: %s", self.resource, error)
            # This process may have exchanged no report since the amounts were fetched.
            known = self.spent
            return {
                unit: max(known.get(unit, 0.0), self._fetched_spent.get(unit, 0.0))
                for unit in {*known, *self._fetched_spent}
            }
        self._fetched_spent = dict(status.spent)
        return dict(status.spent)

    def close(self) -> None:
        """Return this process's slots and credit to the cluster at once. Call it when no slot is in use."""
        super().close()
        if self._is_connected() and not self.in_use:
            try:
                ray.get(self._worker().deregister.remote(self.holder, self._queue.spent()), timeout=self._ttl)
            except RayError as error:
                logger.info("%s: slots become available when the lease ends: %s", self.resource, error)

    def _worker(self) -> ActorHandle[TokenBucketWorker]:
        return get_or_create_token_bucket(self.resource, self._policy, self._ttl, self._fence)

    def _background_tasks(self) -> list[Coroutine[Any, Any, None]]:
        return [*super()._background_tasks(), self._keep_watched()]

    async def _connect(self) -> SendReport:
        await self._wait_until_connected()
        worker: Any = self._worker()
        return worker.report.remote  # type: ignore[no-any-return]

    def _is_connected(self) -> bool:
        # Otherwise a remote call would start another cluster, or create the resource with these limits in another one.
        current = connected_cluster()
        return current is not None and self._cluster_id in (None, current)

    def _apply_lease(self, lease: Lease) -> bool:
        is_applied = super()._apply_lease(lease)
        current = lease.policy
        if not is_applied or current is None or not self._policy.has_limits or current == self._policy:
            return is_applied
        if lease.version != self._warned_version:
            self._warned_version = lease.version
            command = self._policy.command_to_replace(current, self.resource)
            message = "%s: %s ignored: the cluster uses %s. To change it for all processes: %s"
            logger.warning(message, self.resource, self._policy, current, command)
        return is_applied

    async def _keep_watched(self) -> None:
        """Register with the node's watcher. Without it, the slots of a dead process return when its lease ends."""
        pid = os.getpid()
        while True:
            try:
                await self._wait_until_connected()
                watch: Any = get_node_watcher().watch
                self.watched = await watch.remote(pid, process_start_time(pid), self.resource, self.holder)
            except (RayError, RuntimeError, OSError) as error:
                self.watched = False
                logger.info("%s: cannot register with the node watcher: %s", self.resource, error)
            await asyncio.sleep(WATCH_REFRESH_INTERVAL_S if self.watched else LIMITER_RETRY_DELAY_S)

    async def _wait_until_connected(self) -> None:
        """Wait until this process is connected to the limiter's cluster."""
        while not self._is_connected():  # noqa: ASYNC110 (Ray has no event for it)
            await asyncio.sleep(LIMITER_RETRY_DELAY_S)


def connected_cluster() -> str | None:
    """Return an identifier of the cluster to which Ray is connected, or None if it is not connected."""
    if not ray.is_initialized():
        return None
    return str(ray.get_runtime_context().get_node_id())  # no node belongs to two clusters
