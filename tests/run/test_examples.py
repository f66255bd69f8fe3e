"""The examples: valid data, loadable configs, and reward functions that score correct answers."""

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
from toolroll.run.data import PromptRows
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
    return [row for _, row in PromptRows(RunConfig.load(root / f"examples/{name}/run.yaml").data).rows()]  # type: ignore[misc]


def answered(text: Any, **extra: Any) -> Trajectory:
    messages = [Message(role="user", content="?"), Message(role="assistant", content=text)]
    return trajectory(messages=messages, extra=extra)


@pytest.mark.parametrize("name", ["gsm8k", "code_contest"])
def test_rows_match_the_tools_of_the_config(name: str, root: Path) -> None:
    config = RunConfig.load(root / f"examples/{name}/run.yaml")
    assert config.tools is not None
    tools = {tool.name for tool in initialize_tools_from_config(config.tools)}
    for row in rows(root, name):
        prompt = Prompt.model_validate(row)
        assert [message.role for message in prompt.messages] == ["system", "user"]
        assert prompt.extra["ground_truth"]
        assert prompt.tools_kwargs.keys() <= tools


def test_gsm8k_answers_are_correct(root: Path) -> None:
    problems = [json.loads(line) for line in (root / "examples/gsm8k/problems.jsonl").read_text().splitlines()]
    assert len(problems) == 16
    for problem in problems:
        steps = re.findall(r"<<([-+*/(). 0-9]+)=([0-9.]+)>>", problem["answer"])
        assert problem["answer"].count("<<") == len(steps)
        for sum_, result in steps:
            assert eval(sum_) == pytest.approx(float(result))
        if steps and "." not in steps[-1][1]:
            assert parse_ground_truth(problem["answer"]) == steps[-1][1]
        assert reward_functions.gsm8k_strict(answered(problem["answer"], ground_truth=problem["answer"])) == 1.0


@pytest.mark.sandbox
async def test_reference_solutions_pass_the_test_cases(
    root: Path, sandbox_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANDBOX_FUSION_URL", sandbox_url)
    problems = rows(root, "code_contest")
    assert len(problems) == len(SOLUTIONS)
    for problem, solution in zip(problems, SOLUTIONS, strict=True):
        right = answered(f"Here it is:\n```python\n{solution}\n```\n", ground_truth=problem["ground_truth"])
        assert await reward_functions.code_tests(right) == 1.0, problem["messages"][1]["content"]
        wrong = answered(f"```python\n{SOLUTIONS[0]}\n```", ground_truth=problem["ground_truth"])
        assert await reward_functions.code_tests(wrong) == float(solution == SOLUTIONS[0])
    half = answered("```python\nprint(1)\n```", ground_truth=problems[0]["ground_truth"])
    assert await reward_functions.code_tests_passed(half) == pytest.approx(2 / 5)


def test_only_the_last_assistant_message_is_scored() -> None:
    assert reward_functions.gsm8k_flexible(answered("First 7, then 42.", ground_truth="#### 42")) == 1.0
    assert reward_functions.gsm8k_strict(answered("First 7, then 42.", ground_truth="#### 42")) == 0.0
    assert reward_functions.gsm8k_flexible(answered([{"type": "text", "text": "42"}], ground_truth=42)) == 1.0
    assert reward_functions.gsm8k_flexible(answered(None, ground_truth=42)) == 0.0
    tool = trajectory(messages=[Message(role="tool", content="42")], extra={"ground_truth": "42"})
    assert reward_functions.gsm8k_flexible(tool) == 0.0, "messages of tools are not scored"


async def test_missing_ground_truth_is_an_infra_fault() -> None:
    rule = RewardRule(functions={"right": reward_functions.gsm8k_strict})
    with pytest.raises(InfraFault, match=r"Set data\.ground_truth to the column"):
        await rule.score(answered("#### 42"), timeout_s=5)
