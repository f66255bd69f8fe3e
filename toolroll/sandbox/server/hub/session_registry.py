"""Which front has which session. This module is pure: callers pass the time.

Invariants:

- A session is open at one front at most. A front that opens a session is its owner until the session is closed and no
  request for it is left.
- At most `max_sessions` are open. To open another one, the session that was idle longest is closed.
- A session counts as open while a request for it runs, since the front may open it again if it ends meanwhile.
- A session that was deleted is not opened again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from toolroll.sandbox.server.hub.rejections import SessionEnded, SessionLimitReached

MIN_IDLE_S = 1.0
"""Idle time before a session can be evicted. Prevents two active sessions from evicting each other in turn."""
MAX_REMEMBERED_NAMES = 10_000
"""Number of deleted, and of crashed, sessions whose names are remembered."""


@dataclass
class _SessionEntry:
    front: int
    requests: int = 0
    """Number of requests that wait or run."""
    running: int = 0
    """Number of requests that run."""
    is_open: bool = False
    last_used: float = 0.0


class SessionRegistry:
    """The sessions of a server, by name.

    Args:
        max_sessions: Maximum number of open sessions.
    """

    def __init__(self, max_sessions: int) -> None:
        self.max_sessions = max_sessions
        self.open_count = 0
        self._entries: dict[str, _SessionEntry] = {}
        self._deleted: OrderedDict[str, bool] = OrderedDict()
        self._crashed: OrderedDict[str, bool] = OrderedDict()

    def owner(self, name: str) -> int | None:
        """Return the front that has the session, or that has requests for it. None if there is none."""
        entry = self._entries.get(name)
        return None if entry is None else entry.front

    def enter(self, name: str, front: int) -> None:
        """Register a request for a session, whose owner is `front` or not known."""
        self._entries.setdefault(name, _SessionEntry(front)).requests += 1

    def leave(self, name: str, now: float) -> None:
        """Forget a request, which has ended or was not admitted."""
        entry = self._entries[name]
        entry.requests -= 1
        entry.last_used = now
        self._drop_if_unused(name)

    def open(self, name: str, now: float) -> tuple[int, str] | None:
        """Open a session for a registered request that is admitted.

        Returns:
            The front and the name of a session that has to end, if this one needs its place.

        Raises:
            SessionEnded: If the session was deleted.
            SessionLimitReached: If it is not open and all others are in use.
        """
        if self.is_deleted(name):
            raise SessionEnded(f"Session {name} was deleted. Use a new session_id.")
        entry, evicted = self._entries[name], None
        if not entry.is_open:
            evicted = self._evict(now) if self.open_count >= self.max_sessions else None
            entry.is_open = True
            self.open_count += 1
        entry.running += 1
        return evicted

    def set_open(self, name: str, *, is_open: bool) -> None:
        """Record whether a session is open at its front, when a running request for it ends."""
        entry = self._entries[name]
        entry.running -= 1
        is_open = is_open and not self.is_deleted(name)
        self.open_count += is_open - entry.is_open
        entry.is_open = is_open

    def is_deleted(self, name: str) -> bool:
        """Return True if a session of this name was deleted."""
        return name in self._deleted

    def has_crashed(self, name: str) -> bool:
        """Return True if a session of this name was ended by its own program, and no response has reported it yet."""
        return name in self._crashed

    def forget_crash(self, name: str) -> None:
        """Record that a response has reported the crash of a session, if there was one."""
        self._crashed.pop(name, None)

    def closed(self, front: int, name: str, *, crashed: bool) -> None:
        """Handle a session that has ended at its front. While a request runs, the session keeps its place."""
        if crashed:
            _remember(self._crashed, name)
        entry = self._entries.get(name)
        if entry is not None and entry.front == front and not entry.running:
            self._close(name)

    def delete(self, name: str) -> int | None:
        """Delete a session. Return the front at which it is open, if there is one.

        The name is remembered, so that a request that waits for the session does not open it again.
        """
        _remember(self._deleted, name)
        entry = self._entries.get(name)
        if entry is None or not entry.is_open:
            return None
        self._close(name)
        return entry.front

    def remove_front(self, front: int) -> None:
        """Forget the sessions of a front that has died. Its requests must have left."""
        for name in [name for name, entry in self._entries.items() if entry.front == front]:
            self._close(name)

    def _evict(self, now: float) -> tuple[int, str]:
        idle = [
            (entry.last_used, name)
            for name, entry in self._entries.items()
            if entry.is_open and not entry.requests and now - entry.last_used > MIN_IDLE_S
        ]
        if not idle:
            raise SessionLimitReached(f"All {self.max_sessions} sessions are in use (server option --sessions).")
        _, name = min(idle)
        front = self._entries[name].front
        self._close(name)
        return front, name

    def _close(self, name: str) -> None:
        entry = self._entries[name]
        self.open_count -= entry.is_open
        entry.is_open = False
        self._drop_if_unused(name)

    def _drop_if_unused(self, name: str) -> None:
        entry = self._entries[name]
        if not entry.is_open and not entry.requests:
            del self._entries[name]


def _remember(names: OrderedDict[str, bool], name: str) -> None:
    names[name] = True
    if len(names) > MAX_REMEMBERED_NAMES:
        names.popitem(last=False)
