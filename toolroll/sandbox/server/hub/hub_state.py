"""Which request may run, and at which front. This module is pure: callers pass the time and send the messages.

Invariants, for all fronts together:

- At most `capacity` requests run and at most `max_waiting` wait.
- Requests are admitted in order of arrival.
- A request that arrives when the queue is full is rejected at once, with an estimate of when to retry.
- A request is never admitted after its deadline.
- Two requests with the same idempotency key, or of the same session, are admitted at the same front.
- A ticket gets exactly one answer, unless it is finished before.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from toolroll.sandbox.server.hub.fencing import LeaseFences, LeaseToken
from toolroll.sandbox.server.hub.messages import Admitted, EndSession, Forwarded, HubMessage, Refused, Ticket
from toolroll.sandbox.server.hub.rejections import DeadlineExceeded, QueueFull, Rejected
from toolroll.sandbox.server.hub.session_registry import SessionRegistry

MAX_RETRY_AFTER_S = 60
KEY_TTL_S = 60.0
"""Time for which the front of a finished request is remembered. Its caches keep results as long, or longer."""
MAX_REMEMBERED_KEYS = 20_000
"""Maximum number of remembered keys for each front of the server. A front keeps half as many results."""
_RUN_TIME_WEIGHT = 0.05

TicketId = tuple[int, int]
"""Front and number of a ticket."""
Outgoing = tuple[int, HubMessage]
"""A front and a message to send to it."""


@dataclass
class _AdmissionRequest:
    front: int
    ticket: Ticket
    arrived: float
    started: float = 0.0


class HubState:
    """Requests, sessions, keys and fences of all fronts of a server.

    Args:
        capacity: Maximum number of requests that run at the same time.
        max_waiting: Maximum number of requests that wait.
        max_sessions: Maximum number of open sessions.
        started_at: Time at which the server started.
        front_count: Number of fronts.
    """

    def __init__(
        self, capacity: int, max_waiting: int, max_sessions: int, started_at: float, front_count: int = 1
    ) -> None:
        self.capacity = capacity
        self.max_waiting = max_waiting
        self.sessions = SessionRegistry(max_sessions)
        self.fences = LeaseFences(started_at)
        self.mean_run_time_s = 0.1
        """Moving average of the run time, from which `retry_after` is estimated."""
        self._waiting: dict[TicketId, _AdmissionRequest] = {}
        self._running: dict[TicketId, _AdmissionRequest] = {}
        self._keys = KeyOwners(front_count * MAX_REMEMBERED_KEYS)

    @property
    def running(self) -> int:
        """Number of running requests."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """True if another request can neither run nor wait."""
        return self.running + self.waiting >= self.capacity + self.max_waiting

    @property
    def open_sessions(self) -> int:
        """Number of open sessions."""
        return self.sessions.open_count

    def retry_after(self) -> int:
        """Return the estimated time until the queue is half as long, in seconds."""
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(self.waiting / 2 * self.mean_run_time_s / self.capacity)))

    def is_waiting(self, front: int, number: int) -> bool:
        """Return True if a ticket is in the queue."""
        return (front, number) in self._waiting

    def arrive(self, front: int, ticket: Ticket, now: float) -> list[Outgoing]:
        """Handle the arrival of a request. Without an answer in the result, it waits."""
        owner = self._owner(front, ticket)
        if owner != front:
            return [(front, Forwarded(ticket.number, owner))]
        try:
            _raise_if_late(ticket, now)
            if self.is_full:
                raise QueueFull(f"The queue of the sandbox is full. Retry after {self.retry_after()} s.")
        except Rejected as error:
            return [self._refused(front, ticket, error)]
        for key in ticket.keys:
            self._keys.claim(key, front)
        if ticket.session is not None:
            self.sessions.enter(ticket.session, front)
        self._waiting[front, ticket.number] = _AdmissionRequest(front, ticket, now)
        return self._admit_waiting(now)

    def finish(
        self, front: int, number: int, now: float, *, session_is_open: bool = False, has_result: bool = False
    ) -> list[Outgoing]:
        """Handle the end of a request: its program has ended, or it was cancelled. Void tickets are ignored.

        Args:
            front: Front of the request.
            number: Number of its ticket.
            now: Current time.
            session_is_open: Whether its session is open at the front. The front may have rejected the request before
                it opened the session, or the session may have ended and started again.
            has_result: Whether the program has a result, whose response reports that the session had crashed.
        """
        outgoing: list[Outgoing] = []
        if request := self._waiting.pop((front, number), None):
            self._forget(request, now)
        elif request := self._running.pop((front, number), None):
            if (session := request.ticket.session) is not None:
                self.sessions.set_open(session, is_open=session_is_open)
                if has_result:
                    self.sessions.forget_crash(session)
                if session_is_open and self.sessions.is_deleted(session):  # before the front opened it
                    outgoing.append((front, EndSession(session)))
            self._end(request, now)
            self.mean_run_time_s += _RUN_TIME_WEIGHT * (max(0.0, now - request.started) - self.mean_run_time_s)
        return outgoing + self._admit_waiting(now)

    def expire(self, front: int, number: int, now: float) -> list[Outgoing]:
        """Reject a waiting request whose deadline has passed."""
        if (request := self._waiting.pop((front, number), None)) is None:
            return []
        self._forget(request, now)
        return [self._refused(front, request.ticket, DeadlineExceeded(_late_message(0.0)))]

    def remove_front(self, front: int, now: float) -> list[Outgoing]:
        """Forget a front that has died, after its programs have ended."""
        for number in [number for owner, number in self._waiting if owner == front]:
            self._forget(self._waiting.pop((front, number)), now)
        for number in [number for owner, number in self._running if owner == front]:
            self._end(self._running.pop((front, number)), now)
        self.sessions.remove_front(front)
        self._keys.remove_front(front)
        return self._admit_waiting(now)

    def delete_session(self, name: str) -> list[Outgoing]:
        """Delete a session. The result is empty if there was none."""
        front = self.sessions.delete(name)
        return [] if front is None else [(front, EndSession(name))]

    def close_session(self, front: int, name: str, *, crashed: bool) -> None:
        """Handle a session that has ended at its front. `crashed` is True if its own program ended it."""
        self.sessions.closed(front, name, crashed=crashed)

    def fence(self, holder: str, lease: int) -> int:
        """Reject further requests of a holder's leases up to a number. Return how many of them still run."""
        return self.fences.fence(holder, lease)

    def _owner(self, front: int, ticket: Ticket) -> int:
        """Return the front that has the result or the session of a request, else the one that asks.

        Results come first: the response to a request whose session has ended must be found, too. The front that asks
        does not have the result, or it would not ask. So requests are not forwarded in a circle.
        """
        keys = () if ticket.is_forwarded else ticket.keys
        owners = [owner for key in keys if (owner := self._keys.owner(key)) not in (None, front)]
        if ticket.session is not None and (owner := self.sessions.owner(ticket.session)) is not None:
            owners.append(owner)
        return owners[0] if owners else front

    def _admit_waiting(self, now: float) -> list[Outgoing]:
        outgoing: list[Outgoing] = []
        while self._waiting and self.running < self.capacity:
            request = self._waiting.pop(next(iter(self._waiting)))
            outgoing += self._start(request, now)
        return outgoing

    def _start(self, request: _AdmissionRequest, now: float) -> list[Outgoing]:
        """Admit a request that was the next in the queue, or reject it."""
        front, ticket, outgoing = request.front, request.ticket, list[Outgoing]()
        session_died = False
        try:
            _raise_if_late(ticket, now)
            if ticket.lease is not None:
                self.fences.start(LeaseToken.parse(ticket.lease), ticket.granted_at)
        except Rejected as error:
            self._forget(request, now)
            return [self._refused(front, ticket, error)]
        if ticket.session is not None:
            try:
                evicted = self.sessions.open(ticket.session, now)
            except Rejected as error:
                self._end(request, now)
                return [self._refused(front, ticket, error)]
            outgoing += [(evicted[0], EndSession(evicted[1]))] if evicted else []
            session_died = self.sessions.has_crashed(ticket.session)
        request.started = now
        self._running[front, ticket.number] = request
        return [*outgoing, (front, Admitted(ticket.number, max(0.0, now - request.arrived), session_died))]

    def _refused(self, front: int, ticket: Ticket, error: Rejected) -> Outgoing:
        return front, Refused(ticket.number, type(error).__name__, str(error), self.retry_after())

    def _end(self, request: _AdmissionRequest, now: float) -> None:
        if request.ticket.lease is not None:
            self.fences.end(LeaseToken.parse(request.ticket.lease))
        self._forget(request, now)

    def _forget(self, request: _AdmissionRequest, now: float) -> None:
        for key in request.ticket.keys:
            self._keys.settle(key, request.front, now)
        if request.ticket.session is not None:
            self.sessions.leave(request.ticket.session, now)


class KeyOwners:
    """The front of each key, while requests with this key are pending, and for some time afterwards.

    Args:
        max_remembered: Maximum number of keys without pending requests.
    """

    def __init__(self, max_remembered: int) -> None:
        self._max_remembered = max_remembered
        self._pending: dict[str, list[int]] = {}
        """Front of each pending request with a key, in order of arrival."""
        self._settled: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def owner(self, key: str) -> int | None:
        """Return the front of a key, if it is known."""
        if pending := self._pending.get(key):
            return pending[-1]
        return self._settled.get(key, (None, 0.0))[0]

    def claim(self, key: str, front: int) -> None:
        """Make a front the owner of a key, for a request that is pending."""
        self._pending.setdefault(key, []).append(front)

    def settle(self, key: str, front: int, now: float) -> None:
        """Remember the owner of a key after one of its requests has ended."""
        self._pending[key].remove(front)
        if not self._pending[key]:
            del self._pending[key]
        self._settled[key] = front, now
        self._settled.move_to_end(key)
        while self._settled:
            _, settled_at = next(iter(self._settled.values()))
            if len(self._settled) <= self._max_remembered and now - settled_at < KEY_TTL_S:
                break
            self._settled.popitem(last=False)

    def remove_front(self, front: int) -> None:
        """Forget the keys of a front, whose requests must have been settled."""
        for key in [key for key, (owner, _) in self._settled.items() if owner == front]:
            del self._settled[key]


def _raise_if_late(ticket: Ticket, now: float) -> None:
    if ticket.deadline is not None and now > ticket.deadline:
        raise DeadlineExceeded(_late_message(now - ticket.deadline))


def _late_message(late_by_s: float) -> str:
    return f"The deadline of the request passed {late_by_s:.3f} s ago by the server's clock. The program was not run."
