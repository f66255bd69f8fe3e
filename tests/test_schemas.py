"""Tests of toolroll.schemas: tool schemas are preserved exactly."""

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import ValidationError
from strategies import JSON_SCHEMAS

from toolroll.schemas import (
    Message,
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    ToolCall,
    ToolResponse,
)

DUMP_FLAGS = st.fixed_dictionaries(
    {},
    optional={flag: st.booleans() for flag in ("exclude_none", "exclude_unset", "exclude_defaults", "by_alias")},
)


@given(JSON_SCHEMAS, DUMP_FLAGS, st.sampled_from(["python", "json"]))
def test_json_schema_round_trip_is_exact(schema: dict[str, Any], flags: Any, mode: Any) -> None:
    Draft202012Validator.check_schema(schema)
    text = json.dumps(schema)
    for schema_class in (OpenAIFunctionParametersSchema, OpenAIFunctionPropertySchema):
        model = schema_class.model_validate(schema)
        assert json.dumps(model.model_dump(mode=mode, **flags)) == text
        assert json.dumps(json.loads(model.model_dump_json(**flags))) == text
        assert json.dumps(schema_class.model_validate(model.model_dump()).model_dump()) == text
        assert pickle.loads(pickle.dumps(model)) == model


@given(JSON_SCHEMAS, JSON_SCHEMAS)
def test_tool_schema_keeps_key_order(parameters: dict[str, Any], nested: dict[str, Any]) -> None:
    tool_schema = {
        "function": {
            "parameters": {"required": ["q"], **parameters, "properties": {"q": nested}},
            "name": "search",
            "x-vendor": {"strict": None},
            "description": "Search.",
        },
        "type": "function",
    }
    assert json.dumps(OpenAIFunctionToolSchema.model_validate(tool_schema).model_dump()) == json.dumps(tool_schema)


def test_schema_built_from_model_classes() -> None:
    code = OpenAIFunctionPropertySchema(type="string", description="The code to execute.", enum=None)
    parameters = OpenAIFunctionParametersSchema(type="object", properties={"code": code}, required=["code"])
    function = OpenAIFunctionSchema(
        name="code_interpreter", description="Runs code.", parameters=parameters, strict=False
    )
    schema = OpenAIFunctionToolSchema(type="function", function=function)
    assert schema.model_dump() == {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "description": "Runs code.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The code to execute."}},
                "required": ["code"],
            },
            "strict": False,
        },
    }


def test_assigned_field_is_dumped() -> None:
    schema = OpenAIFunctionPropertySchema.model_validate({"default": None, "type": "string"})
    schema.description = "Changed."
    assert list(schema.model_dump().items()) == [("default", None), ("type", "string"), ("description", "Changed.")]


def test_equality_ignores_key_order() -> None:
    one = OpenAIFunctionPropertySchema.model_validate({"type": "string", "minLength": 1})
    assert one == OpenAIFunctionPropertySchema.model_validate({"minLength": 1, "type": "string"})
    assert one != OpenAIFunctionPropertySchema.model_validate({"type": "string", "minLength": 2})
    assert one != {"type": "string", "minLength": 1}
    assert one != OpenAIFunctionParametersSchema.model_validate({"type": "string", "minLength": 1})


def test_parameters_default_to_none() -> None:
    schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": "now"}})
    assert schema.model_dump()["function"]["parameters"] == {"type": "object", "properties": {}, "required": []}


@pytest.mark.parametrize(
    "broken", [{"type": "function"}, {"type": "tool", "function": {"name": "a"}}, {"function": {"name": ""}}]
)
def test_invalid_tool_schema_is_rejected(broken: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        OpenAIFunctionToolSchema.model_validate(broken)


def test_tool_response_content() -> None:
    assert ToolResponse().is_empty()
    assert ToolResponse(text="").is_empty()
    assert ToolResponse(text="hello").is_text_only()
    assert not ToolResponse(text="hello", image=[object()]).is_text_only()
    assert not ToolResponse(video=[object()]).is_empty()
    with pytest.raises(ValidationError, match=r"wrap a single item in a list"):
        ToolResponse.model_validate({"image": "a.png"})


def test_message_preserves_invalid_arguments() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1,'}}
    message = Message.model_validate({"role": "assistant", "content": None, "tool_calls": [call], "weight": 0})
    assert message.tool_calls == [ToolCall.model_validate(call)]
    assert message.model_dump(exclude_none=True) == {"role": "assistant", "tool_calls": [call], "weight": 0}
    with pytest.raises(ValidationError):
        Message.model_validate({"role": "robot", "content": "beep"})
