"""One line of JSON: how it is written, and how it is read.

Whatever a trajectory holds can be written: numbers that aren't finite become null, text with lone surrogates is
escaped, arrays become lists, and what JSON has no word for becomes text. Whatever Python's own `json` wrote can be
read: NaN is null. A whole number is written and read exactly, beyond 64 bits too: it may be the answer to a
question.

orjson writes and pydantic's parser reads, which unlike orjson's makes no float of a large number; what they refuse goes
the slow way.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Mapping, Set
from typing import Any

import orjson
from pydantic_core import from_json

from toolroll.errors import ToolrollError

DEEPEST = 200
"""Levels of nesting that are written: orjson's own limit is 254, and a model may write any number of brackets."""
OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


class BadLine(ToolrollError):
    """A line that can't be read. The message says what is wrong with it."""


def encode(fields: Any) -> bytes:
    """The line, with its newline."""
    try:
        return orjson.dumps(fields, _plainer, OPTIONS)
    except TypeError:
        return json.dumps(_plain(fields, 0), separators=(",", ":")).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """What a line holds: an object. Raises BadLine."""
    try:
        value = from_json(line, allow_inf_nan=False, cache_strings="keys")
    except ValueError:
        value = _decode_slowly(line)
    if not isinstance(value, dict):
        raise BadLine(f"It is JSON, but no object: {line[:40].decode('utf-8', 'replace').strip()!r}.")
    return value


def _decode_slowly(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"), parse_constant=lambda _: None)
    except UnicodeDecodeError as error:
        raise BadLine(f"It is no UTF-8: byte {error.start} is 0x{line[error.start]:02x}.") from error
    except RecursionError as error:
        raise BadLine("It is nested too deeply.") from error
    except ValueError as error:
        raise BadLine(f"It is no JSON: {error}.") from error


def _plain(value: Any, depth: int) -> Any:
    """`value` as the standard library can write it."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if _has_digits(value) else f"(a whole number of {value.bit_length()} bits)"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if depth >= DEEPEST:
        return "(nested too deeply)"
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else str(_plain(key, depth + 1)): _plain(item, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {name: _plain(item, depth + 1) for name, item in named}
    return _plain(_plainer(value), depth + 1)


def _has_digits(value: int) -> bool:
    """Whether Python is willing to write it: `sys.set_int_max_str_digits` bounds that."""
    try:
        return bool(str(value))
    except ValueError:
        return False


def _plainer(value: Any) -> Any:
    """What orjson doesn't know, nearer to JSON: text, where nothing better is known of it."""
    try:
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, Set):
            return list(value)
        if isinstance(value, bytes | bytearray | memoryview):
            return base64.b64encode(value).decode("ascii")
        if not isinstance(value, type):
            if hasattr(value, "model_dump"):  # pydantic's models; to load it for this would hold the viewer up
                return value.model_dump()
            if hasattr(value, "tolist"):  # arrays and tensors
                return value.tolist()
        return str(value)
    except Exception as error:  # an object of the user's, which must not cost the line
        return f"({type(value).__name__}, which can't be shown: {type(error).__name__})"
