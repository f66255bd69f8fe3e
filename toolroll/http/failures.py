"""Classification of failed attempts: the reason, and whether a retry can help."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import aiohttp
import orjson
from pydantic import ValidationError

from toolroll._internal.retry_after import parse_retry_after
from toolroll._internal.text import shorten_middle
from toolroll.errors import explain

TOO_MANY_REQUESTS = 429
RETRYABLE_STATUSES = frozenset({TOO_MANY_REQUESTS, 502, 503, 504})
MAX_REASON_CHARS = 500
MAX_REASON_HEAD_CHARS = 200

PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError)
"""Exceptions by which a parser rejects a response as invalid."""


@dataclass(eq=False)
class AttemptFailed(Exception):
    """Raised when one attempt of a request failed."""

    reason: str
    """Description, such as "HTTP 503: overloaded". The part before the first colon names the kind of failure."""
    retryable: bool = False
    """True if the same request can succeed at another time or endpoint."""
    endpoint_down: bool = False
    """True if the endpoint cannot serve any request at the moment."""
    processed: bool = False
    """True if the server may have started to process the request."""
    retry_after_s: float | None = None
    """Delay that the server requested by `Retry-After`."""
    status: int | None = None
    """Status of the response. None if there was none, or an invalid one of status 200."""

    def __str__(self) -> str:
        return self.reason


def failure_from_status(status: int, retry_after: str | None, content: bytes) -> AttemptFailed:
    """Classify a response with a status other than 200."""
    return AttemptFailed(
        f"HTTP {status}: {error_detail(content)}",
        retryable=status in RETRYABLE_STATUSES,
        endpoint_down=status in RETRYABLE_STATUSES and status != TOO_MANY_REQUESTS,
        retry_after_s=parse_retry_after(retry_after, time.time()) if status in RETRYABLE_STATUSES else None,
        status=status,
    )


def failure_from_exception(error: Exception) -> AttemptFailed:
    """Classify an exception of aiohttp, the operating system, or a parser. An `AttemptFailed` is returned unchanged."""
    text = explain(error) if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
    detail = shorten_middle(text, MAX_REASON_CHARS, head_chars=MAX_REASON_HEAD_CHARS)
    match error:
        case AttemptFailed():
            return error
        case aiohttp.ClientConnectorCertificateError():
            cause = getattr(error.certificate_error, "verify_message", None) or error.certificate_error
            remedy = "To trust a private certificate authority, set SSL_CERT_FILE to its certificate"
            return AttemptFailed(f"its certificate is not trusted: {cause}. {remedy}", endpoint_down=True)
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            number = getattr(error, "errno", None) or 0  # negative for errors of name resolution
            reason = os.strerror(number) if number > 0 else detail
            return AttemptFailed(f"can't be reached: {reason}", retryable=True, endpoint_down=True)
        case aiohttp.ClientConnectionError() | aiohttp.ClientPayloadError() | OSError():
            return AttemptFailed(f"connection lost: {detail}", retryable=True, processed=True)
    return AttemptFailed(f"invalid response: {detail}")


def error_detail(content: bytes) -> str:
    """Return the error message in the body of a response.

    Reads `error`, `detail` (a string or FastAPI's list of validation errors) and `message`. Other bodies are returned
    as text.
    """
    try:
        body = orjson.loads(content)
        detail = body.get("error") or body.get("detail") or body["message"]
        if isinstance(detail, dict):
            detail = detail["message"]
        elif isinstance(detail, list):
            detail = "; ".join(f"{item['loc'][-1]}: {item['msg']}" for item in detail)
    except PARSE_ERRORS:
        detail = content[:1000].decode(errors="replace")
    return shorten_middle(str(detail).strip().removesuffix("."), MAX_REASON_CHARS, head_chars=MAX_REASON_HEAD_CHARS)
