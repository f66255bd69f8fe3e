"""An engine and a tool that do everything that a trajectory may contain, at random and never in the same way."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from toolroll import BaseTool, InfraFault, PolicyFault, ToolResponse, ToolResult
from toolroll.rollout.engines.base import FinishType, Generation
from toolroll.rollout.engines.scripted import ScriptedEngine

ACTIONS = ("answer", "answer", "answer", "answer", "long", "fault", "crash", "infra", "slow", "stop")
ENDLESS = "and so on " * 300
SLOW_S = 3.0


def call(tool: str) -> str:
    """Return a random call."""
    arguments = {"how": random.choice(ACTIONS), "é": random.random()}
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


class VariedTool(BaseTool[list[str]]):
    """Answers, fails, crashes, is slow, or ends the trajectory, as its argument demands."""

    default_schema = {  # noqa: RUF012
        "type": "function",
        "function": {"name": "act", "description": "Act.", "parameters": {"type": "object", "required": ["how"]}},
    }

    def new_state(self, **create_kwargs: Any) -> list[str]:
        return []

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        how = parameters["how"]
        self.state(instance_id).append(how)
        match how:
            case "fault":
                raise PolicyFault("Not like this.")
            case "crash":
                raise ValueError("The tool crashed: \x1b[31m\u2028")
            case "infra":
                raise InfraFault("The service is down.")
            case "slow":
                await asyncio.sleep(SLOW_S)
        text = ENDLESS if how == "long" else f"Done: {random.random()}"
        return ToolResult(ToolResponse(text=text), random.random(), {"stop": how == "stop", "pages": 3})

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return len(self.state(instance_id)) + random.random()


class VariedEngine(ScriptedEngine):
    """Calls the tool at random. Some responses are endless, interrupted, late, or change weights in the middle."""

    def __init__(self, urls: Any, *, tokenizer: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
        super().__init__(self._sample)

    def _sample(self, request_id: str, prompt_ids: Sequence[int], turn: int) -> list[int]:
        calls = [call(random.choice(["act"] * 9 + ["ask"])) for _ in range(random.randint(0, 3))]
        broken = ["<tool_call>\n{broken\n</tool_call>"] if random.random() < 0.1 else []
        text = ENDLESS if random.random() < 0.02 else f"Thinking {random.random()} 数字 "
        text = f"<think>{random.random()}</think>{text}" if random.random() < 0.1 else text
        ids: list[int] = self._tokenizer.encode(text + "".join(calls + broken), add_special_tokens=False)
        return [*ids, self._tokenizer.convert_tokens_to_ids("<|im_end|>")]

    async def context_length(self) -> int:
        """Return a length that some trajectories reach by a tool response."""
        return 1500

    async def generate(self, *args: Any, **kwargs: Any) -> Generation:
        """Return random log-probabilities, versions and interruptions."""
        late = random.random() < 0.02
        self.delay = random.uniform(0.5, SLOW_S) if late else 0.0
        generation = await super().generate(*args, **kwargs)
        ids, trajectory = generation.ids, kwargs["affinity"]
        if generation.finish is FinishType.STOP and len(ids) > 4 and random.random() < 0.02:
            self._remainders[trajectory] = ids[3:]
            generation = replace(generation, ids=ids[:3], finish=FinishType.ABORT)
        changes = ((2, "step-2"),) if len(generation.ids) > 3 and random.random() < 0.2 else ()
        logprobs = [-random.random() for _ in generation.ids]
        return replace(generation, logprobs=logprobs, weight_version="step-1", weight_changes=changes)


class SteadyEngine(VariedEngine):
    """Calls the tool once and then answers, always with the same tokens."""

    def _sample(self, request_id: str, prompt_ids: Sequence[int], turn: int) -> list[int]:
        text = "Done." if turn else '<tool_call>\n{"name": "act", "arguments": {"how": "answer"}}\n</tool_call>'
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return [*ids, self._tokenizer.convert_tokens_to_ids("<|im_end|>")]

    generate = ScriptedEngine.generate


class NoEngine:
    """Raises as soon as it is created."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("The replay created the engine.")
