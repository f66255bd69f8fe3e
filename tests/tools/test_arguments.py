"""Tests of ArgumentValidator: arguments satisfy the schema or are rejected with one line."""

import json
import pickle
from typing import Any

import pytest
from hypothesis import event, given, reject, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from strategies import JSON, PARAMETER_SCHEMAS, scaled

from toolroll.errors import ConfigError, InvalidArguments
from toolroll.tools.arguments import ArgumentValidator

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Z]"},
        "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "unit": {"enum": ["c", "f"]},
        "stops": {
            "type": "array",
            "items": {"type": "object", "properties": {"km": {"type": "number"}}, "required": ["km"]},
        },
        "step": {"type": "number", "multipleOf": 0.1},
    },
    "required": ["city"],
    "additionalProperties": False,
}

ANY_ARGUMENTS = st.dictionaries(st.text(max_size=3), JSON, max_size=3) | JSON


def is_one_short_line(text: str) -> bool:
    return text.endswith(".") and "\n" not in text and len(text) < 1200


def parsed_or_message(validator: ArgumentValidator, arguments: Any) -> dict[str, Any] | str:
    try:
        return validator.parse(arguments)
    except InvalidArguments as error:
        return str(error)


@settings(max_examples=scaled(200))
@given(PARAMETER_SCHEMAS, ANY_ARGUMENTS)
def test_any_arguments_are_valid_or_rejected_in_one_line(schema: dict[str, Any], arguments: Any) -> None:
    try:
        validator = ArgumentValidator("f", schema)
    except ConfigError as error:
        event(str(error).partition("refer to ")[2][:10])
        reject()
    for given_as in (arguments, json.dumps(arguments)):
        outcome = parsed_or_message(validator, given_as)
        if isinstance(outcome, str):
            assert is_one_short_line(outcome)
        else:
            assert Draft202012Validator(schema).is_valid(outcome)


@given(st.text() | st.binary().map(lambda data: data.decode("utf-8", "surrogateescape")))
def test_any_text_is_valid_or_rejected_in_one_line(text: str) -> None:
    outcome = parsed_or_message(ArgumentValidator("f", {"type": "object"}), text)
    assert isinstance(outcome, dict) or is_one_short_line(outcome)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ('{"city": 5}', "'city' must be a string, not 5."),
        ("{}", "'city' is missing."),
        ("", "'city' is missing."),
        ('{"city": "Rome", "days": "two"}', "'days' must be an integer or null, not \"two\"."),
        ('{"city": "Rome", "unit": "k"}', '\'unit\' must be one of "c", "f", not "k".'),
        ('{"city": "Rome", "stops": [{"km": 1}, {}]}', "'stops[1].km' is missing."),
        (
            '{"city": "Rome", "color": 1}',
            "unknown parameter 'color' (allowed: 'city', 'days', 'unit', 'stops', 'step').",
        ),
        ('{"city": "rome"}', "'rome' does not match '^[A-Z]'."),
        ('{"city": "Rome"', "invalid JSON: expecting ',' delimiter at line 1, column 16"),
        ('{"city": NaN}', "NaN is not a JSON number"),
        ('{"city": "Rome", "step": 1e999}', "1e999 is not a JSON number"),
        ('{"city": "Ro', "invalid JSON: unterminated string starting at line 1, column 10"),
        ('{"city": "R\\ud800"}', "invalid JSON"),
        ('["Rome"]', "expected a JSON object, got an array."),
        ("null", "expected a JSON object, got null."),
        ('{"city": "Rome", "step": 1' + "0" * 400 + "}", "could not be validated"),
        ('{"city": ' + "1" * 5000 + "}", "invalid JSON"),
        ("[" * 200_000, "nested more than 40 levels deep."),
        ('{"city": ' + "[" * 500 + "]" * 500 + "}", "nested more than 40 levels deep."),
    ],
)
def test_message_describes_problem(arguments: str, message: str) -> None:
    with pytest.raises(InvalidArguments) as caught:
        ArgumentValidator("weather", SCHEMA).parse(arguments)
    assert str(caught.value).startswith("Invalid arguments for weather: ")
    assert message in str(caught.value)


def test_long_values_and_many_errors_are_shortened() -> None:
    with pytest.raises(InvalidArguments) as caught:
        ArgumentValidator("weather", SCHEMA).parse(
            {"city": "x" * 100_000, "days": "y" * 100_000, "unit": 1, "step": "a", "stops": 1}
        )
    assert is_one_short_line(str(caught.value))
    assert str(caught.value).endswith("and there are further errors.")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string"}, "Arguments are always an object"),
        ({"properties": {"a": {"type": "strin"}}}, "properties.a.type"),
        ({"properties": {"a": {"pattern": "("}}}, "properties.a.pattern"),
        ({"properties": {"a": {"$ref": "#/$defs/A"}}}, "Add it under $defs"),
        ({"properties": {"a": {"$ref": "https://example.com/a.json"}}}, "which is not in the schema"),
        ({"$schema": 5}, "$schema"),
        (
            {"properties": {"a": {"$ref": "#/properties/b"}, "b": {"anyOf": [True]}}, "$ref": "#/properties/b/anyOf/x"},
            "'f'",
        ),
        ({"not": {"$ref": "#"}}, "leads back to itself"),
        (
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
            "must recurse through properties",
        ),
    ],
)
def test_invalid_schema_is_rejected_at_creation(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ArgumentValidator("f", schema)
    assert message in str(caught.value)
    assert "'f'" in str(caught.value)


def test_older_draft_and_pickling() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {"a": {"$ref": "#/definitions/small"}, "b": {"items": [{"type": "string"}]}},
        "definitions": {"small": {"maximum": 3}},
    }
    validator = pickle.loads(pickle.dumps(ArgumentValidator("f", schema)))
    assert validator.parse('{"a": 3, "b": ["x", 5]}')
    for wrong in ('{"a": 4}', '{"b": [5]}'):
        with pytest.raises(InvalidArguments):
            validator.parse(wrong)


def test_unknown_parameter_names_are_shortened() -> None:
    for odd in ({"x" * 1_000_000: 1}, {f"x{number}": 1 for number in range(10_000)}):
        assert is_one_short_line(str(parsed_or_message(ArgumentValidator("weather", SCHEMA), odd)))


def test_recursive_ref_is_supported() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    validator = ArgumentValidator("f", {"properties": {"head": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}})
    assert validator.parse('{"head": {"next": {"next": {}}}}')
    with pytest.raises(InvalidArguments, match=r"head\.next"):
        validator.parse('{"head": {"next": {"last": {}}}}')
