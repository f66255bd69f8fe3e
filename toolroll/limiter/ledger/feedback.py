"""Outcomes of the use of a resource: counts of a holder, and rejections found in exceptions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from toolroll._internal.retry_after import parse_retry_after

OVERLOAD_STATUSES = {429, 502, 503, 504, 529}
"""HTTP statuses by which a resource states that it is overloaded or down."""

MAX_RESPECTED_RETRY_AFTER_S = 60.0
"""Maximum time for which a resource can ask to wait."""

MAX_CAUSES = 16
"""Maximum number of exceptions, with their causes and members, that are examined."""


class Feedback(NamedTuple):
    """Outcomes of a holder's work. The totals only increase, so that a lost or repeated report does no harm."""

    succeeded: int = 0
    """Number of uses that succeeded."""
    busy_s: float = 0.0
    """Sum of their durations."""
    rejected: int = 0
    """Number of uses that the resource rejected, or that timed out."""
    epoch: int = 0
    """Number of the latest change of the limit that the holder knows."""
    epoch_succeeded: int = 0
    """Successes of work that was granted since that change."""
    epoch_rejected: int = 0
    """Rejections of work that was granted since that change."""
    retry_after: float = 0.0
    """Time for which the resource asked to wait, in seconds from the report."""
    unknown: int = 0
    """Number of uses that ended otherwise, for example with an exception of the caller."""

    @property
    def failed(self) -> int:
        """Number of uses that did not succeed, after which a holder may wait for an answer."""
        return self.rejected + self.unknown


class OutcomeCounter:
    """Counts the outcomes of a holder's work. The caller passes the time, in seconds."""

    def __init__(self) -> None:
        self.epoch = 0
        """Number of the latest change of the limit, by which work is granted now."""
        self._succeeded = self._rejected = self._unknown = 0
        self._busy_s = 0.0
        self._epoch_succeeded = self._epoch_rejected = 0
        self._retry_at = 0.0

    @property
    def outcomes(self) -> int:
        """Number of counted outcomes."""
        return self._succeeded + self._rejected + self._unknown

    def start_epoch(self, epoch: int) -> None:
        """Count the outcomes of work that is granted from now on separately, if the limit has changed."""
        if epoch != self.epoch:
            self.epoch, self._epoch_succeeded, self._epoch_rejected = epoch, 0, 0

    def succeed(self, epoch: int, seconds: float) -> None:
        """Count a success of work that was granted in an epoch."""
        self._succeeded += 1
        self._busy_s += seconds
        self._epoch_succeeded += epoch == self.epoch

    def reject(self, epoch: int, retry_at: float) -> None:
        """Count a rejection of work that was granted in an epoch."""
        self._rejected += 1
        self._epoch_rejected += epoch == self.epoch
        self._retry_at = max(self._retry_at, retry_at)

    def end(self) -> None:
        """Count work that ended without telling anything about the resource."""
        self._unknown += 1

    def report(self, now: float) -> Feedback:
        """Return the counts."""
        epoch = self.epoch, self._epoch_succeeded, self._epoch_rejected
        retry_after = max(0.0, self._retry_at - now)
        return Feedback(self._succeeded, self._busy_s, self._rejected, *epoch, retry_after, self._unknown)


class Rejection(NamedTuple):
    """A use that the resource rejected."""

    retry_after: float = 0.0
    """Time for which the resource asked to wait, in seconds."""


def rejection_of(error: BaseException | None) -> Rejection | None:
    """Return the rejection that an exception stands for, or None. Never raises.

    An exception, one of its causes, or a member of an exception group stands for a rejection if it is a TimeoutError or
    a ConnectionError, or if it has an HTTP status of `OVERLOAD_STATUSES`. The exceptions of aiohttp, httpx, requests
    and openai have one.
    """
    for cause in islice(_causes(error), MAX_CAUSES):
        response = _attribute(cause, "response")
        statuses = (_attribute(cause, "status"), _attribute(cause, "status_code"), _attribute(response, "status_code"))
        if any(isinstance(status, int) and status in OVERLOAD_STATUSES for status in statuses):
            return Rejection(_retry_after(cause, response))
        if isinstance(cause, (TimeoutError, ConnectionError)):
            return Rejection()
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Return an exception, its causes and the members of exception groups, the nearest first."""
    pending = deque([error])
    while pending:
        if (cause := pending.popleft()) is not None:
            yield cause
            pending.extend(cause.exceptions if isinstance(cause, BaseExceptionGroup) else ())
            pending.append(cause.__cause__ or cause.__context__)  # also if it is suppressed: httpx hides a TimeoutError


def _retry_after(error: BaseException, response: object) -> float:
    stated = _attribute(error, "retry_after_s")  # toolroll's own HTTP client
    if isinstance(stated, int | float) and stated:
        return float(stated)
    headers = _attribute(response, "headers") or _attribute(error, "headers")
    with suppress(Exception):
        return parse_retry_after(headers.get("Retry-After") or headers.get("retry-after"), time.time()) or 0.0
    return 0.0


def _attribute(value: object, name: str) -> Any:
    """Return an attribute, or None if there is none, or if it is a property that raises."""
    with suppress(Exception):
        return getattr(value, name, None)
