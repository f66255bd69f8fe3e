"""What a model wrote in the Hermes form: its reasoning, its text, its tool calls.

    <think>…</think>text<tool_call>{"name": …, "arguments": {…}}</tool_call>

Promises: any ids have a reading. Calls come in the order in which they were written, those that can't be read among
them. Where the tokenizer has a marker as a token of its own, only that token is the marker, and text that spells it is
text; else the text is. In a reasoning block nothing is a call.

A block ends where its JSON does, so that a program may have `</tool_call>` in a string. Newlines in a string are let
pass, as models write programs so; beyond that, JSON is JSON.
"""

from __future__ import annotations

import json
import re
from bisect import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus

from toolroll.rollout.vocabulary import Vocabulary

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
_SPACE = re.compile(r"\s*")


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


JSON = json.JSONDecoder(strict=False, parse_constant=_refuse)
"""Reads a call."""


class _Mark(NamedTuple):
    kind: str
    start: int
    end: int


def parse_hermes(vocabulary: Vocabulary, ids: Sequence[int], *, thinking: bool = False) -> ParsedResponse:
    """Read a turn without its end. `thinking`: the prompt has opened a reasoning block already."""
    text, marks = _read(vocabulary, ids)
    first = marks[0] if marks else None
    begun = first is not None and first.kind == THINK and not text[: first.start].strip()
    if not thinking and not begun:
        return _answer(text, marks, 0, None)
    start = first.end if begun and first is not None else 0
    end = next((mark for mark in marks if mark.kind == THOUGHT), None)
    if end is None:
        return ParsedResponse(content="", reasoning_content=text[start:].strip("\n"), reasoning_complete=False)
    after = end.end + len(text[end.end :]) - len(text[end.end :].lstrip("\n"))
    return _answer(text, marks[marks.index(end) + 1 :], after, text[start : end.start].strip("\n"))


def _read(vocabulary: Vocabulary, ids: Sequence[int]) -> tuple[str, list[_Mark]]:
    """The text of the ids, and where in it the markers are."""
    kinds = (OPEN, CLOSE, THINK, THOUGHT)
    tokens = {vocabulary.marks[kind]: kind for kind in kinds if kind in vocabulary.marks}
    spelled = re.compile("|".join(kind for kind in kinds if kind not in vocabulary.marks) or "(?!)")
    parts: list[str] = []
    marks: list[_Mark] = []
    length = begin = 0
    for place in [*(place for place, number in enumerate(ids) if number in tokens), len(ids)]:
        part = vocabulary.decode(ids[begin:place])
        marks += [_Mark(found[0], length + found.start(), length + found.end()) for found in spelled.finditer(part)]
        parts.append(part)
        length, begin = length + len(part), place + 1
        if place < len(ids):
            kind = tokens[ids[place]]
            parts.append(kind)
            marks.append(_Mark(kind, length, length + len(kind)))
            length += len(kind)
    return "".join(parts), marks


def _answer(text: str, marks: list[_Mark], start: int, reasoning: str | None) -> ParsedResponse:
    """What comes after the reasoning: text and calls. Text between calls is kept."""
    calls: list[ParsedToolCall] = []
    pieces: list[str] = []
    at = 0
    thoughts = [number for number, mark in enumerate(marks) if mark.kind == THOUGHT]
    while at < len(marks):
        mark = marks[at]
        if mark.kind == THINK and thoughts and thoughts[-1] > at:  # a later block: it stays in the text
            at = thoughts[bisect(thoughts, at)] + 1
        elif mark.kind == OPEN:
            pieces.append(text[start : mark.start].removesuffix("\n"))
            call, start, at = _call(text, marks, at)
            calls.append(call)
        else:
            at += 1
    rest = text[start:]
    pieces.append(rest.removeprefix("\n") if calls else rest)
    if calls:
        pieces[1:-1] = [piece.removeprefix("\n") for piece in pieces[1:-1]]
    return ParsedResponse("\n".join(piece for piece in pieces if piece), reasoning or None, calls)


def _call(text: str, marks: list[_Mark], at: int) -> tuple[ParsedToolCall, int, int]:
    """The call that opens at this mark; where in the text it ends; which mark is the next."""
    begin = marks[at].end
    value, end = _decoded(text, begin)
    after = next((number for number in range(at + 1, len(marks)) if marks[number].start >= end), len(marks))
    if end > begin and after < len(marks):
        close = marks[after]
        if close.kind == CLOSE and not text[end : close.start].strip():
            return _made(text[begin : close.start], value), close.end, after + 1
    for number in range(at + 1, len(marks)):
        if marks[number].kind == CLOSE:
            raw = text[begin : marks[number].start].strip()
            return ParsedToolCall(raw, status=ToolCallParseStatus.INVALID_JSON), marks[number].end, number + 1
        if marks[number].kind == OPEN:
            after, stop = number, marks[number].start
            break
    else:
        after, stop = len(marks), len(text)
    call = _made(text[begin:stop], value)
    call.status = ToolCallParseStatus.UNCLOSED_BLOCK
    return call, stop, after


def _decoded(text: str, begin: int) -> tuple[Any, int]:
    """The JSON value that begins here, and where it ends: at `begin` if there is none."""
    space = _SPACE.match(text, begin)
    try:
        return JSON.raw_decode(text, space.end() if space else begin)
    except (ValueError, RecursionError):  # also integers of more digits than Python converts
        return None, begin


def _made(raw: str, value: Any) -> ParsedToolCall:
    """A call of this JSON value."""
    raw = raw.strip()
    if not isinstance(value, dict):
        return ParsedToolCall(raw, status=ToolCallParseStatus.MALFORMED_STRUCTURE)
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None:
        arguments = {}
    if not isinstance(name, str) or not name.strip():
        return ParsedToolCall(raw, None, arguments, status=ToolCallParseStatus.MISSING_NAME)
    return ParsedToolCall(raw, name.strip(), arguments)
