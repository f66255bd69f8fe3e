"""A tool written for verl."""

from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Diary(BaseTool):
    """Keeps entries from one call to the next."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self.pages: dict[str, list[str]] = {}

    async def create(
        self, instance_id: str | None = None, create_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        assert instance_id is not None
        self.pages[instance_id] = [(create_kwargs or {}).get("owner", "nobody")]
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        self.pages[instance_id] += parameters["entry"]
        return ToolResponse(text="; ".join(self.pages[instance_id])), 0.25, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(len(self.pages[instance_id]))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.pages[instance_id]
