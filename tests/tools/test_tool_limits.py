"""Limits of tools: YAML, `@tool(limits=…)` and the attribute, applied by ToolInstance."""

import asyncio
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import pytest

from toolroll import (
    BaseTool,
    BudgetExhausted,
    ConfigError,
    InfraFault,
    ResourceLimits,
    ToolInstance,
    ToolResponse,
    ToolResult,
    charge,
    initialize_tools_from_config,
    tool,
)


@pytest.fixture
def resource() -> str:
    return f"resource-{uuid4().hex}"


@pytest.mark.virtual_time
async def test_calls_wait_for_a_slot_and_record_the_wait(resource: str) -> None:
    @tool(limits={"resource": resource, "limit": 1})
    async def slow() -> str:
        """Wait."""
        await asyncio.sleep(0.05)
        return "done"

    async with ToolInstance(slow) as instance:
        results = await asyncio.gather(instance.execute({}), instance.execute({}))
    waits = sorted(result.metrics["queue_wait"] for result in results)
    assert waits[0] < 0.04 <= waits[1]


async def test_exhausted_budget_is_an_infra_fault_with_the_wait(resource: str) -> None:
    @tool(limits=ResourceLimits(resource=resource, budget={"calls": 2}))
    def look_up() -> str:
        """Look something up."""
        return "found"

    async with ToolInstance(look_up) as instance:
        for _ in range(2):
            await instance.execute({})
        with pytest.raises(BudgetExhausted) as caught:
            await instance.execute({})
    assert caught.value.metrics["queue_wait"] >= 0


async def test_sync_tool_charges_its_cost(resource: str) -> None:
    @tool(limits={"resource": resource, "budget": {"usd": 1}, "cost": {"usd": 0.9}})
    def look_up() -> str:
        """Look something up."""
        charge(usd=0)
        return "found"

    async with ToolInstance(look_up) as instance:
        for _ in range(3):
            await instance.execute({})


class Waiting(BaseTool[None]):
    """Tool with a wait in its own metrics."""

    default_schema: ClassVar = {"type": "function", "function": {"name": "waiting", "description": "Wait."}}

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        if kwargs.get("fails"):
            error = InfraFault("down")
            error.metrics = {"queue_wait": 7.0, "attempts": 2}
            raise error
        return ToolResult(ToolResponse(text="ok"), None, {"queue_wait": 5.0})


async def test_waits_are_added(resource: str) -> None:
    waiting = Waiting()
    waiting.limits = ResourceLimits(resource=resource, limit=4)
    async with ToolInstance(waiting) as instance:
        result = await instance.execute({})
        assert 5.0 <= result.metrics["queue_wait"] < 6.0
        with pytest.raises(InfraFault) as caught:
            await instance.execute({}, fails=True)
    assert 7.0 <= caught.value.metrics["queue_wait"] < 8.0
    assert caught.value.metrics["attempts"] == 2


async def test_other_attribute_of_that_name_is_ignored() -> None:
    waiting = Waiting()
    waiting.limits = {"rows": 5}  # type: ignore[assignment]
    async with ToolInstance(waiting) as instance:
        assert (await instance.execute({})).response.text == "ok"


def test_limits_of_a_config_file(tmp_path: Path) -> None:
    file = tmp_path / "tools.yaml"
    entry = "tools:\n  - class_name: toolroll.tools.gsm8k_tool.Gsm8kTool\n"
    file.write_text(entry)
    assert initialize_tools_from_config(file)[0].limits is None
    file.write_text(f"{entry}    limits: {{limit: {{min: 2, max: 8}}, rpm: 60}}\n")
    limits = initialize_tools_from_config(file)[0].limits
    assert limits is not None
    assert limits.policy().rates == {"requests": 1.0}
    file.write_text(f"{entry}    limits: {{rmp: 60}}\n")
    with pytest.raises(ConfigError, match=r"tool 1 .*limits\.rmp"):
        initialize_tools_from_config(file)


def test_copy_for_a_config_keeps_the_limits() -> None:
    @tool(limits={"rpm": 60})
    def look_up() -> str:
        """Look something up."""
        return ""

    assert look_up.with_config({}).limits == look_up.limits == ResourceLimits(rpm=60)
    with pytest.raises(ConfigError, match="@tool: limits"):
        tool(limits={"rpm": 0})(lambda: "")
