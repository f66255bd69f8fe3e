"""A sample as a conversation: who said what, turn by turn, each tool call with its answer.

Whoever wrote the dump, nothing of it is lost: what isn't part of the conversation follows as fields. Thinking is
folded. A call has the tool's answer beside it, what it took, what it earned, and whose fault it was that it failed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from toolroll.records.record import Record, number
from toolroll.viewer import figures
from toolroll.viewer.document import Block, Document, Kind
from toolroll.viewer.fields import as_text, field_blocks
from toolroll.viewer.harmless import harmless, one_line

Clean = Callable[[str], str]
"""From a sample's text to what may be shown."""

_PARTS = re.compile(
    r"<think>(?P<thinking>.*?)(?:</think>|\Z)|<tool_call>(?P<call>.*?)(?:</tool_call>|\Z)"
    r"|<tool_response>(?P<answer>.*?)(?:</tool_response>|\Z)",
    re.DOTALL,
)
_SPOKEN = {"input", "output", "messages", "tokens", "earlier", "calls", "turns", "error"}
"""Fields that the conversation shows already, or that have a view of their own."""


@dataclass
class _Call:
    """A call as far as it is known: what was written, and what came of it."""

    tool: str | None
    arguments: Any
    id: str | None = None
    answer: str | None = None
    record: Mapping[str, Any] = field(default_factory=dict)


def conversation(record: Record, clean: Clean = harmless) -> Document:
    """The document."""
    blocks = list(_Conversation(record, clean).blocks())
    if record.error:
        blocks.append(Block(Kind.FAULT, "what failed", clean(record.error)))
    rest = {name: value for name, value in record.fields.items() if name not in _SPOKEN and value is not None}
    return Document([*blocks, *field_blocks(rest, clean)])


class _Conversation:
    """Goes through the messages, and pairs calls with answers."""

    def __init__(self, record: Record, clean: Clean) -> None:
        self._record = record
        self._clean = clean
        self._messages = [message for message in record.messages if isinstance(message, Mapping)]
        self._turn = self._first_turn()
        self._waiting: list[_Call] = []
        """Calls of the last assistant's message, whose answers follow."""

    def _first_turn(self) -> int:
        """The number of the first assistant's message: below 0 where the prompt had some already."""
        said = sum(message.get("role") == "assistant" for message in self._messages)
        own = {str(turn.get("turn")) for turn in self._record.turns}
        return len(own) - said if own else 0

    def blocks(self) -> Iterator[Block]:
        for message in self._messages:
            role = message.get("role")
            if role == "tool":
                self._answer(as_text(message.get("content")), message.get("tool_call_id"))
            elif role == "assistant":
                yield from self._told()
                yield from self._assistant(message)
            else:
                yield from self._others(str(role), message)
        yield from self._told()

    def _others(self, role: str, message: Mapping[str, Any]) -> Iterator[Block]:
        text = as_text(message.get("content"))
        if self._waiting and "<tool_response>" in text:  # as templates write a tool's answer, in the user's name
            for part in _PARTS.finditer(text):
                self._answer((part["answer"] or "").strip("\n"), None)
            text = _PARTS.sub("", text).strip()
            if not text:
                return
        yield from self._told()
        kind = Kind.SYSTEM if role in ("system", "developer") else Kind.USER
        yield Block(kind, one_line(role), self._clean(text))

    def _assistant(self, message: Mapping[str, Any]) -> Iterator[Block]:
        turn, self._turn = self._turn, self._turn + 1
        title = f"assistant · turn {turn + 1}" if turn >= 0 else "assistant · in the prompt"
        said = as_text(message.get("content"))
        thought = message.get("reasoning_content")
        if thought:
            yield self._thinking(as_text(thought))
        written = message.get("tool_calls")
        calls = [_written(call) for call in written if isinstance(call, Mapping)] if isinstance(written, list) else []
        texts: list[Block] = []
        for kind, text in _split(said):
            if kind == "thinking":
                texts.append(self._thinking(text))
            elif kind == "call":
                calls.append(_spelt(text))
            elif text.strip():
                texts.append(Block(Kind.ASSISTANT, "assistant", self._clean(text.strip("\n"))))
        if not texts and not thought:
            texts.append(Block(Kind.ASSISTANT, "assistant", ""))
        detail, first = self._timings(turn), True
        for block in texts:
            if block.kind is Kind.ASSISTANT and first:
                block, first = replace(block, title=title, detail=detail), False
            yield block
        if first:
            yield Block(Kind.ASSISTANT, title, "", detail)
        self._waiting = self._with_records(calls, turn)

    def _with_records(self, calls: list[_Call], turn: int) -> list[_Call]:
        """The calls of a turn with what is on record of them, in their order. Those on record only are added."""
        known = [call for call in self._record.calls if call.get("turn") == turn]
        for place, entry in enumerate(known):
            if place == len(calls):
                calls.append(_Call(entry.get("tool"), entry.get("arguments")))
            calls[place].record = entry
            answer = entry.get("answer")
            calls[place].answer = answer if isinstance(answer, str) and answer else None
        return calls

    def _answer(self, text: str, call_id: Any) -> None:
        """Give an answer to the call that it belongs to."""
        free = [call for call in self._waiting if call.answer is None]
        told = [call for call in self._waiting if call.answer == text and call.record]
        by_id = [call for call in free if call_id is not None and call.id == call_id]
        if by_id or (free and not told):
            (by_id or free)[0].answer = text
        elif not told:
            self._waiting.append(_Call(None, None, answer=text))

    def _told(self) -> Iterator[Block]:
        """The calls, each with its answer."""
        for call in self._waiting:
            if call.tool is not None or call.arguments is not None:
                yield self._call(call)
            yield self._answered(call, beside=call.tool is not None or call.arguments is not None)
        self._waiting = []

    def _call(self, call: _Call) -> Block:
        text, language = _arguments(call.arguments)
        name = one_line(call.tool or "no tool named", 60)
        return Block(Kind.CALL, f"calls {name}", self._clean(text), language=language)

    def _answered(self, call: _Call, beside: bool) -> Block:
        record = call.record
        fault, error = record.get("fault"), record.get("error")
        detail = _call_detail(record)
        if fault:
            whose = "the model's fault" if fault == "policy" else "not the model's fault"
            text = call.answer or ""
            if isinstance(error, str) and error not in text:
                text = f"{text}\n{error}".strip()
            return Block(Kind.FAULT, f"failed, {whose}", self._clean(text), detail, beside=beside)
        if call.answer is None:
            return Block(Kind.NOTE, "no answer", "", detail, beside=beside)
        return Block(Kind.ANSWER, "answers", self._clean(call.answer), detail, beside=beside)

    def _thinking(self, text: str) -> Block:
        lines = text.strip().count("\n") + 1
        return Block(Kind.THINKING, "thinking", self._clean(text.strip()), figures.plural(lines, "line"), folded=True)

    def _timings(self, turn: int) -> str:
        entries = [entry for entry in self._record.turns if entry.get("turn") == turn]
        parts = []
        tokens = [entry["tokens"] for entry in entries if isinstance(entry.get("tokens"), int)]
        if sum(tokens):
            parts.append(figures.plural(sum(tokens), "token"))
        totals = [timing.get("total") for entry in entries if isinstance(timing := entry.get("timings"), Mapping)]
        if known := [value for total in totals if (value := number(total)) is not None]:
            parts.append(figures.seconds(sum(known)))
        return _joined(parts)


def _split(text: str) -> Iterator[tuple[str, str]]:
    """A turn's text by thinking, calls, and what is said."""
    if "</think>" in text and "<think>" not in text.partition("</think>")[0]:  # the template wrote the first marker
        text = f"<think>{text}"
    done = 0
    for part in _PARTS.finditer(text):
        if part["answer"] is not None:
            continue
        yield "said", text[done : part.start()]
        yield ("thinking", part["thinking"]) if part["thinking"] is not None else ("call", part["call"])
        done = part.end()
    yield "said", text[done:]


def _written(call: Mapping[str, Any]) -> _Call:
    function = call.get("function")
    inner = function if isinstance(function, Mapping) else call
    name, identity = inner.get("name"), call.get("id")
    return _Call(
        name if isinstance(name, str) else None,
        inner.get("arguments"),
        id=identity if isinstance(identity, str) else None,
    )


def _spelt(text: str) -> _Call:
    """A call as the model spelt it. One that can't be read is shown as it is."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return _Call(None, text.strip("\n"))
    return _written(parsed) if isinstance(parsed, Mapping) and "name" in parsed else _Call(None, text.strip("\n"))


def _arguments(arguments: Any) -> tuple[str, str | None]:
    """Arguments as text, and its language. One that is a program is shown as a program, not as JSON of one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments, None
    if not isinstance(arguments, Mapping):
        return as_text(arguments), "json"
    code = arguments.get("code")
    if not isinstance(code, str):
        return as_text(arguments), "json"
    language = arguments.get("language")
    others = {
        key: value for key, value in arguments.items() if key != "code" and (key, value) != ("language", "python")
    }
    heading = f"{as_text(others, indent=None)}\n" if others else ""
    return heading + code.strip("\n"), language if isinstance(language, str) else "python"


def _call_detail(record: Mapping[str, Any]) -> str:
    """What a call took and earned."""
    metrics = record.get("metrics")
    metrics = metrics if isinstance(metrics, Mapping) else {}
    parts: list[str] = []
    for value, said in (
        (record.get("seconds"), "{}"),
        (metrics.get("queue_wait"), "waited {}"),
        (metrics.get("execution_time"), "ran {}"),
    ):
        if (known := number(value)) is not None:
            parts.append(said.format(figures.seconds(known)))
    attempts = metrics.get("attempts")
    if isinstance(attempts, int) and attempts > 1:
        parts.append(figures.plural(attempts, "attempt"))
    if (reward := number(record.get("reward"))) is not None:
        parts.append(f"reward {figures.score(reward)}")
    return _joined(parts)


def _joined(parts: Sequence[str]) -> str:
    """Parts of a detail, which are broken into lines between them only."""
    return " · ".join(part.replace(" ", "\u00a0") for part in parts)
