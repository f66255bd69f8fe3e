"""A sample as its fields: every key of the line, with its value as it was written."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rich.cells import cell_len

from toolroll.records.record import Record
from toolroll.viewer import figures
from toolroll.viewer.document import Block, Document, Kind
from toolroll.viewer.harmless import harmless, one_line

PACKED = ("tokens", "earlier")
"""Fields of numbers packed for machines. They have a view of their own."""

SHORT = 100
"""Characters up to which a value is put on a line with its name."""


def fields(record: Record, hidden: Collection[str] = (), clean: Callable[[str], str] = harmless) -> Document:
    """All fields but those that are hidden."""
    names = [name for name in record.fields if name not in hidden]
    if not names:
        said = "This line has no fields." if not record.fields else "No field is chosen: press d to choose."
        return Document([Block(Kind.NOTE, said)])
    return Document([_as_written(name, record.fields[name], clean) for name in names])


def field_blocks(values: Mapping[str, Any], clean: Callable[[str], str]) -> list[Block]:
    """Some fields: what is short together, all else each by itself."""
    short, long = [], []
    for name, value in values.items():
        text = as_text(value, indent=None)
        if len(text) <= SHORT and "\n" not in text:
            short.append((one_line(name, 40), text))
        else:
            language = None if isinstance(value, str) else "json"
            long.append(Block(Kind.FIELD, one_line(name, 60), clean(as_text(value)), language=language))
    width = max((cell_len(name) for name, _ in short), default=0)
    lines = [f"{name}{' ' * (width - cell_len(name))}  {clean(text)}" for name, text in short]
    return [*([Block(Kind.FIELD, "fields", "\n".join(lines))] if lines else []), *long]


def as_text(value: Any, indent: int | None = 2) -> str:
    """Any value as text: a text as it is, the parts of a message joined, all else as JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and "type" in part for part in value):
        return "\n".join(_part(part) for part in value)
    try:
        return json.dumps(value, ensure_ascii=False, indent=indent, default=str)
    except (ValueError, RecursionError):
        return str(value)


def _as_written(name: str, value: Any, clean: Callable[[str], str]) -> Block:
    if name in PACKED and isinstance(value, Mapping | list) and value:
        kept = figures.size(len(as_text(value, indent=None)))
        return Block(Kind.FIELD, name, "", f"{kept} of packed numbers: press t to see the tokens")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=4, default=str)
    return Block(Kind.FIELD, one_line(name, 60), clean(text), language=None if isinstance(value, str) else "json")


def _part(part: Mapping[str, Any]) -> str:
    text = part.get("text")
    return text if isinstance(text, str) else f"[{part.get('type')}]"
