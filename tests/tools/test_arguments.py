"""Arguments either satisfy the schema or come back as one sentence."""

import json
import pickle
from typing import Any

import pytest
from hypothesis import event, given, reject, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from strategies import JSON, PARAMETER_SCHEMAS

from toolroll.errors import ConfigError, InvalidArguments
from toolroll.tools.arguments import ArgumentChecker

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


def is_one_sentence(text: str) -> bool:
    return text.endswith(".") and "\n" not in text and len(text) < 1200


def parsed_or_said(checker: ArgumentChecker, arguments: Any) -> dict[str, Any] | str:
    try:
        return checker.parse(arguments)
    except InvalidArguments as error:
        return str(error)


@settings(max_examples=500)
@given(PARAMETER_SCHEMAS, ANY_ARGUMENTS)
def test_any_arguments_validate_or_give_a_sentence(schema: dict[str, Any], arguments: Any) -> None:
    try:
        checker = ArgumentChecker("f", schema)
    except ConfigError as error:
        event(str(error).partition("refer to ")[2][:10])
        reject()
    for given_as in (arguments, json.dumps(arguments)):
        outcome = parsed_or_said(checker, given_as)
        if isinstance(outcome, str):
            assert is_one_sentence(outcome)
        else:
            assert Draft202012Validator(schema).is_valid(outcome)


@given(st.text() | st.binary().map(lambda data: data.decode("utf-8", "surrogateescape")))
def test_any_text_parses_or_gives_a_sentence(text: str) -> None:
    outcome = parsed_or_said(ArgumentChecker("f", {"type": "object"}), text)
    assert isinstance(outcome, dict) or is_one_sentence(outcome)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"city": 5}', "'city' must be a string, not 5."),
        ("{}", "'city' is missing."),
        ("", "'city' is missing."),
        ('{"city": "Rome", "days": "two"}', "'days' must be an integer or null, not \"two\"."),
        ('{"city": "Rome", "unit": "k"}', '\'unit\' must be one of "c", "f", not "k".'),
        ('{"city": "Rome", "stops": [{"km": 1}, {}]}', "'stops[1].km' is missing."),
        (
            '{"city": "Rome", "color": 1}',
            "has no parameter 'color' (allowed: 'city', 'days', 'unit', 'stops', 'step').",
        ),
        ('{"city": "rome"}', "'rome' does not match '^[A-Z]'."),
        ('{"city": "Rome"', "not valid JSON, expecting ',' delimiter at line 1, column 16"),
        ('{"city": NaN}', "NaN is not a JSON number"),
        ('{"city": "Rome", "step": 1e999}', "1e999 is not a JSON number"),
        ('{"city": "R\\ud800"}', "not valid JSON"),
        ('["Rome"]', "must be a JSON object, not an array."),
        ("null", "must be a JSON object, not null."),
        ('{"city": "Rome", "step": 1' + "0" * 400 + "}", "could not be checked"),
        ('{"city": ' + "1" * 5000 + "}", "not valid JSON"),
        ("[" * 200_000, "nested too deeply."),
        ('{"city": ' + "[" * 500 + "]" * 500 + "}", "nested too deeply."),
    ],
)
def test_what_is_wrong_is_said_so_that_a_model_can_mend_it(arguments: str, said: str) -> None:
    with pytest.raises(InvalidArguments) as caught:
        ArgumentChecker("weather", SCHEMA).parse(arguments)
    assert str(caught.value).startswith("Invalid arguments for weather: ")
    assert said in str(caught.value)


def test_a_long_value_is_not_quoted_whole_and_many_complaints_are_counted() -> None:
    with pytest.raises(InvalidArguments) as caught:
        ArgumentChecker("weather", SCHEMA).parse(
            {"city": "x" * 100_000, "days": "y" * 100_000, "unit": 1, "step": "a", "stops": 1}
        )
    assert is_one_sentence(str(caught.value))
    assert str(caught.value).endswith("and more is wrong.")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "string"}, "Arguments always come as an object"),
        ({"properties": {"a": {"type": "strin"}}}, "properties.a.type"),
        ({"properties": {"a": {"pattern": "("}}}, "properties.a.pattern"),
        ({"properties": {"a": {"$ref": "#/$defs/A"}}}, "Put it under $defs"),
        ({"properties": {"a": {"$ref": "https://example.com/a.json"}}}, "nothing is fetched"),
        ({"$schema": 5}, "$schema"),
        (
            {"properties": {"a": {"$ref": "#/properties/b"}, "b": {"anyOf": [True]}}, "$ref": "#/properties/b/anyOf/x"},
            "'f'",
        ),
        ({"not": {"$ref": "#"}}, "refer to themselves without end"),
        (
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
            "only from within properties",
        ),
    ],
)
def test_a_schema_that_is_wrong_is_refused_when_the_tool_is_made(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ArgumentChecker("f", schema)
    assert said in str(caught.value)
    assert "'f'" in str(caught.value)


def test_older_drafts_are_understood_and_tools_can_be_pickled() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {"a": {"$ref": "#/definitions/small"}, "b": {"items": [{"type": "string"}]}},
        "definitions": {"small": {"maximum": 3}},
    }
    checker = pickle.loads(pickle.dumps(ArgumentChecker("f", schema)))
    assert checker.parse('{"a": 3, "b": ["x", 5]}')
    for wrong in ('{"a": 4}', '{"b": [5]}'):
        with pytest.raises(InvalidArguments):
            checker.parse(wrong)


def test_names_that_the_model_made_up_are_not_quoted_whole() -> None:
    for odd in ({"x" * 1_000_000: 1}, {f"x{number}": 1 for number in range(10_000)}):
        assert is_one_sentence(str(parsed_or_said(ArgumentChecker("weather", SCHEMA), odd)))


def test_refs_within_the_schema_work_also_where_they_lead_in_a_circle() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    checker = ArgumentChecker("f", {"properties": {"head": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}})
    assert checker.parse('{"head": {"next": {"next": {}}}}')
    with pytest.raises(InvalidArguments, match=r"head\.next"):
        checker.parse('{"head": {"next": {"last": {}}}}')
