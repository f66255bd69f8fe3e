"""Limiter: at most so many at once. The one interface, with a local limiter and the cluster's one behind it.

    limiter = get_limiter("http://sandbox:8080", limit=32)
    async with limiter.slot(deadline=time.monotonic() + 30):
        ...

`get_limiter` gives a process one limiter per resource. In a process that is connected to a Ray cluster the limit is the
cluster's; in one that isn't, it is the process's own.
"""

from __future__ import annotations

import logging
import os
import sys
import threading

from toolroll.limiter.gate import Gate, Slot
from toolroll.limiter.lease import Allowance

logger = logging.getLogger(__name__)


class Limiter:
    """At most so many at once, of one resource."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def slot(self, deadline: float | None = None, hold: float | None = None) -> Slot:
        """A slot: `async with limiter.slot(…):`, or in blocking code, in any thread, `with limiter.slot(…):`.

        Args:
            deadline: When the work must be done, on the clock of `time.monotonic()`. No slot before then raises
                SlotTimeout, or LimiterUnavailable where the limiter can't be reached.
            hold: Seconds that the work takes at the most, once begun; by default, all that the deadline leaves, but it
                may be more. If this process dies, its slots come back after that: until then the work may go on
                elsewhere without it.
        """
        return Slot(self._gate, deadline, hold)

    @property
    def resource(self) -> str:
        """What is limited."""
        return self._gate.resource

    @property
    def limit(self) -> int:
        """How many at once, over all who share it, as this process last heard."""
        return self._gate.limit[0]

    @property
    def in_use(self) -> int:
        """Slots in use in this process."""
        return self._gate.in_use

    @property
    def waiting(self) -> int:
        """How many wait in this process."""
        return self._gate.waiting

    def close(self) -> None:
        """Give back what the process has. Slots in use stay in use until they end."""


class LocalLimiter(Limiter):
    """A limit of this process alone. Needs no Ray.

    >>> import asyncio
    >>> async def main() -> int:
    ...     limiter = LocalLimiter(2)
    ...     async with limiter.slot():
    ...         return limiter.in_use
    >>> asyncio.run(main())
    1
    """

    def __init__(self, limit: int, resource: str = "local") -> None:
        if limit < 1:
            raise ValueError(f"The limit of {resource!r} is {limit}: at least one is needed.")
        super().__init__(Gate(resource, Allowance.fixed(limit)))

    def set_limit(self, limit: int) -> None:
        """Change the limit. What is in use beyond a lower one is let finish."""
        self._gate.resize(limit)


_limiters: dict[tuple[str, bool], Limiter] = {}
_lock = threading.Lock()
_asked: dict[str, set[int]] = {}
"""Which limits were asked for here, by resource: another one is told once."""
_looks_connected = False
"""Whether Ray says that this process is connected, and it isn't: its parent is."""


def get_limiter(resource: str, limit: int) -> Limiter:
    """This process's limiter of a resource: the cluster's where it is connected to Ray, else its own."""
    connected = _is_connected()
    with _lock:
        if (resource, connected) not in _limiters:
            _limiters[resource, connected] = _make(resource, limit, connected)
            _asked[resource] = {limit}
        elif limit not in _asked.setdefault(resource, set()):
            _asked[resource].add(limit)
            logger.warning(
                "%s: asked for a limit of %d, but this process has asked for another before (%d now), and that holds",
                resource,
                limit,
                _limiters[resource, connected].limit,
            )
        return _limiters[resource, connected]


def _is_connected() -> bool:
    """Whether this process is connected to a Ray cluster. One that was forked seems to be, if its parent was."""
    global _looks_connected
    ray = sys.modules.get("ray")  # a process that hasn't imported it is connected to no cluster
    if ray is None or not ray.is_initialized():
        _looks_connected = False
        return False
    return not _looks_connected


def _begin_anew() -> None:
    """In a forked process: the slots in use are the parent's, and the threads that care for them aren't here."""
    global _lock, _looks_connected
    _looks_connected = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    _limiters.clear()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


def _make(resource: str, limit: int, connected: bool) -> Limiter:
    if connected:
        from toolroll.limiter.cluster import ClusterLimiter

        return ClusterLimiter(resource, limit)
    logger.info("%s: connected to no Ray cluster, so the limit of %d is this process's own", resource, limit)
    return LocalLimiter(limit, resource)
