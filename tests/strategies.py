"""Hypothesis strategies for JSON values and for JSON Schemas with all keywords."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

NAMES = st.text(max_size=6) | st.sampled_from(
    ["type", "title", "properties", "$ref", "enum", "default", "copy", "_key_order"]
)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)

TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
COUNT = st.integers(0, 5)
NUMBER = st.integers(-100, 100) | st.floats(-1e6, 1e6)
PATTERN = st.sampled_from(["", "^a", "[0-9]+$", "^(x|y)*$"])


def _schema_object(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for JSON Schemas with any keywords in any order, whose subschemas are `inner`."""
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": TYPES | st.lists(TYPES, min_size=1, max_size=3, unique=True),
        "description": st.text(max_size=10),
        "title": st.text(max_size=10),
        "default": JSON,
        "const": JSON,
        "examples": st.lists(JSON, max_size=2),
        "enum": st.lists(JSON, max_size=3),
        "properties": st.dictionaries(NAMES, inner, max_size=3),
        "patternProperties": st.dictionaries(PATTERN, inner, max_size=2),
        "additionalProperties": inner,
        "required": st.lists(NAMES, max_size=3, unique=True),
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=2),
        "minProperties": COUNT,
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "contains": inner,
        "maxItems": COUNT,
        "uniqueItems": st.booleans(),
        "minLength": COUNT,
        "pattern": PATTERN,
        "format": st.sampled_from(["date-time", "email", "made-up"]),
        "minimum": NUMBER,
        "exclusiveMaximum": NUMBER,
        "multipleOf": st.sampled_from([1, 2, 0.1, 0.5, 3.7]),
        "anyOf": st.lists(inner, min_size=1, max_size=3),
        "oneOf": st.lists(inner, min_size=1, max_size=2),
        "allOf": st.lists(inner, min_size=1, max_size=2),
        "not": inner,
        "$defs": st.dictionaries(NAMES, inner, max_size=2),
        "$ref": st.sampled_from(["#", "#/$defs/a"]),
        "$comment": st.text(max_size=5),
        "readOnly": st.booleans(),
        "x-custom": JSON,
    }
    chosen = st.lists(st.sampled_from(sorted(keywords)), max_size=5, unique=True)
    return chosen.flatmap(lambda keys: st.fixed_dictionaries({key: keywords[key] for key in keys}))


SUBSCHEMAS = st.recursive(st.booleans() | _schema_object(st.booleans()), _schema_object, max_leaves=8)
JSON_SCHEMAS = _schema_object(SUBSCHEMAS)
"""Valid JSON Schema objects."""
PARAMETER_SCHEMAS = JSON_SCHEMAS.map(lambda schema: {**schema, "type": "object"})
"""Valid JSON Schemas for the arguments of a tool; some have a `$ref` that is unresolvable or circular."""


def scaled(max_examples: int) -> int:
    """Return a number of examples for `settings`: the given number, or 30 times as many in `make nightly`."""
    return max_examples * settings().max_examples // settings.get_profile("default").max_examples
