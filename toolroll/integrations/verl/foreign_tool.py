"""ForeignTool: a tool that was written for verl, as one of ours, so that our loop can run it.

Its instances live as long as the trajectory, its arguments are checked against its schema, and it is released whatever
happens; verl's own loop would do none of that for it. `agent_data` isn't there: that is verl's own loop's.
"""

from __future__ import annotations

from typing import Any

from toolroll.schemas import ToolResponse
from toolroll.tools.base_tool import BaseTool, ToolResult, as_result


class ForeignTool(BaseTool[None]):
    """A `verl.tools.base_tool.BaseTool`, or a function of `rollout.multi_turn.function_tool_path`."""

    def __init__(self, tool: Any, tool_schema: Any = None) -> None:
        super().__init__({}, tool.tool_schema if tool_schema is None else tool_schema)
        self.tool = tool
        self._is_function = hasattr(tool, "call") and not hasattr(tool, "execute")

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin an instance, as verl does it: what it is created with comes in one `create_kwargs`."""
        made, response = await super().create(instance_id)
        if not self._is_function:
            made, _ = await self.tool.create(made, create_kwargs=kwargs)
        return made, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        """Carry out one call."""
        kwargs.pop("deadline", None)  # verl has none
        if not self._is_function:
            return as_result(self.name, await self.tool.execute(instance_id, parameters, **kwargs))
        from verl.tools.function_tool import normalize_function_tool_return

        return as_result(self.name, normalize_function_tool_return(await self.tool.call(parameters)))

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """What the tool says."""
        return 0.0 if self._is_function else await self.tool.calc_reward(instance_id, **kwargs)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End an instance."""
        await super().release(instance_id)
        if not self._is_function:
            await self.tool.release(instance_id, **kwargs)
