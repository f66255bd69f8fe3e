"""The limiters of this process, one per resource."""

from __future__ import annotations

import logging
import os
import sys
import threading

from toolroll.errors import ToolrollError
from toolroll.limiter.lease import HolderFence
from toolroll.limiter.limiter import Limiter, LocalLimiter

logger = logging.getLogger(__name__)

_limiters: dict[tuple[str, bool], Limiter] = {}
"""Limiters by resource and by whether the process is connected to a Ray cluster."""
_lock = threading.Lock()
_requested_limits: dict[str, set[int]] = {}
"""Limits that were requested in this process, by resource. A different limit is logged once."""
_connection_inherited = False
"""Whether `ray.is_initialized()` is true only because the parent process was connected."""


class LimiterInUse(ToolrollError):
    """Raised when a limiter cannot be removed, because processes use it."""


def get_limiter(resource: str, limit: int, *, fence: HolderFence | None = None) -> Limiter:
    """Return this process's limiter of a resource, creating it if necessary.

    If the process is connected to a Ray cluster, all processes of the cluster that use the same resource share the
    limit. Otherwise the limit applies to this process alone.

    Args:
        resource: Name of the resource, for example the URL of a sandbox.
        limit: Maximum number of slots in use. Only the first request on a cluster sets the limit; a different limit in
            a later request is ignored with a warning. `toolroll limiter set` changes it.
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
    key = resource, _is_connected()
    with _lock:
        if key not in _limiters:
            _limiters[key] = _create_limiter(*key, limit, fence)
            _requested_limits[resource] = {limit}
        elif limit not in _requested_limits.setdefault(resource, set()):
            _requested_limits[resource].add(limit)
            current = _limiters[key].limit
            logger.warning("%s: limit=%d ignored: this process already uses limit=%d", resource, limit, current)
        return _limiters[key]


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

    limit = token_bucket.limiter_status(resource).limit
    _check_unused(resource)
    # A process may register at any time. It gets no slots from here on, so that none are lost with the actor.
    token_bucket.set_limit(resource, 0)
    try:
        _check_unused(resource)
    except LimiterInUse:
        token_bucket.set_limit(resource, limit)
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


def _create_limiter(resource: str, connected: bool, limit: int, fence: HolderFence | None) -> Limiter:
    if connected:
        from toolroll.limiter.cluster import ClusterLimiter

        return ClusterLimiter(resource, limit, fence=fence)
    logger.info("%s: not connected to a Ray cluster; limit=%d applies to this process only", resource, limit)
    return LocalLimiter(limit, resource)


def _is_connected() -> bool:
    """Return True if this process itself is connected to a Ray cluster."""
    global _connection_inherited
    ray = sys.modules.get("ray")  # a process that has not imported Ray is not connected
    if ray is None or not ray.is_initialized():
        _connection_inherited = False
        return False
    return not _connection_inherited


def _reset_after_fork() -> None:
    """Drop the parent's limiters: their slots and the thread that renews their leases belong to the parent."""
    global _lock, _connection_inherited
    _connection_inherited = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    _limiters.clear()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_after_fork)
