"""A sample as a document of its fields, each as it was written, or of its rewards and timings."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from toolroll._internal.sanitize import one_line, sanitize
from toolroll.records.record import Record, number
from toolroll.viewer import formatting
from toolroll.viewer.documents.document import Block, BlockKind, Document

PACKED_FIELDS = ("tokens", "earlier")
"""Fields with binary data, which the token view displays."""

MAX_INLINE_CHARS = 100
"""Maximum length of a value that is shown on one line with its name."""

Clean = Callable[[str], str]
"""Sanitizes the text of a sample."""


def fields_document(record: Record, hidden: Collection[str] = (), clean: Clean = sanitize) -> Document:
    """Return a document with one block per field.

    Args:
        record: Sample to display.
        hidden: Names of fields to leave out.
        clean: Function that sanitizes text.
    """
    names = [name for name in record.fields if name not in hidden]
    if not names:
        note = "No fields selected. Press d to choose." if record.fields else "This record has no fields."
        return Document([Block(BlockKind.NOTE, note)])
    return Document([_field_block(name, record.fields[name], clean) for name in names])


def field_blocks(values: Mapping[str, Any], clean: Clean) -> list[Block]:
    """Return one block for all short fields, followed by one block for each long field."""
    short: list[tuple[str, str]] = []
    long: list[Block] = []
    for name, value in values.items():
        text = as_text(value, indent=None)
        if len(text) <= MAX_INLINE_CHARS and "\n" not in text:
            short.append((one_line(name, 40), clean(text)))
        else:
            long.append(_text_block(name, as_text(value), clean, is_text=isinstance(value, str)))
    text = formatting.table(short, align_right=False)
    return [Block(BlockKind.FIELD, "fields", text), *long] if short else long


def as_text(value: Any, indent: int | None = 2) -> str:
    """Return any value as text: strings unchanged, the parts of a message joined, other values as JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and "type" in part for part in value):
        return "\n".join(_part_text(part) for part in value)
    try:
        return json.dumps(value, ensure_ascii=False, indent=indent, default=str)
    except (ValueError, RecursionError):
        return str(value)


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return a value if it is a mapping, else an empty mapping."""
    return value if isinstance(value, Mapping) else {}


def _field_block(name: str, value: Any, clean: Clean) -> Block:
    if name in PACKED_FIELDS and isinstance(value, Mapping | list) and value:
        size = formatting.size(len(as_text(value, indent=None)))
        return Block(BlockKind.FIELD, name, "", f"{size} of packed tokens; press t to view them")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=4, default=str)
    return _text_block(name, text, clean, is_text=isinstance(value, str))


def _text_block(name: str, text: str, clean: Clean, *, is_text: bool) -> Block:
    return Block(BlockKind.FIELD, one_line(name, 60), clean(text), language=None if is_text else "json")


def _part_text(part: Mapping[str, Any]) -> str:
    text, image = part.get("text"), as_mapping(part.get("image"))
    if image.keys() >= {"hash", "width", "height", "media_type"}:
        suffix = str(image["media_type"]).removeprefix("image/")
        return f"[image, {image['width']} × {image['height']} pixels: images/{image['hash']}.{suffix}]"
    return text if isinstance(text, str) else f"[{part.get('type')}]"


_VERL_FIELDS = {"input", "output", "gts", "score", "step", "uid", "request_id"}
"""Fields that verl writes itself. Other numbers in its records come from the reward function."""
_TURN_TABLE_HEADER = ("turn", "tokens", "finish", "weights", "time", "queue", "cached", "attempts")
_CALL_TABLE_HEADER = ("tool", "turn", "fault", "time", "queued", "ran", "attempts", "reward")


def rewards_document(record: Record, clean: Clean = sanitize) -> Document:
    """Return the rewards of a sample by component, and the timings of its turns and calls."""
    given, steps = record.rewards, record.rewards.get("steps")
    by_turn = {f"turn {turn}": value for turn, value in enumerate(steps)} if isinstance(steps, list) else {}
    extras = {
        name: value
        for name, value in record.fields.items()
        if not record.is_native and name not in _VERL_FIELDS and isinstance(value, int | float)
    }
    sections = {
        "score": formatting.score(record.score),
        "ground truth": None if record.gts is None else clean(as_text(record.gts)),
        "rewards by function": _number_table(given.get("functions")),
        "rewards by tool": _number_table(given.get("tools")),
        "rewards by turn": _number_table(by_turn),
        "rescored": _number_table(record.rescored),
        "reward extra info": _number_table(extras),
        "turns": formatting.table([_TURN_TABLE_HEADER, *map(_turn_row, record.turns)]) if record.turns else None,
        "tool calls": formatting.table([_CALL_TABLE_HEADER, *map(_call_row, record.calls)]) if record.calls else None,
    }
    blocks = [Block(BlockKind.FIELD, title, text) for title, text in sections.items() if text is not None]
    if len(blocks) == 1:
        blocks.append(Block(BlockKind.NOTE, "No details beyond the score were recorded."))
    return Document(blocks)


def _number_table(values: Any) -> str | None:
    rows = [(one_line(str(name), 40), _number(value)) for name, value in as_mapping(values).items()]
    return formatting.table(rows) if rows else None


def _turn_row(turn: Mapping[str, Any]) -> Sequence[str]:
    timings = as_mapping(turn.get("timings"))
    words = [_word(turn.get(name), 20) for name in ("finish", "weight_version")]
    durations = [formatting.seconds(number(timings.get(name))) for name in ("total", "queue")]
    counts = [_number(timings.get(name)) for name in ("cached_tokens", "attempts")]
    return [_turn(turn), _number(turn.get("tokens")), *words, *durations, *counts]


def _call_row(call: Mapping[str, Any]) -> Sequence[str]:
    metrics = as_mapping(call.get("metrics"))
    words = [_word(call.get("tool"), 24), _turn(call), _word(call.get("fault"), 10)]
    durations = [call.get("seconds"), metrics.get("queue_wait"), metrics.get("execution_time")]
    numbers = [_number(metrics.get("attempts")), _number(call.get("reward"))]
    return [*words, *(formatting.seconds(number(duration)) for duration in durations), *numbers]


def _turn(entry: Mapping[str, Any]) -> str:
    turn = entry.get("turn")
    return str(turn) if isinstance(turn, int) else "?"


def _word(value: Any, max_chars: int) -> str:
    return one_line(str(value or formatting.UNKNOWN), max_chars)


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    known = number(value)
    return str(value) if isinstance(value, int) and known is not None else formatting.score(known)
