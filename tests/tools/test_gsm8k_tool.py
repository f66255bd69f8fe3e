"""Gsm8kTool: an answer checked over several turns."""

from typing import Any

import pytest

from toolroll import ConfigError, InfraFault, ToolInstance
from toolroll.tools.gsm8k_tool import Gsm8kTool


async def test_the_reward_is_incremental_over_the_turns_of_one_instance() -> None:
    async with ToolInstance(Gsm8kTool(), create_kwargs={"ground_truth": "72"}) as instance:
        assert await instance.calc_reward() == 0.0
        steps = [await instance.execute({"answer": answer}) for answer in ("5", "#### $72.0", "it is 72", "6", "72")]
        assert [step.reward for step in steps] == [-0.05, 0.0, -0.05, -0.05, 0.0]
        assert [step.response.text for step in steps][:2] == [
            "Current parsed answer='5' reward=0.0",
            "Current parsed answer='#### $72.0' reward=1.0",
        ]
        assert await instance.calc_reward() == 1.0


async def test_the_last_answer_counts() -> None:
    async with ToolInstance(Gsm8kTool(), create_kwargs={"ground_truth": "1,000"}) as instance:
        await instance.execute({"answer": "1000"})
        await instance.execute({"answer": ","})
        assert await instance.calc_reward() == 0.0


@pytest.mark.parametrize("truth", [None, "", "72 apples"])
async def test_a_ground_truth_that_is_no_number_is_nobodys_wrong_answer(truth: Any) -> None:
    with pytest.raises(InfraFault, match="is no number"):
        async with ToolInstance(Gsm8kTool(), create_kwargs={"ground_truth": truth}):
            pytest.fail("created without a usable ground truth")


async def test_verls_way_of_creating_works_too() -> None:
    tool = Gsm8kTool({"type": "native"})
    instance_id, _ = await tool.create(create_kwargs={"ground_truth": "72"})
    _, reward, _ = await tool.execute(instance_id, {"answer": 72})
    assert reward == 0.0


async def test_a_trajectory_without_a_ground_truth_is_nobodys_wrong_answer() -> None:
    with pytest.raises(InfraFault, match="ground_truth"):
        async with ToolInstance(Gsm8kTool()):
            pytest.fail("created without a ground truth")


def test_a_setting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="no key 'rate_limit'"):
        Gsm8kTool({"rate_limit": 3})
