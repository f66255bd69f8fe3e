"""Parsed: a turn of the model's, as the loop reads it.

Whatever renderer read it, a call that can't be carried out has a `problem`, one sentence that the model can act on, of
bounded length; and no text in it has half a character (a lone surrogate, which JSON can spell and UTF-8 can't carry).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from toolroll.sandbox.protocol import scrub
from toolroll.schemas import JsonDict

QUOTED = 20
"""How many characters around a fault in JSON are shown."""

MAX_DEPTH = 100
"""How deeply arguments may be nested. Python's stack ends, in whatever walks them next."""

UNCLOSED = "The tool call was begun but never ended: write the whole call, and what ends it."
NO_NAME = "The tool call names no tool: say which one."
NO_FORM = "The tool call must be an object that has a name, and arguments which are an object too."
DEEP = "The arguments of the tool call are nested too deeply."
HALF = "The tool call has half of a character, such as \\ud83d by itself: write the character itself."


@dataclass(frozen=True)
class ParsedCall:
    """One tool call that the model wrote, or tried to."""

    name: str | None
    arguments: str | JsonDict | None
    raw: str
    """What it wrote, without the markers around it."""
    problem: str | None = None
    """What is wrong with it, in a sentence for the model."""
    id: str | None = None
    """The model's own name for it, in formats that have one."""

    @classmethod
    def of(cls, call: Any) -> ParsedCall:
        """A call as a renderer read it (`renderers.ParsedToolCall`)."""
        name = call.name if isinstance(call.name, str) and call.name else None
        arguments = call.arguments if isinstance(call.arguments, str | dict) else None
        read = name is not None and isinstance(arguments, dict)
        # Formats without JSON say so of a value of another type, too. What is wrong with it, the tool's schema says.
        problem = None if read and str(call.status) == "invalid_json" else _problem(str(call.status), call.raw)
        if problem is None and name is None:
            problem = NO_NAME
        if problem is None and call.arguments is not arguments:
            problem = NO_FORM
        if _is_deep(arguments):
            arguments, problem = None, problem or DEEP
        if "\\ud" in call.raw.lower():  # perhaps half a character
            whole = scrub(name), scrub(arguments)
            problem = problem or (HALF if whole != (name, arguments) else None)
            name, arguments = whole
        return cls(name, arguments, call.raw, problem, call.id)


@dataclass(frozen=True)
class Parsed:
    """A turn of the model's."""

    content: str
    reasoning: str | None = None
    calls: tuple[ParsedCall, ...] = ()
    """In the order in which it wrote them, those that can't be carried out among them."""
    left_out: int = 0
    """Calls behind these."""

    def within(self, most: int) -> Parsed:
        """The same with no more than so many calls."""
        over = len(self.calls) - most
        return self if over <= 0 else replace(self, calls=self.calls[:most], left_out=over)

    @classmethod
    def of(cls, response: Any) -> Parsed:
        """A turn as a renderer read it (`renderers.ParsedResponse`)."""
        calls = tuple(ParsedCall.of(call) for call in response.tool_calls)
        return cls(response.content or "", response.reasoning_content or None, calls)


def as_object(arguments: object) -> JsonDict | None:
    """The arguments of a call, given as an object or as JSON text of one. None where they are neither."""
    try:
        made = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return None
    return made if isinstance(made, dict) and not _is_deep(made) else None


def _is_deep(value: object) -> bool:
    layer = [value]
    for _ in range(MAX_DEPTH):
        inner = [item.values() if isinstance(item, dict) else item for item in layer if isinstance(item, dict | list)]
        layer = [part for parts in inner for part in parts]
    return bool(layer)


def _problem(status: str, raw: str) -> str | None:
    """What a renderer's status means. That there is no such tool, the loop says: it knows which there are."""
    match status:
        case "ok" | "unknown_tool":
            return None
        case "unclosed_block":
            return UNCLOSED
        case "missing_name":
            return NO_NAME
        case "invalid_json":
            return f"The tool call is not valid JSON{_where(raw)}."
    return NO_FORM


def _where(raw: str) -> str:
    try:
        json.loads(raw, strict=False)
    except json.JSONDecodeError as error:
        near = json.dumps(raw[max(0, error.pos - QUOTED // 2) : error.pos + QUOTED // 2], ensure_ascii=False)
        return f": {error.msg.lower()} at line {error.lineno}, column {error.colno}, near {near}"
    except RecursionError:
        return ": it is nested too deeply"
    except ValueError as error:  # an integer of more digits than Python converts
        return f": {error!s:.100}"
    return ""
