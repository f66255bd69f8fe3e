"""Reasons why a sandbox server does not run a request."""

from __future__ import annotations

from typing import ClassVar

from toolroll.sandbox import protocol


class Rejected(Exception):
    """Raised when a request is not run.

    Args:
        message: The reason, for the client.
        retry_after: Delay before a retry in seconds, if the status is 429.
    """

    status: ClassVar[int]
    """HTTP status of the response."""
    label: ClassVar[str]
    """Label of the metric `refused`."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(Rejected):
    """Raised when a request can neither run nor wait."""

    status, label = 429, "full"


class SessionLimitReached(Rejected):
    """Raised when a new session is requested and all sessions are in use."""

    status, label = 429, "sessions"


class SessionBusy(Rejected):
    """Raised when too many requests wait for the same session."""

    status, label = 429, "full"


class SessionEnded(Rejected):
    """Raised when a request names a session that was deleted."""

    status, label = 410, "ended"


class DeadlineExceeded(Rejected):
    """Raised when the deadline of a request passes before the request is admitted."""

    status, label = protocol.LATE_STATUS, "late"


class LeaseLost(Rejected):
    """Raised when the lease of a request was fenced, or when the request arrives after its deadline."""

    status, label = protocol.LEASE_LOST_STATUS, "fenced"


_REJECTIONS_OF_HUB = (QueueFull, SessionLimitReached, SessionEnded, DeadlineExceeded, LeaseLost)
REJECTIONS = {kind.__name__: kind for kind in _REJECTIONS_OF_HUB}
"""The exceptions that the hub raises, by name."""
