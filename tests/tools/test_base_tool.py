"""Tests of BaseTool: state per instance, verl's calling conventions, validation of results."""

import asyncio
import math
from typing import Any

import pytest
from pydantic import BaseModel

from toolroll import (
    BaseTool,
    ConfigError,
    OpenAIFunctionToolSchema,
    ToolInstance,
    ToolResponse,
    ToolResult,
    ToolSettings,
)
from toolroll.errors import InfraFault, ToolContractError
from toolroll.tools.base_tool import as_result

pytestmark = pytest.mark.virtual_time

SCHEMA = {"type": "function", "function": {"name": "count", "description": "Count."}}


class Count(BaseTool[list[int]]):
    def new_state(self, start: int = 0) -> list[int]:
        return [start]

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        state = self.state(instance_id)
        before = state[0]
        await asyncio.sleep(0)
        state[0] = before + 1
        return ToolResult(ToolResponse(text=str(state[0])), None, {})


async def test_state_lasts_for_trajectory_and_is_not_shared() -> None:
    tool = Count({}, SCHEMA)

    async def trajectory(start: int) -> list[str | None]:
        async with ToolInstance(tool, create_kwargs={"start": start}) as instance:
            return [(await instance.execute("")).response.text for _ in range(3)]

    outputs = await asyncio.gather(*(trajectory(start) for start in range(0, 1000, 10)))
    assert outputs == [[str(start + 1), str(start + 2), str(start + 3)] for start in range(0, 1000, 10)]
    assert not tool.instances


async def test_verl_calling_convention() -> None:
    tool = Count({}, SCHEMA)
    instance_id, created = await tool.create(create_kwargs={"start": 4})
    response, reward, metrics = await tool.execute(instance_id, {}, agent_data=object())
    assert (created.is_empty(), response.text, reward, metrics) == (True, "5", None, {})
    assert await tool.calc_reward(instance_id) == 0.0
    await tool.release(instance_id)
    await tool.release(instance_id)
    assert not tool.instances


async def test_verl_create_without_kwargs() -> None:
    tool = Count({}, SCHEMA)
    instance_id, _ = await tool.create(create_kwargs=None)
    assert tool.state(instance_id) == [0]


async def test_unknown_create_kwarg_is_named() -> None:
    with pytest.raises(InfraFault, match=r"'count' failed: TypeError: .*'begin'"):
        async with ToolInstance(Count({}, SCHEMA), create_kwargs={"begin": 1}):
            pass


async def test_missing_instance_is_named() -> None:
    with pytest.raises(ToolContractError, match=r"'count' has no instance 'x'"):
        await Count({}, SCHEMA).execute("x", {})


def test_foreign_schema_object_is_accepted() -> None:
    class Function(BaseModel):
        name: str
        description: str
        parameters: dict[str, Any]

    class Schema(BaseModel):
        type: str
        function: Function

    schema = Schema(
        type="function", function=Function(name="count", description="Count.", parameters={"type": "object"})
    )
    assert Count({}, schema).tool_schema.model_dump() == schema.model_dump()


def test_schema_from_get_openai_tool_schema() -> None:
    class VerlStyle(Count):
        def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
            return OpenAIFunctionToolSchema.model_validate(SCHEMA)

    assert VerlStyle({}).name == "count"


def test_tools_do_not_share_schema_or_config() -> None:
    class WithSchema(Count):
        default_schema = OpenAIFunctionToolSchema.model_validate(SCHEMA)

    config = {"a": 1}
    one, two = WithSchema(config), WithSchema(config)
    one.tool_schema.function.description = "Changed."
    one.config["a"] = 2
    assert (two.tool_schema.function.description, two.config, config) == ("Count.", {"a": 1}, {"a": 1})


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (None, "Count has no schema"),
        ({"type": "function"}, "missing key 'function'"),
        ("count", "Count is invalid"),
    ],
)
def test_missing_or_invalid_schema_is_rejected(schema: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Count({}, schema)
    assert message in str(caught.value)


def test_invalid_settings_are_named() -> None:
    class Settings(ToolSettings):
        rate_limit: int = 10

    assert Settings.read({"type": "native", "rate_limit": 3}).rate_limit == 3
    with pytest.raises(ConfigError, match=r"unknown key 'rate_limt' \(did you mean 'rate_limit'\?\)"):
        Settings.read({"rate_limt": 3})
    with pytest.raises(ConfigError, match=r"rate_limit: Input should be a valid integer"):
        Settings.read({"rate_limit": "many"})


class ForeignResponse:
    """Response object of another library, such as verl."""

    text, image, video = "seen", None, None


@pytest.mark.parametrize(
    ("returned", "result"),
    [
        ((ToolResponse(text="a"), 1, {"k": 1}), ("a", 1.0, {"k": 1})),
        (("a", None, None), ("a", None, {})),
        ((None, 0.5, {}), (None, 0.5, {})),
        ((ForeignResponse(), True, {}), ("seen", 1.0, {})),
    ],
)
def test_results_are_converted(returned: Any, result: tuple[Any, ...]) -> None:
    converted = as_result("t", returned)
    assert (converted.response.text, converted.reward, converted.metrics) == result


@pytest.mark.parametrize(
    "returned",
    [
        "text",
        ("a", 1),
        (5, 1.0, {}),
        ({"sum": 1}, 1.0, {}),
        ("a", math.nan, {}),
        ("a", math.inf, {}),
        ("a", [1.0], {}),
        ("a", 10**400, {}),
        ("a", 1.0, []),
    ],
)
def test_invalid_results_are_rejected(returned: Any) -> None:
    with pytest.raises(ToolContractError, match=r"'t'"):
        as_result("t", returned)
