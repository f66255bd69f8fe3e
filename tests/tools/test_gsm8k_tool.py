"""Tests of Gsm8kTool."""

from typing import Any

import pytest

from toolroll import ConfigError, InfraFault, ToolInstance
from toolroll.tools.gsm8k_tool import Gsm8kTool


async def test_reward_depends_on_previous_answer() -> None:
    async with ToolInstance(Gsm8kTool(), create_kwargs={"ground_truth": "72"}) as instance:
        assert await instance.calc_reward() == 0.0
        steps = [await instance.execute({"answer": answer}) for answer in ("5", "#### $72.0", "it is 72", "6", "72")]
        assert [step.reward for step in steps] == [-0.05, 0.0, -0.05, -0.05, 0.0]
        assert [step.response.text for step in steps][:2] == [
            "Current parsed answer='5' reward=0.0",
            "Current parsed answer='#### $72.0' reward=1.0",
        ]
        assert await instance.calc_reward() == 1.0


async def test_final_reward_is_that_of_last_answer() -> None:
    async with ToolInstance(Gsm8kTool(), create_kwargs={"ground_truth": "1,000"}) as instance:
        await instance.execute({"answer": "1000"})
        await instance.execute({"answer": ","})
        assert await instance.calc_reward() == 0.0


@pytest.mark.parametrize("truth", [None, "", "72 apples"])
async def test_invalid_ground_truth_is_infra_fault(truth: Any) -> None:
    with pytest.raises(InfraFault, match=r"ground_truth .* number"):
        async with ToolInstance(Gsm8kTool(), create_kwargs={"ground_truth": truth}):
            pytest.fail("created without a usable ground truth")


async def test_verl_create_convention() -> None:
    tool = Gsm8kTool({"type": "native"})
    instance_id, _ = await tool.create(create_kwargs={"ground_truth": "72"})
    _, reward, _ = await tool.execute(instance_id, {"answer": 72})
    assert reward == 0.0


async def test_missing_ground_truth_is_infra_fault() -> None:
    with pytest.raises(InfraFault, match="ground_truth"):
        async with ToolInstance(Gsm8kTool()):
            pytest.fail("created without a ground truth")


def test_unknown_setting_is_rejected() -> None:
    with pytest.raises(ConfigError, match="unknown key 'rate_limit'"):
        Gsm8kTool({"rate_limit": 3})
