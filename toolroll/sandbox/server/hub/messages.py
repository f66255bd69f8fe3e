"""Messages between the hub and the fronts of a sandbox server.

In one process, messages are passed as they are. Between processes, a message is a line of JSON: its type, then its
fields.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson


class Ticket(NamedTuple):
    """Front → hub: a request that asks to run a program. The hub answers with Admitted, Forwarded or Refused."""

    number: int
    """Number of the ticket, unique within its front."""
    deadline: float | None = None
    """Unix time after which the program may not start."""
    lease: str | None = None
    """Lease of the limiter by which the request is sent, as "holder/number"."""
    granted_at: float | None = None
    """Unix time at which the limiter's slot was granted."""
    session: str | None = None
    """Name of the session in which the program runs."""
    keys: tuple[str, ...] = ()
    """Keys of results that a front may have: of the idempotency cache first, then of the compile cache."""
    is_forwarded: bool = False
    """Whether another front has forwarded the request. Then only the session can cause a further forward."""


class Finished(NamedTuple):
    """Front → hub: the program has ended, or the request was cancelled. Other fields are set if it has a result."""

    number: int
    language: str = ""
    status: str = ""
    run_time_s: float = 0.0
    session_is_open: bool = False
    """Whether the session of the request is open at the front now."""


class Question(NamedTuple):
    """Front → hub: a question, which the hub answers with Answer. See `Hub` for the kinds."""

    number: int
    kind: str
    arguments: tuple[str | int, ...] = ()


class SessionClosed(NamedTuple):
    """Front → hub: a session ended that the hub did not end."""

    name: str
    crashed: bool
    """Whether its own program ended it, and no response reports that."""


class CountRefused(NamedTuple):
    """Front → hub: a request was not run."""

    label: str


class CountFailed(NamedTuple):
    """Front → hub: a request got no result because the server failed."""


class CountRestarts(NamedTuple):
    """Front → hub: how many zygotes of the front have been replaced since it started."""

    total: int


class InFlight(NamedTuple):
    """Front → hub, while the server shuts down: how many accepted requests have no complete response yet."""

    requests: int


class ServerDescription(NamedTuple):
    """Front → hub: the front is ready. All fronts of a server have the same description."""

    tier: str
    """Isolation tier of the programs."""
    gaps: list[str]
    """Ways in which a program can affect others in spite of the isolation."""
    notes: list[str]
    """Reasons why stronger tiers do not work."""
    languages: list[str]
    """Languages whose toolchains were found."""


class NotStarted(NamedTuple):
    """Front → hub: the front cannot be started."""

    reason: str


class LogMessage(NamedTuple):
    """Front → hub: a record to log."""

    fields: dict[str, Any]


class Admitted(NamedTuple):
    """Hub → front: the program may start."""

    number: int
    queue_time_s: float
    session_died: bool
    """Whether a program ended the session after its previous request."""


class Forwarded(NamedTuple):
    """Hub → front: another front has the session or the result. The ticket is void."""

    number: int
    front: int


class Refused(NamedTuple):
    """Hub → front: the request is not run. The ticket is void."""

    number: int
    rejection: str
    """Name of an exception in `rejections`."""
    message: str
    retry_after: int


class Answer(NamedTuple):
    """Hub → front: the answer to a question."""

    number: int
    value: Any


class EndSession(NamedTuple):
    """Hub → front: end a session, because it was deleted or another one needs its place."""

    name: str


class Condition(NamedTuple):
    """Hub → front: whether requests are accepted at all."""

    is_draining: bool = False
    is_full: bool = False
    retry_after: int = 1
    """Estimated delay in seconds after which a request is accepted, when the queue became full."""


FrontMessage = (
    Ticket
    | Finished
    | Question
    | SessionClosed
    | CountRefused
    | CountFailed
    | CountRestarts
    | InFlight
    | ServerDescription
    | NotStarted
    | LogMessage
)
HubMessage = Admitted | Forwarded | Refused | Answer | EndSession | Condition
_TYPES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Ticket, Finished, Question, SessionClosed, CountRefused, CountFailed, CountRestarts, InFlight,
        ServerDescription, NotStarted, LogMessage, Admitted, Forwarded, Refused, Answer, EndSession, Condition,
    )
}  # fmt: skip


def encode(message: FrontMessage | HubMessage) -> bytes:
    """Return a message as a line."""
    return orjson.dumps([type(message).__name__, *message], default=str) + b"\n"


def decode(line: bytes) -> Any:
    """Return the message of a line."""
    name, *fields = orjson.loads(line)
    return _TYPES[name](*fields)
