"""Tests of `@tool`: schemas, arguments, hidden parameters, return values, threads."""

import asyncio
import contextvars
import enum
import functools
import json
import threading
import time
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, Literal, Optional

import cloudpickle
import pytest
from pydantic import AfterValidator, BaseModel, Field

from toolroll import ConfigError, Hidden, ToolInstance, ToolResponse, tool
from toolroll.errors import InvalidArguments, ToolContractError


class Stop(BaseModel):
    """A place on the way."""

    title: str
    km: float = 0.0
    via: "list[Stop]" = []


class Mode(enum.Enum):
    TRAIN = "train"
    BUS = "bus"


def even(value: int) -> int:
    if value % 2:
        raise ValueError("must be even")
    return value


@tool
def plan(
    stop: Stop,
    mode: Mode,
    unit: Literal["km", "mile"] = "km",
    tags: Optional[list[str]] = None,  # noqa: UP045 (users write it like that)
    copy: Annotated[int, Field(ge=0), AfterValidator(even)] = 2,
    home: Hidden[str] = "nowhere",
) -> dict[str, Any]:
    """Plan a way.

    It may take a while.

    Args:
        stop (Stop): Where to go,
            described on several lines.
        mode: How.
        tags: What to look out for.
    """
    return {
        "stop": stop.title,
        "km": stop.km,
        "mode": mode.value,
        "unit": unit,
        "tags": tags,
        "copy": copy,
        "home": home,
    }


async def call(function_tool: Any, arguments: dict[str, Any], **create_kwargs: Any) -> Any:
    async with ToolInstance(function_tool, create_kwargs=create_kwargs) as instance:
        return await instance.execute(arguments)


def test_schema_from_signature_and_docstring() -> None:
    function = plan.tool_schema.model_dump()["function"]
    assert (function["name"], function["description"]) == ("plan", "Plan a way.\n\nIt may take a while.")
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "stop": {"$ref": "#/$defs/Stop", "description": "Where to go, described on several lines."},
            "mode": {"$ref": "#/$defs/Mode", "description": "How."},
            "unit": {"enum": ["km", "mile"], "type": "string", "default": "km"},
            "tags": {
                "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
                "default": None,
                "description": "What to look out for.",
            },
            "copy": {"type": "integer", "minimum": 0, "default": 2},
        },
        "required": ["stop", "mode"],
        "additionalProperties": False,
        "$defs": {
            "Stop": {
                "type": "object",
                "description": "A place on the way.",
                "properties": {
                    "title": {"type": "string"},
                    "km": {"type": "number", "default": 0.0},
                    "via": {"type": "array", "items": {"$ref": "#/$defs/Stop"}, "default": []},
                },
                "required": ["title"],
            },
            "Mode": {"enum": ["train", "bus"], "type": "string"},
        },
    }


async def test_arguments_have_annotated_types() -> None:
    result = await call(plan, {"stop": {"title": "Rome", "km": 3}, "mode": "bus"}, home="Bern")
    assert json.loads(result.response.text) == {
        "stop": "Rome", "km": 3.0, "mode": "bus", "unit": "km", "tags": None, "copy": 2, "home": "Bern",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stop": {"title": "Rome"}}, "'mode' is missing"),
        ({"stop": {"km": 1}, "mode": "bus"}, "'stop.title' is missing"),
        ({"stop": {"title": "R"}, "mode": "bus", "copy": 3}, "copy: must be even."),
        ({"stop": {"title": "R"}, "mode": "bus", "home": "Oslo"}, "unknown parameter 'home'"),
    ],
)
async def test_invalid_arguments_are_described(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArguments) as caught:
        await call(plan, arguments)
    assert message in str(caught.value)


async def test_hidden_parameters_come_from_trajectory() -> None:
    @tool(name="check_answer")
    def check(answer: str, truth: Hidden[str], state: Hidden[dict[str, int]], instance_id: Hidden[str]) -> Any:
        """Check."""
        state["tries"] = state.get("tries", 0) + 1
        return f"{instance_id} try {state['tries']}", float(answer == truth), {"tries": state["tries"]}

    assert list(check.tool_schema.model_dump()["function"]["parameters"]["properties"]) == ["answer"]
    async with (
        ToolInstance(check, "one", create_kwargs={"truth": "72"}) as one,
        ToolInstance(check, "two", create_kwargs={"truth": "5"}) as two,
    ):
        assert await one.execute({"answer": "71"}) == (ToolResponse(text="one try 1"), 0.0, {"tries": 1})
        assert await one.execute({"answer": "72"}) == (ToolResponse(text="one try 2"), 1.0, {"tries": 2})
        assert await two.execute({"answer": "72"}) == (ToolResponse(text="two try 1"), 0.0, {"tries": 1})
        assert (await two.execute({"answer": "72"}, truth="72")).reward == 1.0
    with pytest.raises(ToolContractError, match="'check_answer' requires 'truth'"):
        await call(check, {"answer": "72"})


@dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ("plain", "plain"),
        ({"ä": [1, None]}, '{"ä": [1, null]}'),
        (3, "3"),
        (None, "null"),
        ([Point(1)], '[{"x": 1}]'),
        ({"when": date(2026, 1, 2)}, '{"when": "2026-01-02"}'),
        (Stop(title="R"), None),
    ],
)
async def test_valid_return_values(returned: Any, text: str | None) -> None:
    @tool
    async def give() -> Any:
        """Give."""
        return returned

    result = await call(give, {})
    assert result.response.text == (text or '{"title": "R", "km": 0.0, "via": []}')
    assert (result.reward, result.metrics) == (None, {})


@pytest.mark.parametrize("returned", [object(), ("a", 1.0), ("a", "b", {}), (object(), 1.0, {})])
async def test_invalid_return_values(returned: Any) -> None:
    @tool
    def give() -> Any:
        """Give."""
        return returned

    with pytest.raises(ToolContractError, match="'give'"):
        await call(give, {})


async def test_sync_function_runs_in_thread() -> None:
    @tool
    async def here() -> str:
        """Where."""
        return threading.current_thread().name

    @tool
    def there() -> str:
        """Where."""
        return threading.current_thread().name

    assert (await call(here, {})).response.text == threading.current_thread().name
    assert (await call(there, {})).response.text.startswith("tool-there")


FIFTY_CALLS_AND_THE_TEST = threading.Barrier(51)


@tool
def meet() -> str:
    """Wait until fifty calls and the test are here."""
    FIFTY_CALLS_AND_THE_TEST.wait(60)
    return "met"


async def test_sync_tool_blocks_neither_event_loop_nor_other_calls() -> None:
    calls = [asyncio.create_task(call(meet, {})) for _ in range(50)]
    await asyncio.to_thread(FIFTY_CALLS_AND_THE_TEST.wait, 60)
    assert [one.response.text for one in await asyncio.gather(*calls)] == ["met"] * 50


async def test_threads_limits_concurrent_calls() -> None:
    running, max_running, lock = 0, 0, threading.Lock()

    @tool(threads=3)
    def work() -> str:
        """Work."""
        nonlocal running, max_running
        with lock:
            running += 1
            max_running = max(max_running, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return ""

    await asyncio.gather(*(call(work, {}) for _ in range(12)))
    assert max_running == 3


def test_tool_can_be_called_as_function() -> None:
    @tool
    def add(a: int, b: int = 1) -> int:
        """Add."""
        return a + b

    assert add(2) == 3


async def test_response_of_tuple_is_serialized() -> None:
    @tool
    def score(a: int) -> Any:
        """Score."""
        return {"sum": a}, 1, {}

    assert await call(score, {"a": 2}) == (ToolResponse(text='{"sum": 2}'), 1.0, {})


async def test_optional_hidden_parameter_is_hidden() -> None:
    @tool
    def check(answer: str, truth: Hidden[str] | None = None) -> str:
        """Check."""
        return f"{answer} {truth}"

    assert list(check.tool_schema.model_dump()["function"]["parameters"]["properties"]) == ["answer"]
    assert (await call(check, {"answer": "1"}, truth="72")).response.text == "1 72"


async def test_hidden_values_are_converted_or_rejected() -> None:
    @tool
    def above(number: int, least: Hidden[int], state: Hidden[dict[str, Any]]) -> bool:
        """Compare."""
        return number > least and state == {}

    assert (await call(above, {"number": 5}, least="4", state="a column of the data set")).response.text == "true"
    with pytest.raises(ToolContractError, match="invalid create_kwarg"):
        await call(above, {"number": 5}, least="four")


async def test_pydantic_fields_are_supported() -> None:
    @tool
    def roll(
        sides: int = Field(6, ge=2, description="How many."), times: Annotated[int, Field(description="N.")] = 1
    ) -> str:
        """Roll."""
        return f"{sides} {times}"

    properties = roll.tool_schema.model_dump()["function"]["parameters"]["properties"]
    assert properties["sides"] == {"type": "integer", "default": 6, "minimum": 2, "description": "How many."}
    assert properties["times"] == {"type": "integer", "default": 1, "description": "N."}
    assert (await call(roll, {})).response.text == "6 1"


async def test_stop_iteration_does_not_hang() -> None:
    @tool
    def first_even(numbers: list[int]) -> int:
        """Find one."""
        return next(number for number in numbers if number % 2 == 0)

    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(call(first_even, {"numbers": [1]}), 5)


async def test_context_variables_reach_thread() -> None:
    user: contextvars.ContextVar[str] = contextvars.ContextVar("user")

    @tool
    def name() -> str:
        """Return the name."""
        return user.get()

    user.set("me")
    assert (await call(name, {})).response.text == "me"


async def test_used_tool_can_be_pickled() -> None:
    await call(plan, {"stop": {"title": "Rome"}, "mode": "bus"})
    copy = cloudpickle.loads(cloudpickle.dumps(plan))
    assert (await call(copy, {"stop": {"title": "Rome"}, "mode": "bus"})).reward is None
    assert copy.tool_schema == plan.tool_schema


def no_docstring(a: int) -> None: ...


def no_types(a) -> None:  # type: ignore[no-untyped-def]
    """Do."""


def any_number(*args: int) -> None:
    """Do."""


def described_wrongly(a: int) -> None:
    """Do.

    Args:
        b: Not there.
    """


def odd_type(a: threading.Lock) -> None:
    """Do."""


def unresolved(a: "Nowhere") -> None:  # type: ignore[name-defined]  # noqa: F821
    """Do."""


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        (no_docstring, "Add a docstring"),
        (no_types, "Annotate it"),
        (any_number, "Use parameters that have a name"),
        (described_wrongly, r"describes unknown parameters: \['b'\]"),
        (functools.partial(no_docstring, 1), "@tool expects a function"),
        (odd_type, "type has no JSON Schema"),
        (unresolved, "Define the type at the top of its module"),
    ],
)
def test_unsuitable_function_is_rejected(function: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        tool(function)
    assert getattr(function, "__name__", "no_docstring") in str(caught.value)


def test_calling_tool_with_config_creates_tool() -> None:
    """verl creates tools this way."""

    @tool
    def double(number: int) -> int:
        """Double a number."""
        return 2 * number

    @tool
    def show(config: str, tool_schema: str) -> str:
        """Take parameters of the same names."""
        return config + tool_schema

    created = double(config={"type": "native"}, tool_schema=None)
    assert created is not double
    assert (created.name, created.tool_schema) == ("double", double.tool_schema)
    with pytest.raises(ConfigError, match="a function has no settings"):
        double(config={"type": "native", "top_k": 3}, tool_schema=None)
    assert double(number=3) == 6
    assert show(config="a", tool_schema="b") == "ab"
