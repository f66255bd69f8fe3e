"""The limiters of this process, one per resource."""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import TYPE_CHECKING

from toolroll.errors import ToolrollError
from toolroll.limiter.ledger.lease import HolderFence
from toolroll.limiter.ledger.policy import LimitPolicy
from toolroll.limiter.limiter import Limiter, LocalLimiter

if TYPE_CHECKING:
    from toolroll.limiter.settings import ResourceLimits

logger = logging.getLogger(__name__)

_limiters: dict[tuple[str, str | None], Limiter] = {}
"""Limiters by resource and by `cluster_id`."""
_lock = threading.Lock()
_requested_limits: dict[str, list[LimitPolicy]] = {}
"""Limits that were requested in this process, by resource. A different limit is logged once."""
_connection_inherited = False
"""Whether `ray.is_initialized()` is true only because the parent process was connected."""


class LimiterInUse(ToolrollError):
    """Raised when a limiter cannot be removed, because processes use it."""


def get_limiter(resource: str, limit: int | ResourceLimits, *, fence: HolderFence | None = None) -> Limiter:
    """Return this process's limiter of a resource, creating it if necessary.

    If the process is connected to a Ray cluster, all processes of the cluster that use the same resource share the
    limit. Otherwise the limit applies to this process alone.

    Args:
        resource: Name of the resource, for example the URL of a sandbox.
        limit: Maximum number of concurrent uses, or `ResourceLimits` with an adaptive limit, rates and budgets. Only
            the first request on a cluster sets them; different ones in a later request are ignored with a warning.
            `toolroll limiter set` changes them.
        fence: Function that makes the resource reject the work of a dead process, so that its slots become available
            when none of its work runs any more. Like the limit, it is set by the first request on a cluster.

    Returns:
        The same limiter for every call with the same resource.

    Raises:
        ValueError: If the process is not connected to a cluster and the limit is less than 1.

    Example:
        >>> limiter = get_limiter("http://sandbox:8080", limit=32)
        >>> with limiter.slot(hold=30):
        ...     print(f"{limiter.in_use} in use of {limiter.limit}")
        1 in use of 32
    """
    key = resource, cluster_id()
    policy = LimitPolicy.fixed(limit) if isinstance(limit, int) else limit.policy()
    with _lock:
        if key not in _limiters:
            _close_outdated(key[1])
            _limiters[key] = _create_limiter(resource, key[1] is not None, policy, fence)
            _requested_limits[resource] = [policy]
        elif policy.has_limits and policy not in _requested_limits.setdefault(resource, []):
            current = _requested_limits[resource][:1] or [policy]
            _requested_limits[resource].append(policy)
            logger.warning("%s: %s ignored: this process already uses %s", resource, policy, current[0])
        return _limiters[key]


def has_limiter(resource: str) -> bool:
    """Return True if this process has a limiter of a resource."""
    with _lock:
        return any(name == resource for name, _ in _limiters)


def limiter_slots() -> dict[str, dict[str, int]]:
    """Return the slots of each resource by state: limit, and slots in use and waiters in this process."""
    with _lock:
        limiters = list(_limiters.values())
    return {one.resource: {"limit": one.limit, "in_use": one.in_use, "waiting": one.waiting} for one in limiters}


def close_limiters() -> None:
    """Return the unused slots and the unspent credit of this process to the cluster, before the process ends.

    Otherwise, its slots become available after the longest duration of work that it has announced. Limiters in use
    remain open. `get_limiter` opens a closed one again.
    """
    with _lock:
        shared = {key: limiter for key, limiter in _limiters.items() if key[1] is not None}
        unused = [key for key, limiter in shared.items() if not limiter.in_use and not limiter.waiting]
        closed = [_limiters.pop(key) for key in unused]
    for limiter in closed:
        limiter.close()


def remove_limiter(resource: str) -> None:
    """Remove a resource's limiter from the cluster: its Ray actor and its saved state.

    The next `get_limiter` creates the limiter again, with the limit that it requests.

    Args:
        resource: Name of the resource.

    Raises:
        LimiterInUse: If a process uses the limiter, or if work of a dead process may still run.
        ValueError: If the cluster has no limiter of this name.
    """
    import ray
    from ray.experimental.internal_kv import _internal_kv_del

    from toolroll.limiter import token_bucket

    status = token_bucket.limiter_status(resource)
    _check_unused(resource)
    # A process may register at any time. It gets no slots from here on, so that none are lost with the actor.
    token_bucket.set_limit(resource, 0)
    try:
        _check_unused(resource)
    except BaseException:
        token_bucket.set_limit(resource, status.max)
        raise
    ray.kill(token_bucket.find_token_bucket(resource))
    _internal_kv_del(token_bucket.ACTOR_NAME_PREFIX + resource, namespace=token_bucket.RAY_NAMESPACE)


def _check_unused(resource: str) -> None:
    from toolroll.limiter.token_bucket import limiter_status

    status = limiter_status(resource)
    if status.holders:
        counts = f"processes that use it: {status.holders}, slots in use: {status.in_use}, waiting: {status.waiting}"
        raise LimiterInUse(f"Cannot remove {resource!r}: {counts}. Stop the processes first.")
    if status.reserved or status.learning:
        reason = f"work of dead processes may still run, slots in quarantine: {status.quarantined}"
        raise LimiterInUse(f"Cannot remove {resource!r}: {reason}. Try again later.")


def _close_outdated(cluster: str | None) -> None:
    """Close the limiters of clusters to which this process is no longer connected. The caller holds the lock."""
    if cluster is not None:
        for key in [key for key in _limiters if key[1] not in (None, cluster)]:
            _limiters.pop(key).close()


def _create_limiter(resource: str, connected: bool, policy: LimitPolicy, fence: HolderFence | None) -> Limiter:
    if connected:
        from toolroll.limiter.cluster import ClusterLimiter

        return ClusterLimiter(resource, policy, fence=fence)
    logger.info("%s: not connected to a Ray cluster; %s applies to this process only", resource, policy)
    if policy.is_fixed:
        return LocalLimiter(policy.max, resource)
    from toolroll.limiter.leased_limiter import LocalLedgerLimiter

    return LocalLedgerLimiter(resource, policy)


def is_connected() -> bool:
    """Return True if this process itself is connected to a Ray cluster."""
    global _connection_inherited
    ray = sys.modules.get("ray")  # a process that has not imported Ray is not connected
    if ray is None or not ray.is_initialized():
        _connection_inherited = False
        return False
    return not _connection_inherited


def cluster_id() -> str | None:
    """Return an identifier of the Ray cluster to which this process is connected, or None if it is not connected."""
    if not is_connected():
        return None
    from toolroll.limiter.cluster import connected_cluster

    return connected_cluster()


def _reset_after_fork() -> None:
    """Drop the parent's limiters: their slots and the thread that renews their leases belong to the parent."""
    global _lock, _connection_inherited
    _connection_inherited = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    _limiters.clear()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)
