"""A parsed assistant turn, independent of the renderer that parsed it.

Invariants: a call that cannot be executed has a `problem`, a message of bounded length that the model reads; names and
arguments contain no lone surrogates, which JSON can express but UTF-8 cannot encode.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from toolroll._internal.text import json_error_text, replace_lone_surrogates_in_json
from toolroll.schemas import JsonDict

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of tools."""

MAX_REJECTED_CALLS = 8
"""Maximum number of calls beyond `max_parallel_calls` that are answered individually. Further calls are dropped, and
the answer to the last one mentions them."""
JSON_ERROR_CONTEXT_CHARS = 10
"""Number of characters shown on each side of an error in JSON."""
MAX_CALL_NESTING = 100
"""Maximum nesting of arguments. Deeper values exceed Python's recursion limit in code that processes them."""

CALL_ID = re.compile(r"[\w.:-]{1,80}")
"""An id that a model may give a call. Templates show it, so it must not contain control tokens."""

UNCLOSED_CALL = "The tool call is incomplete. Write the whole call, including the marker that closes it."
MISSING_TOOL_NAME = "The tool call has no tool name. Specify the tool to call."
MALFORMED_CALL = "The tool call must be an object with a name and arguments, and the arguments must be an object."
CALL_TOO_DEEP = f"The arguments of the tool call are nested too deeply. Use at most {MAX_CALL_NESTING} levels."
LONE_SURROGATE_IN_CALL = (
    "The tool call contains half of a character, such as \\ud83d without its second half. Write the character itself."
)
STATUS_PROBLEMS = {"ok": None, "unknown_tool": None, "unclosed_block": UNCLOSED_CALL, "missing_name": MISSING_TOOL_NAME}
"""Messages for the statuses of a renderer's call. Unknown tools are reported by the loop, which knows the tools."""


@dataclass(frozen=True)
class ParsedCall:
    """A tool call that the model wrote, valid or not."""

    name: str | None
    arguments: str | JsonDict | None
    raw: str
    """Text of the call without the markers around it."""
    problem: str | None = None
    """Message to the model about what is wrong with the call, or None if it can be executed."""
    id: str | None = None
    """Id that links the call to its response. Some formats contain one; `ParsedTurn.prepare_calls` adds the others."""
    over_limit: bool = False
    """Whether the problem is not in the call: there are more calls than the limits of the trajectory allow."""

    @classmethod
    def check(
        cls,
        name: Any,
        arguments: Any,
        raw: str,
        *,
        problem: str | None = None,
        id: str | None = None,  # noqa: A002
    ) -> ParsedCall:
        """Create a call from what was read. The first check that it fails becomes its problem."""
        known_name = name.strip() if isinstance(name, str) and name.strip() else None
        kept = arguments if isinstance(arguments, str | dict) else None
        is_too_deep = _is_too_deep(kept)
        kept = None if is_too_deep else kept
        clean_name, clean_arguments = known_name, kept
        if "\\u" in raw.lower():  # a lone surrogate is possible
            clean_name = replace_lone_surrogates_in_json(known_name)
            clean_arguments = replace_lone_surrogates_in_json(kept)
        checks = (
            (problem is not None, problem),
            (known_name is None, MISSING_TOOL_NAME),
            (not isinstance(arguments, str | dict), MALFORMED_CALL),
            (is_too_deep, CALL_TOO_DEEP),
            ((clean_name, clean_arguments) != (known_name, kept), LONE_SURROGATE_IN_CALL),
        )
        failed = next((message for has_failed, message in checks if has_failed), None)
        return cls(clean_name, clean_arguments, raw, failed, id if id and CALL_ID.fullmatch(id) else None)

    @classmethod
    def from_renderer(cls, call: Any) -> ParsedCall:
        """Convert a `renderers.ParsedToolCall`."""
        is_readable = isinstance(call.name, str) and bool(call.name) and isinstance(call.arguments, dict)
        problem = STATUS_PROBLEMS.get(str(call.status), MALFORMED_CALL)
        if str(call.status) == "invalid_json":  # if readable, it is a value of another type, which the schema reports
            problem = None if is_readable else json_problem(call.raw) or MALFORMED_CALL
        return cls.check(call.name, call.arguments, call.raw, problem=problem, id=call.id)


@dataclass(frozen=True)
class ParsedTurn:
    """An assistant turn."""

    content: str
    reasoning: str | None = None
    calls: tuple[ParsedCall, ...] = ()
    """Calls in the order in which they were written, valid or not."""
    dropped_calls: int = 0
    """Number of calls after these that were not read, or dropped by `prepare_calls`."""

    @classmethod
    def from_renderer(cls, response: Any) -> ParsedTurn:
        """Convert a `renderers.ParsedResponse`."""
        calls = tuple(ParsedCall.from_renderer(call) for call in response.tool_calls)
        return cls(response.content or "", response.reasoning_content or None, calls)

    def prepare_calls(self, turn: int, max_parallel_calls: int) -> ParsedTurn:
        """Return the turn with an id for each call, and without the calls that exceed the limit by far.

        An id has nine letters and digits, as Mistral's templates demand.
        """
        max_calls = max_parallel_calls + MAX_REJECTED_CALLS
        calls = [
            replace(call, id=call.id or f"call{turn:03d}{index:02d}")
            for index, call in enumerate(self.calls[:max_calls])
        ]
        return replace(self, calls=tuple(calls), dropped_calls=self.dropped_calls + len(self.calls) - len(calls))


def as_object(arguments: object) -> JsonDict | None:
    """Return the arguments of a call as an object, parsing JSON text, or None if they are not an object."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and not _is_too_deep(value) else None


def convert_arguments(message: Mapping[str, Any], convert: Callable[[Any], Any]) -> JsonDict:
    """Return a copy of a message in which `convert` is applied to the arguments of each tool call."""
    copy = dict(message)
    if calls := message.get("tool_calls"):
        functions = [{**call["function"], "arguments": convert(call["function"]["arguments"])} for call in calls]
        copy["tool_calls"] = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
    return copy


def _is_too_deep(value: object) -> bool:
    layer = [value]
    for _ in range(MAX_CALL_NESTING):
        containers = [
            item.values() if isinstance(item, dict) else item for item in layer if isinstance(item, dict | list)
        ]
        layer = [item for container in containers for item in container]
        if not layer:
            return False
    return True


def reject_constant(name: str) -> NoReturn:
    """Reject NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{name} is not a JSON number")


def parse_finite(text: str) -> float:
    """Parse a number, rejecting those that are too large for a float."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is too large a number")
    return value


def json_problem(raw: str) -> str | None:
    """Return a message to the model about the first error in JSON, or None if there is none."""
    location = ""
    try:
        json.loads(raw, strict=False, parse_constant=reject_constant, parse_float=parse_finite)
    except json.JSONDecodeError as error:
        excerpt = raw[max(0, error.pos - JSON_ERROR_CONTEXT_CHARS) : error.pos + JSON_ERROR_CONTEXT_CHARS]
        near = json.dumps(excerpt, ensure_ascii=False)
        location = f"{json_error_text(error)} at line {error.lineno}, column {error.colno}, near {near}"
    except RecursionError:
        location = "it is nested too deeply"
    except ValueError as error:  # a constant, or an integer with more digits than Python converts
        location = f"{error!s:.100}"
    return f"The tool call is not valid JSON: {location}." if location else None
