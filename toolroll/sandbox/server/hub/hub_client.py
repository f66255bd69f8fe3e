"""A front's connection to the hub, which is in the same process or in another one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from toolroll.sandbox.server.hub.messages import (
    Answer,
    Condition,
    CountFailed,
    CountRefused,
    CountRestarts,
    EndSession,
    Finished,
    Forwarded,
    FrontMessage,
    HubMessage,
    InFlight,
    Question,
    Refused,
    SessionClosed,
    Ticket,
)
from toolroll.sandbox.server.hub.rejections import REJECTIONS


class AtOtherFront(Exception):
    """Raised when another front has the session or the result of a request. `front` is its number."""

    def __init__(self, front: int) -> None:
        super().__init__(f"front {front}")
        self.front = front


@dataclass
class Admission:
    """A request that was admitted."""

    queue_time_s: float
    session_died: bool
    """Whether a program ended the session after its previous request."""
    language: str = ""
    """Set by the caller when the program has a result, as are the next two."""
    status: str = ""
    run_time_s: float = 0.0
    session_is_open: bool = False
    """Whether the session of the request is open when the request ends. Set by the caller."""


class HubClient:
    """Sends messages of one front to the hub, and matches the answers.

    Args:
        send: Function that sends a message to the hub.
        end_session: Function that ends a session of this front.
    """

    def __init__(self, send: Callable[[FrontMessage], None], end_session: Callable[[str], object]) -> None:
        self.condition = Condition()
        """Whether requests are accepted, as far as this front knows."""
        self._send = send
        self._end_session = end_session
        self._numbers = count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._in_flight = 0

    def receive(self, message: HubMessage) -> None:
        """Handle a message of the hub."""
        match message:
            case Condition():
                self.condition = message
                self._report_in_flight()
            case EndSession():
                self._end_session(message.name)
            case Answer(value=value):
                self._resolve(message.number, value)
            case _:
                self._resolve(message.number, message)

    @contextlib.contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count an accepted request, for which a server that shuts down waits. It may not have a ticket yet."""
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            self._report_in_flight()

    @contextlib.asynccontextmanager
    async def admit(self, ticket: Ticket) -> AsyncIterator[Admission]:
        """Wait for admission and hold it for the duration of the context.

        Args:
            ticket: The request. Its number is set here.

        Raises:
            Rejected: If the request is not admitted.
            AtOtherFront: If another front has its session or result.
        """
        number = next(self._numbers)
        try:
            answer = await self._ask(number, ticket._replace(number=number))
        except asyncio.CancelledError:
            self._send(Finished(number))
            raise
        match answer:
            case Forwarded(_, front):
                raise AtOtherFront(front)
            case Refused(_, rejection, text, retry_after):
                raise REJECTIONS[rejection](text, retry_after)
        admission = Admission(answer.queue_time_s, answer.session_died)
        try:
            yield admission
        finally:
            result = admission.language, admission.status, admission.run_time_s
            self._send(Finished(number, *result, admission.session_is_open))

    async def ask(self, kind: str, *arguments: str | int) -> Any:
        """Ask the hub a question. See `Hub` for the kinds."""
        number = next(self._numbers)
        return await self._ask(number, Question(number, kind, arguments))

    def session_closed(self, name: str, *, crashed: bool) -> None:
        """Report a session that ended and that the hub did not end."""
        self._send(SessionClosed(name, crashed))

    def count_refused(self, label: str) -> None:
        """Count a request that was not run."""
        self._send(CountRefused(label))

    def count_failed(self) -> None:
        """Count a request that got no result because the server failed."""
        self._send(CountFailed())

    def count_restarts(self, total: int) -> None:
        """Report how many zygotes of this front have been replaced."""
        self._send(CountRestarts(total))

    def _report_in_flight(self) -> None:
        if self.condition.is_draining:
            self._send(InFlight(self._in_flight))

    async def _ask(self, number: int, message: FrontMessage) -> Any:
        self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(message)  # in the same process, the answer may be there when this returns
            return await self._answers[number]
        finally:
            del self._answers[number]

    def _resolve(self, number: int, answer: Any) -> None:
        if (future := self._answers.get(number)) and not future.done():
            future.set_result(answer)
