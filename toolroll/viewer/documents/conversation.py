"""A sample as a conversation: messages turn by turn, each tool call paired with its result.

Nothing of a record is lost: fields that are not part of the conversation follow it. Thinking is folded. The result of a
call shows its timings, its reward and, if it failed, whether that was a policy or an infra fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from toolroll._internal.sanitize import one_line, sanitize
from toolroll.records.record import Record, number
from toolroll.viewer import formatting
from toolroll.viewer.documents.document import Block, BlockKind, Document
from toolroll.viewer.documents.fields import Clean, as_mapping, as_text, field_blocks

_PARTS = re.compile(
    r"<think>(?P<thinking>.*?)(?:</think>|\Z)|<tool_call>(?P<call>.*?)(?:</tool_call>|\Z)"
    r"|<tool_response>(?P<result>.*?)(?:</tool_response>|\Z)",
    re.DOTALL,
)
_SHOWN_FIELDS = {"input", "output", "messages", "tokens", "earlier", "calls", "turns", "error"}
"""Fields that the conversation or another view already shows."""


@dataclass
class _ToolUse:
    """A tool call as the model wrote it, with the result and the record of its execution as far as they exist."""

    tool: str | None
    arguments: Any
    call_id: Any = None
    result: str | None = None
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_call(self) -> bool:
        return self.tool is not None or self.arguments is not None


def conversation(record: Record, clean: Clean = sanitize) -> Document:
    """Return a sample as a conversation.

    Args:
        record: Sample to display. Malformed messages, calls and turns are displayed as far as possible.
        clean: Function that sanitizes text.
    """
    blocks = list(_ConversationRenderer(record, clean).blocks())
    if record.error:
        blocks.append(Block(BlockKind.FAULT, "error", clean(record.error)))
    rest = {name: value for name, value in record.fields.items() if name not in _SHOWN_FIELDS and value is not None}
    return Document([*blocks, *field_blocks(rest, clean)])


class _ConversationRenderer:
    """Iterates over the messages and pairs calls with results."""

    def __init__(self, record: Record, clean: Clean) -> None:
        self._record = record
        self._clean = clean
        self._messages = record.messages
        written = sum(message.get("role") == "assistant" for message in self._messages)
        recorded = {str(turn.get("turn")) for turn in record.turns}
        self._turn = len(recorded) - written if recorded else 0
        """Turn of the next assistant message, from 0 as in the record, negative for those in the prompt."""
        self._pending: list[_ToolUse] = []
        """Calls of the last assistant message. Their results follow it."""

    def blocks(self) -> Iterator[Block]:
        for message in self._messages:
            role = message.get("role")
            if role == "tool":
                self._add_result(as_text(message.get("content")), message.get("tool_call_id"))
            elif role == "assistant":
                yield from self._flush_calls()
                yield from self._assistant(message)
            else:
                yield from self._input(str(role), as_text(message.get("content")))
        yield from self._flush_calls()

    def _input(self, role: str, text: str) -> Iterator[Block]:
        """Yield a message of the system or the user. Chat templates put tool results into user messages."""
        if self._pending and "<tool_response>" in text:
            for part in _PARTS.finditer(text):
                self._add_result((part["result"] or "").strip("\n"), None)
            text = _PARTS.sub("", text).strip()
            if not text:
                return
        yield from self._flush_calls()
        kind = BlockKind.SYSTEM if role in ("system", "developer") else BlockKind.USER
        yield Block(kind, one_line(role), self._clean(text))

    def _assistant(self, message: Mapping[str, Any]) -> list[Block]:
        """Return the text and the thinking of an assistant message, and remember its calls."""
        turn, self._turn = self._turn, self._turn + 1
        reasoning = message.get("reasoning_content")
        blocks = [self._thinking(as_text(reasoning))] if reasoning else []
        structured = message.get("tool_calls")
        entries = structured if isinstance(structured, list) else []
        calls = [_parsed_call(entry) for entry in entries if isinstance(entry, Mapping)]
        for kind, text in _split(as_text(message.get("content"))):
            if kind is BlockKind.CALL:
                calls.append(_inline_call(text))
            elif kind is BlockKind.THINKING:
                blocks.append(self._thinking(text))
            elif text.strip():
                blocks.append(Block(kind, "assistant", self._clean(text.strip("\n"))))
        self._pending = self._with_records(calls, turn)
        return self._with_turn_title(blocks, turn)

    def _with_turn_title(self, blocks: list[Block], turn: int) -> list[Block]:
        """Put the turn and its timings into the title of the first text block, adding an empty one if there is none."""
        title = f"assistant · turn {turn}" if turn >= 0 else "assistant · in the prompt"
        detail = self._turn_detail(turn)
        for index, block in enumerate(blocks):
            if block.kind is BlockKind.ASSISTANT:
                return [*blocks[:index], replace(block, title=title, detail=detail), *blocks[index + 1 :]]
        return [*blocks, Block(BlockKind.ASSISTANT, title, "", detail)]

    def _with_records(self, calls: list[_ToolUse], turn: int) -> list[_ToolUse]:
        """Attach the call records of a turn to its calls, in order. Records without a call are appended."""
        recorded = [call for call in self._record.calls if call.get("turn") == turn]
        for index, entry in enumerate(recorded):
            if index == len(calls):
                calls.append(_ToolUse(entry.get("tool"), entry.get("arguments")))
            calls[index].record = entry
            answer = entry.get("answer")
            calls[index].result = answer if isinstance(answer, str) and answer else None
        return calls

    def _add_result(self, text: str, call_id: Any) -> None:
        """Assign a tool message to its call: by ID, else to the first call without a result."""
        open_calls = [call for call in self._pending if call.result is None]
        is_recorded = any(call.result == text and call.record for call in self._pending)
        by_id = [call for call in open_calls if call_id is not None and call.call_id == call_id]
        if by_id or (open_calls and not is_recorded):
            (by_id or open_calls)[0].result = text
        elif not is_recorded:
            self._pending.append(_ToolUse(None, None, result=text))

    def _flush_calls(self) -> Iterator[Block]:
        """Yield the pending calls, each followed by its result."""
        for call in self._pending:
            if call.has_call:
                text, language = _arguments_text(call.arguments)
                title = f"call {one_line(call.tool or 'unnamed tool', 60)}"
                yield Block(BlockKind.CALL, title, self._clean(text), language=language)
            yield replace(self._result(call), detail=_call_detail(call.record), beside=call.has_call)
        self._pending = []

    def _result(self, call: _ToolUse) -> Block:
        fault, error = call.record.get("fault"), call.record.get("error")
        if fault:
            text = call.result or ""
            if isinstance(error, str) and error not in text:
                text = f"{text}\n{error}".strip()
            return Block(BlockKind.FAULT, f"{'policy' if fault == 'policy' else 'infra'} fault", self._clean(text))
        if call.result is None:
            return Block(BlockKind.NOTE, "no result")
        return Block(BlockKind.RESULT, "result", self._clean(call.result))

    def _thinking(self, text: str) -> Block:
        text = text.strip()
        lines = formatting.plural(text.count("\n") + 1, "line")
        return Block(BlockKind.THINKING, "thinking", self._clean(text), lines, folded=True)

    def _turn_detail(self, turn: int) -> str:
        entries = [entry for entry in self._record.turns if entry.get("turn") == turn]
        tokens = sum(entry["tokens"] for entry in entries if isinstance(entry.get("tokens"), int))
        totals = [number(as_mapping(entry.get("timings")).get("total")) for entry in entries]
        known = [total for total in totals if total is not None]
        duration = formatting.seconds(sum(known)) if known else ""
        return _join_details(formatting.plural(tokens, "token") if tokens else "", duration)


def _split(text: str) -> Iterator[tuple[BlockKind, str]]:
    """Split the text of a turn into plain text, thinking and calls."""
    if "</think>" in text and "<think>" not in text.partition("</think>")[0]:  # the chat template wrote the first tag
        text = f"<think>{text}"
    end = 0
    for part in _PARTS.finditer(text):
        if part["result"] is not None:
            continue
        yield BlockKind.ASSISTANT, text[end : part.start()]
        kind = BlockKind.CALL if part["thinking"] is None else BlockKind.THINKING
        yield kind, part[kind]
        end = part.end()
    yield BlockKind.ASSISTANT, text[end:]


def _parsed_call(call: Mapping[str, Any]) -> _ToolUse:
    inner = as_mapping(call.get("function")) or call
    name = inner.get("name")
    return _ToolUse(name if isinstance(name, str) else None, inner.get("arguments"), call.get("id"))


def _inline_call(text: str) -> _ToolUse:
    """Parse a call within the text of a turn. A malformed call is displayed as it was written."""
    parsed = _parse_json(text)
    if isinstance(parsed, Mapping) and "name" in parsed:
        return _parsed_call(parsed)
    return _ToolUse(None, text.strip("\n"))


def _arguments_text(arguments: Any) -> tuple[str, str | None]:
    """Return arguments as text, with its language. A program in the argument `code` is displayed as source code."""
    if isinstance(arguments, str):
        arguments = _parse_json(arguments)
        if isinstance(arguments, str):
            return arguments, None
    code = as_mapping(arguments).get("code")
    if not isinstance(code, str):
        return as_text(arguments), "json"
    language = arguments.get("language")
    shown = ("code", code), ("language", "python")
    others = dict(item for item in arguments.items() if item not in shown)
    heading = f"{as_text(others, indent=None)}\n" if others else ""
    return heading + code.strip("\n"), language if isinstance(language, str) else "python"


def _parse_json(text: str) -> Any:
    """Return a parsed text, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _call_detail(record: Mapping[str, Any]) -> str:
    """Return the timings, the attempts and the reward of a call."""
    metrics = as_mapping(record.get("metrics"))
    durations = {"": record.get("seconds"), "queued ": metrics.get("queue_wait"), "ran ": metrics.get("execution_time")}
    known = {label: number(value) for label, value in durations.items()}
    parts = [label + formatting.seconds(value) for label, value in known.items() if value is not None]
    attempts, reward = metrics.get("attempts"), number(record.get("reward"))
    if isinstance(attempts, int) and attempts > 1:
        parts.append(formatting.plural(attempts, "attempt"))
    return _join_details(*parts, "" if reward is None else f"reward {formatting.score(reward)}")


def _join_details(*parts: str) -> str:
    """Join the parts that are not empty so that lines break only between them."""
    return " · ".join(part.replace(" ", "\u00a0") for part in parts if part)
