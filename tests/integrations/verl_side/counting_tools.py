"""The tools of the example, which count created, rewarded and released instances."""

from collections import Counter
from typing import Any

from toolroll import SandboxFusionTool, ToolResponse, tool
from toolroll.tools.gsm8k_tool import Gsm8kTool

seen: Counter[str] = Counter()
rewarded: Counter[tuple[str, str]] = Counter()
"""How often an instance was rewarded, by tool and id: the instances of a trajectory share an id."""
alive: set[tuple[str, str]] = set()


class _Counted:
    name: str

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        created = await super().create(instance_id, **kwargs)  # type: ignore[misc]
        seen["created"] += 1
        alive.add((self.name, created[0]))
        return created

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        rewarded[self.name, instance_id] += 1
        return await super().calc_reward(instance_id, **kwargs)  # type: ignore[misc]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await super().release(instance_id, **kwargs)  # type: ignore[misc]
        seen["released"] += 1
        alive.discard((self.name, instance_id))


class CountedInterpreter(_Counted, SandboxFusionTool):
    """The code interpreter."""


class CountedGsm8k(_Counted, Gsm8kTool):
    """The GSM8K tool, which calls calc_reward itself in each call."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        result = await super().execute(instance_id, parameters, **kwargs)
        rewarded[self.name, instance_id] -= 1
        return result


@tool
def shout(text: str, times: int = 1) -> str:
    """Convert text to upper case.

    Args:
        text: The text.
        times: Number of repetitions.
    """
    return " ".join([text.upper()] * times)


def counts(worker: Any = None) -> dict[str, Any]:
    """Return the counts of this process."""
    once = sum(times == 1 for times in rewarded.values())
    return {**seen, "alive": len(alive), "rewarded_once": once, "rewarded_more": sum(n > 1 for n in rewarded.values())}


def reset(worker: Any = None) -> None:
    """Reset the counts."""
    for counted in (seen, rewarded, alive):
        counted.clear()
