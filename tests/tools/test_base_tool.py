"""BaseTool: state per instance, verl's ways of calling, results that are what they should be."""

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


async def test_state_spans_turns_and_no_trajectory_sees_another() -> None:
    tool = Count({}, SCHEMA)

    async def one(start: int) -> list[str | None]:
        async with ToolInstance(tool, create_kwargs={"start": start}) as instance:
            return [(await instance.execute("")).response.text for _ in range(3)]

    told = await asyncio.gather(*(one(start) for start in range(0, 1000, 10)))
    assert told == [[str(start + 1), str(start + 2), str(start + 3)] for start in range(0, 1000, 10)]
    assert not tool.instances


async def test_verl_calls_it_its_own_way() -> None:
    tool = Count({}, SCHEMA)
    instance_id, created = await tool.create(create_kwargs={"start": 4})
    response, reward, metrics = await tool.execute(instance_id, {}, agent_data=object())
    assert (created.is_empty(), response.text, reward, metrics) == (True, "5", None, {})
    assert await tool.calc_reward(instance_id) == 0.0
    await tool.release(instance_id)
    await tool.release(instance_id)
    assert not tool.instances


async def test_verls_create_without_kwargs() -> None:
    tool = Count({}, SCHEMA)
    instance_id, _ = await tool.create(create_kwargs=None)
    assert tool.state(instance_id) == [0]


async def test_create_arguments_that_the_tool_does_not_take_are_named() -> None:
    with pytest.raises(InfraFault, match=r"'count' failed: TypeError: .*'begin'"):
        async with ToolInstance(Count({}, SCHEMA), create_kwargs={"begin": 1}):
            pass


async def test_an_instance_that_is_not_there_is_named() -> None:
    with pytest.raises(ToolContractError, match=r"'count' has no instance 'x'"):
        await Count({}, SCHEMA).execute("x", {})


def test_another_librarys_schema_object_is_taken() -> None:
    class Function(BaseModel):
        name: str
        description: str
        parameters: dict[str, Any]

    class Schema(BaseModel):
        type: str
        function: Function

    theirs = Schema(
        type="function", function=Function(name="count", description="Count.", parameters={"type": "object"})
    )
    assert Count({}, theirs).tool_schema.model_dump() == theirs.model_dump()


def test_a_class_written_for_verl_brings_its_schema_its_own_way() -> None:
    class Theirs(Count):
        def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
            return OpenAIFunctionToolSchema.model_validate(SCHEMA)

    assert Theirs({}).name == "count"


def test_tools_share_no_schema_and_no_config() -> None:
    class Own(Count):
        default_schema = OpenAIFunctionToolSchema.model_validate(SCHEMA)

    config = {"a": 1}
    one, two = Own(config), Own(config)
    one.tool_schema.function.description = "Changed."
    one.config["a"] = 2
    assert (two.tool_schema.function.description, two.config, config) == ("Count.", {"a": 1}, {"a": 1})


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (None, "Count has no schema"),
        ({"type": "function"}, "the key 'function' is missing"),
        ("count", "Count is not usable"),
    ],
)
def test_a_tool_without_a_usable_schema_is_refused(schema: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Count({}, schema)
    assert said in str(caught.value)


def test_settings_name_the_key_that_is_wrong() -> None:
    class Settings(ToolSettings):
        rate_limit: int = 10

    assert Settings.read({"type": "native", "rate_limit": 3}).rate_limit == 3
    with pytest.raises(ConfigError, match=r"no key 'rate_limt' \(did you mean 'rate_limit'\?\)"):
        Settings.read({"rate_limt": 3})
    with pytest.raises(ConfigError, match=r"rate_limit: Input should be a valid integer"):
        Settings.read({"rate_limit": "many"})


class TheirResponse:
    """A response object of another library, such as verl's."""

    text, image, video = "seen", None, None


@pytest.mark.parametrize(
    ("returned", "result"),
    [
        ((ToolResponse(text="a"), 1, {"k": 1}), ("a", 1.0, {"k": 1})),
        (("a", None, None), ("a", None, {})),
        ((None, 0.5, {}), (None, 0.5, {})),
        ((TheirResponse(), True, {}), ("seen", 1.0, {})),
    ],
)
def test_results_are_brought_into_form(returned: Any, result: tuple[Any, ...]) -> None:
    made = as_result("t", returned)
    assert (made.response.text, made.reward, made.metrics) == result


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
def test_results_that_would_spoil_a_batch_are_refused(returned: Any) -> None:
    with pytest.raises(ToolContractError, match=r"'t'"):
        as_result("t", returned)
