"""The `Retry-After` header."""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from math import isnan


def parse_retry_after(header: str | None, now: float) -> float | None:
    """Return the delay of a `Retry-After` header in seconds, or None if the header is missing or invalid.

    Args:
        header: A number of seconds or an HTTP date.
        now: Current Unix time.
    """
    try:
        delay_s = float(header or "")
    except ValueError:
        try:
            delay_s = parsedate_to_datetime(header or "").timestamp() - now
        except (ValueError, TypeError, OverflowError):
            return None
    return None if isnan(delay_s) else max(0.0, delay_s)
