"""A scripted model, a tool that counts its calls, and a check of the invariants of a trajectory."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from toolroll import BaseTool, InfraFault, PolicyFault, ToolResponse, ToolResult
from toolroll.rollout.chat.rendering import Rendering
from toolroll.rollout.engines.scripted import ScriptedEngine
from toolroll.rollout.rollout import Rollout
from toolroll.rollout.tokens import Author
from toolroll.rollout.trajectory import FinishReason, Trajectory

QUESTION = [{"role": "user", "content": "What is 6 times 7?"}]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Counting(BaseTool[list[str]]):
    """A tool that records how often it is created, rewarded and released."""

    default_schema = {  # noqa: RUF012
        "type": "function",
        "function": {
            "name": "count",
            "description": "Count.",
            "parameters": {"type": "object", "properties": {"to": {"type": "integer"}}, "required": ["to"]},
        },
    }

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        self.seen["created"] += 1
        return await super().create(instance_id, **kwargs)

    def new_state(self, **create_kwargs: Any) -> list[str]:
        return [repr(create_kwargs)]

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        self.state(instance_id)
        to = parameters["to"]
        if to < 0:
            raise PolicyFault("Count up, not down.")
        if to == 13:
            raise InfraFault("the abacus is broken")
        if to == 14:
            await asyncio.sleep(60)
        text = " ".join(str(number) for number in range(1, to + 1))
        return ToolResult(ToolResponse(text=text), 0.5, {"stop": to == 99, "kwargs": sorted(kwargs)})

    async def calc_reward(self, instance_id: str, bonus: float = 0.0, **kwargs: Any) -> float:
        self.seen["rewarded"] += 1
        return 2.0 + bonus

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.seen["released"] += 1
        await super().release(instance_id)


class Model:
    """A model whose turns are given."""

    def __init__(self, tokenizer: Any, rendering: Rendering) -> None:
        self.tokenizer, self.rendering = tokenizer, rendering

    def ids(self, text: str, *, stop: bool = True) -> list[int]:
        encoded: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return encoded + [self.rendering.stop_ids[0]] * stop

    def engine(self, turns: Sequence[str | list[int]], **more: Any) -> ScriptedEngine:
        return ScriptedEngine([turn if isinstance(turn, list) else self.ids(turn) for turn in turns], **more)

    async def run(
        self, turns: Sequence[str | list[int]], tools: Sequence[BaseTool[Any]] = (), **more: Any
    ) -> Trajectory:
        engine = more.pop("engine", None) or self.engine(turns)
        prompt = more.pop("prompt", {"prompt": QUESTION})
        rollout = Rollout(engine=engine, tools=tools, rendering=self.rendering, **more)
        (trajectory,) = [one async for one in rollout.run([prompt])]
        check(trajectory)
        return trajectory


def check(trajectory: Trajectory) -> None:
    """Assert the invariants of a trajectory."""
    for stream in (*trajectory.earlier, trajectory.tokens):
        assert len(stream.ids) == len(stream.mask) == len(stream.logprobs)
        for span in stream.spans:
            assert set(stream.mask[span.start : span.end]) == {int(span.author is Author.MODEL)}
    if not trajectory.earlier:
        assert sum(trajectory.tokens.mask) == sum(turn.tokens for turn in trajectory.turns)
    assert (trajectory.outcome == "infra") >= (trajectory.finish_reason is FinishReason.INFRA)
    assert (trajectory.rewards.total is None) == (trajectory.outcome == "infra")
