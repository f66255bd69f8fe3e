"""The hub of a sandbox server: decides for all fronts which requests may run, and counts them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from toolroll.sandbox.protocol import RunStatus
from toolroll.sandbox.server.hub.hub_state import HubState, Outgoing, TicketId
from toolroll.sandbox.server.hub.messages import (
    Admitted,
    Answer,
    Condition,
    CountFailed,
    CountRefused,
    CountRestarts,
    Finished,
    FrontMessage,
    HubMessage,
    InFlight,
    LogMessage,
    Question,
    Refused,
    SessionClosed,
    Ticket,
)
from toolroll.sandbox.server.hub.metrics import ServerMetrics
from toolroll.sandbox.server.settings import ServerSettings

DRAIN_POLL_INTERVAL_S = 0.02
MIN_CONDITION_INTERVAL_S = 0.01
"""Minimum interval between two messages to several fronts that the queue has become full, or is no longer full. At
overload that changes with each request."""


class Hub:
    """Handles the messages of all fronts: the event loop, the clock and the metrics around `HubState`.

    The kinds of questions are "status" (the numbers of running and waiting requests), "metrics" (Prometheus text),
    "delete_session" (name → whether it was open) and "fence" (holder, lease → running requests).

    Args:
        settings: Settings of the server.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.state = HubState(settings.capacity, settings.queue, settings.sessions, time.time(), settings.front_count)
        self.metrics = ServerMetrics()
        self.front_restarts = 0
        """Number of fronts that have died and were replaced."""
        self._condition = Condition(is_full=self.state.is_full)
        self._condition_timer: asyncio.TimerHandle | None = None
        """Pending timer for the next update of the fronts' condition."""
        self._min_condition_interval_s = MIN_CONDITION_INTERVAL_S if settings.front_count > 1 else 0.0
        self._send: dict[int, Callable[[HubMessage], None]] = {}
        self._deadline_timers: dict[TicketId, asyncio.TimerHandle] = {}
        self._zygote_restarts: dict[int, int] = {}
        self._zygote_restarts_of_dead_fronts = 0
        self._in_flight: dict[int, int | None] = {}
        """While the server shuts down: accepted requests of each front; None until the front reports them."""
        add_gauge = self.metrics.add_gauge
        add_gauge("running", "Programs that are running.", lambda: self.state.running)
        add_gauge("waiting", "Requests in the admission queue.", lambda: self.state.waiting)
        add_gauge("sessions", "Open sessions.", lambda: self.state.open_sessions)
        add_gauge("interpreter_restarts", "Zygotes that were replaced.", self._count_zygote_restarts)
        add_gauge("front_restarts", "Front processes that were replaced.", lambda: self.front_restarts)

    def connect(self, front: int, send: Callable[[HubMessage], None]) -> None:
        """Add a front.

        Args:
            front: Number of the front.
            send: Function that sends a message to it.
        """
        self._send[front] = send
        send(self._condition)

    def disconnect(self, front: int) -> None:
        """Remove a front, after all its programs have ended."""
        self._send.pop(front, None)
        self._in_flight.pop(front, None)
        for ticket in [ticket for ticket in self._deadline_timers if ticket[0] == front]:
            self._stop_deadline_timer(*ticket)
        self._zygote_restarts_of_dead_fronts += self._zygote_restarts.pop(front, 0)
        self._deliver(self.state.remove_front(front, time.time()))

    async def drain(self, timeout_s: float) -> None:
        """Make the fronts reject new requests, and wait until the others have ended or until the timeout."""
        self._in_flight = dict.fromkeys(self._send)
        self._set_condition(self._condition._replace(is_draining=True))
        deadline = time.monotonic() + timeout_s
        while self.state.running or self.state.waiting or any(count != 0 for count in self._in_flight.values()):
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(DRAIN_POLL_INTERVAL_S)

    def handle(self, front: int, message: FrontMessage) -> None:
        """Handle a message of a front."""
        now = time.time()
        match message:
            case Ticket():
                self._deliver(self.state.arrive(front, message, now))
                if message.deadline is not None and self.state.is_waiting(front, message.number):
                    self._start_deadline_timer(front, message.number, message.deadline - now)
            case Finished():
                is_open, has_result = message.session_is_open, bool(message.status)
                outgoing = self.state.finish(front, message.number, now, session_is_open=is_open, has_result=has_result)
                self._deliver(outgoing)
                self._stop_deadline_timer(front, message.number)
                if message.status:
                    self.metrics.executions.labels(message.language, message.status).inc()
                    self.metrics.run_seconds.observe(message.run_time_s)
            case Question():
                self._deliver([(front, Answer(message.number, self._answer(message)))])
            case SessionClosed():
                self.state.close_session(front, message.name, crashed=message.crashed)
            case CountRefused():
                self.metrics.refused.labels(message.label).inc()
            case CountFailed():
                self.metrics.executions.labels("", RunStatus.SANDBOX_ERROR).inc()
            case InFlight():
                self._in_flight[front] = message.requests
            case CountRestarts():
                self._zygote_restarts[front] = message.total
            case LogMessage():
                record = logging.makeLogRecord(message.fields)
                logging.getLogger(record.name).handle(record)

    def _answer(self, question: Question) -> Any:
        match question.kind, *question.arguments:
            case ["status"]:
                return self.state.running, self.state.waiting
            case ["metrics"]:
                return self.metrics.render().decode()
            case ["delete_session", str(name)]:
                orders = self.state.delete_session(name)
                self._deliver(orders)
                return bool(orders)
            case ["fence", str(holder), int(lease)]:
                return self.state.fence(holder, lease)
        raise ValueError(f"unknown question: {question}")

    def _deliver(self, outgoing: Iterable[Outgoing]) -> None:
        for front, message in outgoing:
            if isinstance(message, Admitted | Refused):
                self._stop_deadline_timer(front, message.number)
            if isinstance(message, Admitted):
                self.metrics.queue_seconds.observe(message.queue_time_s)
            if send := self._send.get(front):
                send(message)
        self._update_condition()

    def _update_condition(self) -> None:
        """Send the fronts whether the queue is full, so that they reject requests before they receive the bodies."""
        if self._condition_timer is not None or self._condition.is_full == (is_full := self.state.is_full):
            return

        def end_interval() -> None:
            self._condition_timer = None
            self._update_condition()

        loop = asyncio.get_running_loop()
        self._condition_timer = loop.call_later(self._min_condition_interval_s, end_interval)
        self._set_condition(self._condition._replace(is_full=is_full, retry_after=self.state.retry_after()))

    def _set_condition(self, condition: Condition) -> None:
        self._condition = condition
        for send in self._send.values():
            send(condition)

    def _start_deadline_timer(self, front: int, number: int, delay_s: float) -> None:
        def expire() -> None:
            self._deadline_timers.pop((front, number), None)
            self._deliver(self.state.expire(front, number, time.time()))

        self._deadline_timers[front, number] = asyncio.get_running_loop().call_later(delay_s, expire)

    def _stop_deadline_timer(self, front: int, number: int) -> None:
        if timer := self._deadline_timers.pop((front, number), None):
            timer.cancel()

    def _count_zygote_restarts(self) -> int:
        return self._zygote_restarts_of_dead_fronts + sum(self._zygote_restarts.values())
