"""Trace context of tool calls, and the sink of finished trajectories. Costs next to nothing while tracing is off."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from hashlib import blake2b
from typing import Any

TRACE_ID = re.compile(r"(?!0{32})[0-9a-f]{32}")
TRACEPARENT_HEADER = "traceparent"
"""Header of W3C Trace Context."""

_sink: Callable[[Any], None] | None = None
"""Receives each finished trajectory that is sampled. None while tracing is off."""
_sample_ratio = 1.0
_traceparent: ContextVar[str] = ContextVar("traceparent", default="")


def set_sink(sink: Callable[[Any], None] | None, sample_ratio: float = 1.0) -> None:
    """Set the function that receives finished trajectories of this process. None turns tracing off.

    Args:
        sink: The function.
        sample_ratio: Fraction of the trajectories that it receives.
    """
    global _sink, _sample_ratio
    _sink, _sample_ratio = sink, sample_ratio


def current_sink() -> Callable[[Any], None] | None:
    """Return the function that receives finished trajectories, or None."""
    return _sink


def finish_trajectory(trajectory: Any) -> None:
    """Pass a finished trajectory to the sink, if tracing is on and the trajectory is sampled."""
    if _sink is not None and is_sampled(trajectory.request_id):
        _sink(trajectory)


def is_sampled(request_id: str) -> bool:
    """Return True if a trajectory is traced. It follows from the id, so it is the same in all processes."""
    # Not from the trace id: some bits of a UUID are constant.
    return _sample_ratio >= 1.0 or int(span_id(request_id), 16) < _sample_ratio * 2**64


def enter_call(request_id: str, turn: int, index: int) -> None:
    """Make a tool call the parent of the requests of the current task, if tracing is on."""
    if _sink is not None:
        flags = "01" if is_sampled(request_id) else "00"
        _traceparent.set(f"00-{trace_id(request_id)}-{call_span_id(request_id, turn, index)}-{flags}")


def trace_headers() -> dict[str, str]:
    """Return the HTTP headers that continue the trace of the current tool call.

    Add them to the requests of a tool, so that the spans of the called service belong to the tool call. The sandbox and
    MCP tools send them already.

    Returns:
        The header `traceparent`, or nothing outside of a tool call or while tracing is off.

    Example:
        >>> trace_headers()
        {}
    """
    traceparent = "" if _sink is None else _traceparent.get()
    return {TRACEPARENT_HEADER: traceparent} if traceparent else {}


def read_trace_id(traceparent: str) -> str | None:
    """Return the trace id in the value of a header `traceparent`, or None if it has none."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 and TRACE_ID.fullmatch(parts[1]) else None


def trace_id(request_id: str) -> str:
    """Return the trace id of a trajectory: its `request_id`, or a hash of it if it is not a valid trace id."""
    return request_id if TRACE_ID.fullmatch(request_id) else _digest(request_id, 16)


def call_span_id(request_id: str, turn: int, index: int) -> str:
    """Return the id of a tool call's span.

    Args:
        request_id: Id of the trajectory.
        turn: Index of the assistant turn.
        index: Index among the calls of the turn.
    """
    return span_id(request_id, "call", turn, index)


def span_id(request_id: str, *path: str | int) -> str:
    """Return the id of a span, given its place in the trajectory."""
    return _digest("/".join(map(str, (request_id, *path))), 8)


def _digest(text: str, size: int) -> str:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=size).hexdigest()
