"""Parse reasoning, text and tool calls in the Hermes format.

    <think>…</think>text<tool_call>{"name": …, "arguments": {…}}</tool_call>

Invariants:

- Any sequence of ids can be parsed.
- Calls are returned in the order in which they were written, including calls that cannot be read.
- If the tokenizer has a token for a marker, only that token is the marker; text that spells the marker is text.
- Markers inside a reasoning block are text.

A call ends where its JSON ends, so a program in its arguments may contain `</tool_call>`. Newlines in strings are
accepted because models write programs that way; otherwise the JSON must be valid.
"""

from __future__ import annotations

import json
import re
from bisect import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus

from toolroll.rollout.chat.parsed_turn import Tools
from toolroll.rollout.chat.vocabulary import Vocabulary

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
PROMPT_TAIL_TOKENS = 16
"""Number of tokens at the end of the prompt that are searched for an open reasoning block."""
_WHITESPACE = re.compile(r"\s*")


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_CALL_DECODER = json.JSONDecoder(strict=False, parse_constant=_reject_constant)


class HermesRenderer:
    """Base class of renderers for models that write tool calls in the Hermes format.

    Args:
        vocabulary: Vocabulary of the model.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._stop_ids: list[int] = []

    def get_stop_token_ids(self) -> list[int]:
        """Return the ids that end an assistant turn."""
        return list(self._stop_ids)

    def parse_response(
        self, token_ids: Sequence[int], *, tools: Tools | None = None, prompt_ids: Sequence[int] | None = None
    ) -> ParsedResponse:
        """Parse the ids sampled after a prompt, up to the first stop token. Tools are not needed: JSON has types."""
        end = next((index for index, token_id in enumerate(token_ids) if token_id in self._stop_ids), len(token_ids))
        prompt_tail = self.vocabulary.decode(prompt_ids[-PROMPT_TAIL_TOKENS:]) if prompt_ids else ""
        return _parse_turn(self.vocabulary, token_ids[:end], thinking=prompt_tail.rstrip().endswith(THINK_OPEN))


class _Marker(NamedTuple):
    """An occurrence of a marker in the text."""

    kind: str
    start: int
    end: int


def _parse_turn(vocabulary: Vocabulary, ids: Sequence[int], *, thinking: bool) -> ParsedResponse:
    """Parse a turn. `thinking` means that the prompt has already opened a reasoning block."""
    text, markers = _decode_with_markers(vocabulary, ids)
    start = 0
    if markers and markers[0].kind == THINK_OPEN and not text[: markers[0].start].strip():
        start = markers[0].end
    elif not thinking:
        return _parse_answer(text, markers, 0, None)
    close = next((index for index, marker in enumerate(markers) if marker.kind == THINK_CLOSE), None)
    if close is None:
        return ParsedResponse(content="", reasoning_content=text[start:].strip("\n"), reasoning_complete=False)
    answer = text[markers[close].end :]
    answer_start = len(text) - len(answer.lstrip("\n"))
    return _parse_answer(text, markers[close + 1 :], answer_start, text[start : markers[close].start].strip("\n"))


def _decode_with_markers(vocabulary: Vocabulary, ids: Sequence[int]) -> tuple[str, list[_Marker]]:
    kinds = (CALL_OPEN, CALL_CLOSE, THINK_OPEN, THINK_CLOSE)
    control_tokens = vocabulary.control_tokens
    kind_by_id = {control_tokens[kind]: kind for kind in kinds if kind in control_tokens}
    spelled = re.compile("|".join(kind for kind in kinds if kind not in control_tokens) or "(?!)")
    parts: list[str] = []
    markers: list[_Marker] = []
    length = start = 0
    for index in [*(index for index, token_id in enumerate(ids) if token_id in kind_by_id), len(ids)]:
        part = vocabulary.decode(ids[start:index])
        markers += [_Marker(found[0], length + found.start(), length + found.end()) for found in spelled.finditer(part)]
        parts.append(part)
        length, start = length + len(part), index + 1
        if index < len(ids):
            kind = kind_by_id[ids[index]]
            parts.append(kind)
            markers.append(_Marker(kind, length, length + len(kind)))
            length += len(kind)
    return "".join(parts), markers


def _parse_answer(text: str, markers: list[_Marker], start: int, reasoning: str | None) -> ParsedResponse:
    """Parse the text and the calls after the reasoning. Text between calls is kept."""
    calls: list[ParsedToolCall] = []
    pieces: list[str] = []
    index = 0
    think_closes = [index for index, marker in enumerate(markers) if marker.kind == THINK_CLOSE]
    while index < len(markers):
        marker = markers[index]
        if marker.kind == THINK_OPEN and think_closes and think_closes[-1] > index:  # a later block stays in the text
            index = think_closes[bisect(think_closes, index)] + 1
        elif marker.kind == CALL_OPEN:
            pieces.append(text[start : marker.start].removesuffix("\n"))
            call, start, index = _parse_call(text, markers, index)
            calls.append(call)
        else:
            index += 1
    pieces.append(text[start:])
    if calls:
        pieces[1:] = [piece.removeprefix("\n") for piece in pieces[1:]]
    return ParsedResponse("\n".join(piece for piece in pieces if piece), reasoning or None, calls)


def _parse_call(text: str, markers: list[_Marker], index: int) -> tuple[ParsedToolCall, int, int]:
    """Parse the call that a marker opens. Return it, the end of the call in the text, and the index of the next marker.

    The call is valid if its JSON is followed by the closing marker. Otherwise it extends to the next marker of a call.
    """
    start = markers[index].end
    following = range(index + 1, len(markers))
    value, json_end = _decode_json(text, start)
    close = next((number for number in following if markers[number].start >= json_end > start), None)
    if close is not None and markers[close].kind == CALL_CLOSE and not text[json_end : markers[close].start].strip():
        return _make_call(text[start : markers[close].start], value), markers[close].end, close + 1
    boundary = next((number for number in following if markers[number].kind in (CALL_OPEN, CALL_CLOSE)), None)
    if boundary is not None and markers[boundary].kind == CALL_CLOSE:
        raw = text[start : markers[boundary].start].strip()
        invalid = ParsedToolCall(raw, status=ToolCallParseStatus.INVALID_JSON)
        return invalid, markers[boundary].end, boundary + 1
    end = len(text) if boundary is None else markers[boundary].start
    call = _make_call(text[start:end], value)
    call.status = ToolCallParseStatus.UNCLOSED_BLOCK
    return call, end, len(markers) if boundary is None else boundary


def _decode_json(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value at a position and its end, or None and the position itself if there is none."""
    whitespace = _WHITESPACE.match(text, start)
    try:
        return _CALL_DECODER.raw_decode(text, whitespace.end() if whitespace else start)
    except (ValueError, RecursionError):  # ValueError includes integers with more digits than Python converts
        return None, start


def _make_call(raw: str, value: Any) -> ParsedToolCall:
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
