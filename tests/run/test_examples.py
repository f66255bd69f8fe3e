"""The examples: their data are right, their configs load, and their reward functions pay for what is right."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from record_samples import trajectory

from toolroll.errors import InfraFault
from toolroll.rewards.gsm8k import parse_ground_truth
from toolroll.rollout.reward import RewardRule
from toolroll.rollout.rollout import Prompt
from toolroll.rollout.trajectory import Trajectory
from toolroll.run import reward_functions
from toolroll.run.config import RunConfig
from toolroll.run.data import Rows
from toolroll.schemas import Message
from toolroll.tools.registry import initialize_tools_from_config

SOLUTIONS = [
    "import math\na, b = map(int, input().split())\nprint(math.gcd(a, b))",
    """from collections import Counter
counts = Counter(input() for _ in range(int(input())))
print("\\n".join(sorted(word for word in counts if counts[word] > 1)) or "NONE")""",
    """best, stack, opens = 0, [], {")": "(", "]": "[", "}": "{"}
for place, one in enumerate(input(), 1):
    if one in opens.values():
        stack.append(one)
    elif not stack or stack.pop() != opens[one]:
        break
    if not stack:
        best = place
print(best)""",
    """x = y = 0
dx, dy, best = 0, 1, (0, 0)
for one in input().strip():
    if one == "F":
        x, y = x + dx, y + dy
        best = max(best, (x, y), key=lambda at: abs(at[0]) + abs(at[1]))
    else:
        dx, dy = (-dy, dx) if one == "L" else (dy, -dx)
print(*best)""",
    """n, k = map(int, input().split())
numbers = list(map(int, input().split()))
print(max(sum(numbers[at : at + k]) for at in range(n - k + 1)))""",
    """def roman(number):
    values = [1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1]
    text = ""
    for value, letters in zip(values, "M CM D CD C XC L XL X IX V IV I".split()):
        text += letters * (number // value)
        number %= value
    return text""",
    "from itertools import groupby\ndef runs(text):\n    return [len(list(group)) for _, group in groupby(text)]",
    """def free_hours(busy, start, end):
    return len(set(range(start, end)) - {hour for first, last in busy for hour in range(first, last)})""",
]


def rows(root: Path, name: str) -> list[dict[str, Any]]:
    return [row for _, row in Rows(RunConfig.load(root / f"examples/{name}/run.yaml").data).rows()]  # type: ignore[misc]


def said(text: Any, **extra: Any) -> Trajectory:
    messages = [Message(role="user", content="?"), Message(role="assistant", content=text)]
    return trajectory(messages=messages, extra=extra)


@pytest.mark.parametrize("name", ["gsm8k", "code_contest"])
def test_the_config_is_what_the_tools_want(name: str, root: Path) -> None:
    config = RunConfig.load(root / f"examples/{name}/run.yaml")
    assert config.tools is not None
    tools = {tool.name for tool in initialize_tools_from_config(config.tools)}
    for row in rows(root, name):
        prompt = Prompt.model_validate(row)
        assert [message.role for message in prompt.messages] == ["system", "user"]
        assert prompt.extra["ground_truth"]
        assert prompt.tools_kwargs.keys() <= tools


def test_the_word_problems_are_right(root: Path) -> None:
    problems = [json.loads(line) for line in (root / "examples/gsm8k/problems.jsonl").read_text().splitlines()]
    assert len(problems) == 16
    for problem in problems:
        steps = re.findall(r"<<([-+*/(). 0-9]+)=([0-9.]+)>>", problem["answer"])
        assert problem["answer"].count("<<") == len(steps)
        for sum_, result in steps:
            assert eval(sum_) == pytest.approx(float(result))
        if steps and "." not in steps[-1][1]:
            assert parse_ground_truth(problem["answer"]) == steps[-1][1]
        assert reward_functions.gsm8k_strict(said(problem["answer"], ground_truth=problem["answer"])) == 1.0


async def test_the_contest_can_be_won(root: Path, sandbox_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_FUSION_URL", sandbox_url)
    problems = rows(root, "code_contest")
    assert len(problems) == len(SOLUTIONS)
    for problem, solution in zip(problems, SOLUTIONS, strict=True):
        right = said(f"Here it is:\n```python\n{solution}\n```\n", ground_truth=problem["ground_truth"])
        assert await reward_functions.code_tests(right) == 1.0, problem["messages"][1]["content"]
        wrong = said(f"```python\n{SOLUTIONS[0]}\n```", ground_truth=problem["ground_truth"])
        assert await reward_functions.code_tests(wrong) == float(solution == SOLUTIONS[0])
    half = said("```python\nprint(1)\n```", ground_truth=problems[0]["ground_truth"])
    assert await reward_functions.code_tests_passed(half) == pytest.approx(2 / 5)


def test_what_the_model_said_last_counts() -> None:
    assert reward_functions.gsm8k_flexible(said("First 7, then 42.", ground_truth="#### 42")) == 1.0
    assert reward_functions.gsm8k_strict(said("First 7, then 42.", ground_truth="#### 42")) == 0.0
    assert reward_functions.gsm8k_flexible(said([{"type": "text", "text": "42"}], ground_truth=42)) == 1.0
    assert reward_functions.gsm8k_flexible(said(None, ground_truth=42)) == 0.0
    tool = trajectory(messages=[Message(role="tool", content="42")], extra={"ground_truth": "42"})
    assert reward_functions.gsm8k_flexible(tool) == 0.0, "what a tool said isn't the model's"


async def test_a_row_without_its_answer_is_no_fault_of_the_models() -> None:
    rule = RewardRule(functions={"right": reward_functions.gsm8k_strict})
    with pytest.raises(InfraFault, match=r"name its column in data\.ground_truth"):
        await rule.score(said("#### 42"), seconds=5)
