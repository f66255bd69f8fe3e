"""Parse a sampled turn into reasoning, text and tool calls.

Invariants:

- Any sequence of ids can be parsed.
- Calls are returned in the order in which they were written, including calls that cannot be read.
- Markers inside a reasoning block are text. If the block at the start of a turn is never closed, a call in it is
  answered, not executed. A later block without an end is text.
"""

from __future__ import annotations

import re
from typing import Protocol

from toolroll.rollout.chat.call_forms import CallError, CallForm, parameters_of, read_json
from toolroll.rollout.chat.parsed_turn import ParsedCall, ParsedTurn, Tools, json_problem
from toolroll.rollout.chat.turn_text import TurnText

REASONING_MARKERS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought\n", "<channel|>"),
)
"""Markers around the reasoning of a turn, in the formats of different models."""


MAX_CALLS = 100
"""Maximum number of calls that are read from a turn. The time to parse a turn is linear up to this factor."""
NO_MESSAGE = "The tool call is incomplete. Write <|message|> before its arguments."
CALL_IN_REASONING = "The tool call is inside the reasoning. Write {close} before a tool call."


class TurnParser(Protocol):
    """Parses the turns of a model."""

    @property
    def name(self) -> str:
        """Name of the form of its calls."""
        ...

    def find_calls_end(self, turn: TurnText, start: int, tools: Tools) -> int:
        """Return the end of the calls after a position, including the markers around them."""
        ...

    def parse(self, turn: TurnText, prompt_tail: str, tools: Tools) -> ParsedTurn:
        """Parse a turn. `prompt_tail` is the end of the prompt, which may have opened a reasoning block."""
        ...


class MarkedTurnParser:
    """Parses turns with marked calls.

    Args:
        form: Form of the calls.
    """

    def __init__(self, form: CallForm) -> None:
        self.name = form.name
        self._form = form
        self._section = re.compile("|".join(map(re.escape, form.section)) or "(?!)")

    def parse(self, turn: TurnText, prompt_tail: str, tools: Tools) -> ParsedTurn:
        """Parse a turn."""
        prompt_tail = prompt_tail.rstrip()
        for opening, close in REASONING_MARKERS:
            start = len(turn.text) - len(turn.text.lstrip())
            if turn.has_marker(opening, start):
                start += len(opening)
            elif prompt_tail.endswith(opening.rstrip()):
                start = 0
            else:
                continue
            end = turn.find(close, start)
            reasoning = turn.text[start:end].strip("\n") or None
            if end is None:
                has_call = self._form.find_call(turn, start) is not None
                problem = CALL_IN_REASONING.format(close=close)
                return ParsedTurn("", reasoning, (ParsedCall(None, None, "", problem),) if has_call else ())
            end += len(close)
            end += len(turn.text) - end - len(turn.text[end:].lstrip("\n"))
            return self._parse_answer(turn, end, reasoning, tools)
        return self._parse_answer(turn, 0, None, tools)

    def find_calls_end(self, turn: TurnText, start: int, tools: Tools) -> int:
        """Return the end of the calls after a position."""
        parameters = parameters_of(tools)
        while (opening := self._form.find_call(turn, start)) is not None:
            _, start = self._form.read_calls(turn, opening, parameters)
        section_end = re.compile(rf"\s*(?:{self._section.pattern})").match(turn.text, start)
        return section_end.end() if section_end else start

    def _parse_answer(self, turn: TurnText, start: int, reasoning: str | None, tools: Tools) -> ParsedTurn:
        """Parse the text and the calls after the reasoning. Text between calls is kept."""
        parameters = parameters_of(tools)
        calls: list[ParsedCall] = []
        pieces: list[str] = []
        position = start
        while len(calls) < MAX_CALLS and (opening := self._form.find_call(turn, position)) is not None:
            block_end = _find_reasoning_end(turn, position, opening.start())
            if block_end is not None:  # a later reasoning block stays in the text
                position = block_end
                continue
            found, position = self._form.read_calls(turn, opening, parameters)
            if found:
                calls += found
                pieces.append(turn.text[start : opening.start()])
                start = position
        pieces.append(turn.text[start:])
        if not calls:
            problem = self._form.find_lost_call(turn, position)
            lost = () if problem is None else (ParsedCall(None, None, "", problem),)
            return ParsedTurn(pieces[0], reasoning, lost)
        pieces = [self._section.sub("", piece) for piece in pieces]
        pieces = [piece.removesuffix("\n") for piece in pieces[:-1]] + pieces[-1:]
        pieces[1:] = [piece.removeprefix("\n") for piece in pieces[1:]]
        unread = self._form.count_calls(turn, position) if len(calls) >= MAX_CALLS else 0
        return ParsedTurn("\n".join(piece for piece in pieces if piece), reasoning, tuple(calls), unread)


def _find_reasoning_end(turn: TurnText, start: int, limit: int) -> int | None:
    """Return the end of the first reasoning block that opens in a range, or None. A block without an end is text."""
    for opening, close in REASONING_MARKERS:
        begin = turn.find(opening, start)
        end = turn.find(close, begin) if begin is not None and begin < limit else None
        if end is not None:
            return end + len(close)
    return None


class HarmonyParser:
    """Parses the messages of gpt-oss.

    A turn is a list of messages. A message to a recipient is a call:

        <|channel|>analysis<|message|>…<|end|>
        <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
    """

    name = "harmony"
    _RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
    _CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
    _BOUNDARIES = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")

    def parse(self, turn: TurnText, prompt_tail: str, tools: Tools) -> ParsedTurn:
        """Parse a turn."""
        reasoning: list[str] = []
        content: list[str] = []
        calls: list[ParsedCall] = []
        position = 0
        while position < len(turn.text) and len(calls) < MAX_CALLS:
            divider = turn.find("<|message|>", position)
            start = len(turn.text) if divider is None else divider + len("<|message|>")
            end = self._find_end(turn, start)
            header, body = turn.text[position : divider if divider is not None else None], turn.text[start:end]
            recipient, channel = self._RECIPIENT.search(header), self._CHANNEL.search(header)
            if recipient is not None and divider is None:
                calls.append(ParsedCall.check(recipient[1], None, header.strip(), problem=NO_MESSAGE))
            elif recipient is not None:
                call, end = _read_harmony_call(turn, recipient[1], start, end)
                calls.append(call)
            elif channel is not None and channel[1] == "analysis":
                reasoning.append(body)
            else:
                content.append(body if divider is not None or channel is not None else header)
            position = self._skip_end(turn, end)
        return ParsedTurn("\n".join(filter(None, content)), "\n".join(reasoning) or None, tuple(calls))

    def find_calls_end(self, turn: TurnText, start: int, tools: Tools) -> int:
        """Return the end of the arguments of the call after a position."""
        return turn.find("<|call|>", start) or start

    def _find_end(self, turn: TurnText, start: int) -> int:
        """Return the end of the body that starts at a position."""
        ends = (turn.find(marker, start) for marker in self._BOUNDARIES)
        return min((end for end in ends if end is not None), default=len(turn.text))

    def _skip_end(self, turn: TurnText, position: int) -> int:
        """Return the start of the next message: the tokens that end a message do not belong to it."""
        for marker in self._BOUNDARIES[:3]:
            if turn.has_marker(marker, position):
                return position + len(marker)
        return position


def _read_harmony_call(turn: TurnText, name: str, start: int, end: int) -> tuple[ParsedCall, int]:
    """Read a call whose body ends at `end`, or where its JSON ends: strings in it may contain any marker."""
    raw = turn.text[start:end].strip()
    try:
        arguments, json_end = read_json(turn.text, start) if raw else ({}, end)
    except CallError as error:
        return ParsedCall.check(name, None, raw, problem=json_problem(raw) or str(error)), end
    if turn.text[json_end:end].strip():
        return ParsedCall.check(name, None, raw, problem=json_problem(raw)), end
    return ParsedCall.check(name, arguments, turn.text[start:json_end].strip()), max(json_end, start)
