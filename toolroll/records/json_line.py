"""Encode and decode one line of JSON.

Every value of a trajectory can be encoded: numbers that are not finite become null, lone surrogates are escaped, arrays
become lists, and values without a JSON equivalent become strings. Every line that Python's `json` writes can be
decoded; NaN becomes null. Integers of any size are preserved exactly, because one may be the answer to a question.

orjson encodes, and pydantic's parser decodes, because orjson would convert large integers to floats. Values that they
reject are handled by slower code in Python.
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

MAX_NESTING_DEPTH = 200
"""Maximum nesting depth of encoded values. The limit of orjson is 254."""
ORJSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


class BadLine(ToolrollError):
    """Raised when a line cannot be read."""


def encode(fields: Any) -> bytes:
    """Return a value as a line of JSON, including the newline."""
    try:
        return orjson.dumps(fields, _simplify, ORJSON_OPTIONS)
    except TypeError:
        return json.dumps(_to_json(fields, 0), separators=(",", ":")).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Return the object that a line contains.

    Raises:
        BadLine: If the line is not a JSON object.
    """
    try:
        value = from_json(line, allow_inf_nan=False, cache_strings="keys")
    except ValueError:
        value = _decode_in_python(line)
    if not isinstance(value, dict):
        raise BadLine(f"Expected a JSON object, got {line[:40].decode('utf-8', 'replace').strip()!r}.")
    return value


def _decode_in_python(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"), parse_constant=lambda _: None)
    except UnicodeDecodeError as error:
        raise BadLine(f"Invalid UTF-8: byte {error.start} is 0x{line[error.start]:02x}.") from error
    except RecursionError as error:
        raise BadLine("Invalid JSON: nested too deeply.") from error
    except ValueError as error:
        raise BadLine(f"Invalid JSON: {error}.") from error


def _to_json(value: Any, depth: int) -> Any:
    """Return a value that the standard library can encode."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if _is_printable(value) else f"(integer of {value.bit_length()} bits)"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if depth >= MAX_NESTING_DEPTH:
        return "(nested too deeply)"
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else str(_to_json(key, depth + 1)): _to_json(item, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_to_json(item, depth + 1) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if not field.name.startswith("_")]  # as orjson does
        return {name: _to_json(getattr(value, name), depth + 1) for name in names}
    return _to_json(_simplify(value), depth + 1)


def _is_printable(value: int) -> bool:
    """Return True if the integer is within the limit of `sys.set_int_max_str_digits`."""
    try:
        return bool(str(value))
    except ValueError:
        return False


def _simplify(value: Any) -> Any:
    """Convert a value that orjson does not support one step towards JSON, to a string if nothing else applies."""
    try:
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, Set):
            return list(value)
        if isinstance(value, bytes | bytearray | memoryview):
            return base64.b64encode(value).decode("ascii")
        if not isinstance(value, type):
            if hasattr(value, "model_dump"):  # pydantic models; importing pydantic would slow down the viewer
                return value.model_dump()
            if hasattr(value, "tolist"):  # arrays and tensors
                return value.tolist()
        return str(value)
    except Exception as error:  # a user's object must not prevent the line from being written
        return f"({type(value).__name__}, cannot be encoded: {type(error).__name__})"
