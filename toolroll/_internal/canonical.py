"""Hashes of values, by a canonical form.

Invariant: values that a program can distinguish have different canonical forms, so `1`, `1.0`, `True` and `"1"` do. The
order of the keys of a dict has no effect.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from toolroll.errors import ToolrollError

SIMPLE_TYPES = (type(None), bool, int, float, str)
"""Types of which JSON texts are canonical. Not those of their subclasses."""


class NotCanonical(ToolrollError):
    """Raised when a value has no canonical form, so that it cannot be compared."""


def canonical(value: Any) -> str:
    """Return a text that is the same for equal values, and different for others.

    Args:
        value: Any combination of JSON values, tuples, sets, bytes, arrays, dataclasses and pydantic models.

    Raises:
        NotCanonical: If the value contains an object of another type.

    Example:
        >>> canonical({"b": 1.0, "a": [1, True]})
        '["dict",["a",["list",1,true]],["b",1.0]]'
    """
    try:
        return _to_text(_simplify(value))
    except (RecursionError, ValueError) as error:  # ValueError: an integer with too many digits
        raise NotCanonical(f"A value has no canonical form: {error}.") from error


def hash_of(*parts: Any) -> str:
    """Return the hash of values with a canonical form.

    Raises:
        NotCanonical: If a value has none.
    """
    return hashlib.sha256(canonical(parts).encode()).hexdigest()


_to_text = json.JSONEncoder(separators=(",", ":")).encode


def _simplify(value: Any) -> Any:
    """Return a JSON value in which each list starts with the type that it stands for."""
    kind = type(value)
    if kind in SIMPLE_TYPES:
        return value
    if kind in (list, tuple):
        return [kind.__name__, *map(_simplify, value)]
    if kind is dict:
        return ["dict", *sorted(([_simplify(key), _simplify(item)] for key, item in value.items()), key=_to_text)]
    if kind in (set, frozenset):
        return [kind.__name__, *sorted(map(_simplify, value), key=_to_text)]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.hex()]
    return [f"{kind.__module__}.{kind.__qualname__}", _simplify(_parts_of(value))]


def _parts_of(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # arrays and numbers of NumPy
        return [str(value.dtype), value.tolist()]
    raise NotCanonical(f"A value of type {type(value).__name__} has no canonical form.")
