"""Ray actor that runs the ledger of one resource for the whole cluster.

The actor is detached, is restarted without limit, and has the resource's name in toolroll's own namespace. Every job of
the cluster finds the same actor, and no job stops it by ending. It runs on the head node, without which there is no
cluster.

The ledger's checkpoint is in Ray's key-value store.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.util.metrics import Counter, Gauge

from toolroll.limiter.ledger.lease import HolderFence
from toolroll.limiter.ledger.ledger import LEASE_TTL_S, Checkpoint, Ledger, LimiterStatus
from toolroll.limiter.ledger.policy import LimitPolicy
from toolroll.limiter.ledger.service import LedgerService

RAY_NAMESPACE = "toolroll"
"""Ray namespace of toolroll's actors. Not the job's namespace, as all jobs share a limit."""

ACTOR_NAME_PREFIX = "limiter:"

METRICS_INTERVAL_S = 5.0
"""Interval at which metrics are exported."""

MAX_OPEN_CALLS = 1_000_000
"""Maximum number of concurrent calls. Each holder has one or two; Ray's default is 1,000."""


class LimiterMetrics:
    """Metrics of a resource, which Ray exports to Prometheus.

    Args:
        resource: Name of the resource.
    """

    def __init__(self, resource: str) -> None:
        self._tags = {"resource": resource}
        self._slots: Any = Gauge(
            "toolroll_limiter_slots", "Slots of a resource, by state.", tag_keys=("resource", "state")
        )
        self._uses: Any = Counter(
            "toolroll_limiter_uses", "Uses of a resource, by outcome.", tag_keys=("resource", "outcome")
        )
        self._credit: Any = Gauge(
            "toolroll_limiter_rate_credit", "Credit of a rate that can be granted.", tag_keys=("resource", "unit")
        )
        self._budget_left: Any = Gauge(
            "toolroll_limiter_budget_left", "Unspent amount of a budget.", tag_keys=("resource", "unit")
        )
        self._counted = {"succeeded": 0, "rejected": 0}

    def export(self, status: LimiterStatus) -> None:
        """Set the metrics to a status."""
        states = {"limit": status.limit, "in_use": status.in_use, "waiting": status.waiting}
        for state, count in {**states, "quarantined": status.quarantined}.items():
            self._slots.set(count, tags={**self._tags, "state": state})
        for outcome, count in {"succeeded": status.succeeded, "rejected": status.rejected}.items():
            if count > self._counted[outcome]:
                self._uses.inc(count - self._counted[outcome], tags={**self._tags, "outcome": outcome})
                self._counted[outcome] = count
        for unit, amount in status.credit.items():
            self._credit.set(amount, tags={**self._tags, "unit": unit})
        for unit, total in status.budgets.items():
            self._budget_left.set(total - status.spent.get(unit, 0.0), tags={**self._tags, "unit": unit})


class TokenBucketWorker(LedgerService):
    """Ledger of one resource. Created as a Ray actor by `get_or_create_token_bucket`."""

    def __init__(
        self, resource: str, policy: tuple[Any, ...], ttl: float = LEASE_TTL_S, fence: HolderFence | None = None
    ) -> None:
        saved = _internal_kv_get(ACTOR_NAME_PREFIX + resource, namespace=RAY_NAMESPACE)
        if saved:
            ledger = Ledger.restore(Checkpoint(*json.loads(saved)), time.monotonic())
        else:
            ledger = Ledger(LimitPolicy(*policy), ttl)
        super().__init__(resource, ledger, is_saved=bool(saved), fence=fence)
        self._metrics = LimiterMetrics(resource)

    async def report(self, report: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Record a holder's report and return its lease, or None if the report is void or superseded."""
        self._run("metrics", self._export_metrics)
        return await super().report(report)

    async def pid(self) -> int:
        """Return the process id of the actor."""
        return os.getpid()

    async def _export_metrics(self) -> None:
        while True:
            self._metrics.export(self._ledger.status())
            await asyncio.sleep(METRICS_INTERVAL_S)

    async def _write_checkpoint(self, saved: str) -> None:
        key = ACTOR_NAME_PREFIX + self._resource
        await asyncio.to_thread(_internal_kv_put, key, saved, namespace=RAY_NAMESPACE)


def get_or_create_token_bucket(
    resource: str, policy: LimitPolicy, ttl: float = LEASE_TTL_S, fence: HolderFence | None = None
) -> ActorHandle[TokenBucketWorker]:
    """Return the cluster's actor of a resource, creating it if necessary.

    Args:
        resource: Name of the resource.
        policy: Limits to create the actor with.
        ttl: Lifetime of a lease, in seconds.
        fence: Function that makes the resource reject the work of a dead holder.
    """
    options = {"max_concurrency": MAX_OPEN_CALLS, "resources": {"node:__internal_head__": 0.001}}
    worker = shared_actor(TokenBucketWorker, ACTOR_NAME_PREFIX + resource, **options)
    return cast("ActorHandle[TokenBucketWorker]", worker.remote(resource, tuple(policy), ttl, fence))


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


def limiter_statuses(timeout: float = 10.0) -> dict[str, LimiterStatus | None]:
    """Return the current status of all limited resources, or None for one whose limiter does not answer."""
    statuses: dict[str, LimiterStatus | None] = {}
    for resource in limited_resources():
        try:
            statuses[resource] = limiter_status(resource, timeout)
        except (ValueError, RayError):  # removed meanwhile, being restarted, or too slow
            statuses[resource] = None
    return statuses


def set_limit(
    resource: str,
    limit: int | None = None,
    *,
    minimum: int | None = None,
    rates: Mapping[str, float] | None = None,
    budgets: Mapping[str, float] | None = None,
    timeout: float = 10.0,
) -> int:
    """Change a resource's limits for the whole cluster. Return the version of the new limits.

    Args:
        resource: Name of the resource.
        limit: New limit, or maximum of a limit that adapts.
        minimum: New minimum of a limit that adapts.
        rates: New rates per second, by unit.
        budgets: New totals, by unit.
        timeout: Time to wait for the limiter, in seconds.
    """
    worker: Any = find_token_bucket(resource)
    return cast("int", ray.get(worker.set_limits.remote(limit, minimum, rates, budgets), timeout=timeout))
