"""Two custom tools: a stateless function, and a class with state per trajectory."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from toolroll import BaseTool, PolicyFault, ToolResponse, ToolResult, ToolSettings, tool

GRAMS = {"cup": 120.0, "tablespoon": 7.5, "ounce": 28.35}


@tool
def convert(amount: float, unit: Literal["cup", "tablespoon", "ounce"]) -> dict[str, float]:
    """Convert an amount of flour to grams.

    Args:
        amount: The amount.
        unit: The unit of the amount.
    """
    return {"grams": round(amount * GRAMS[unit], 1)}


class PantrySettings(ToolSettings):
    """Settings of the pantry."""

    shelf: int = Field(default=10, gt=0, description="Maximum number of different items.")


class Pantry(BaseTool[dict[str, int]]):
    """Stores items. Each trajectory has its own pantry."""

    default_schema: ClassVar = {
        "type": "function",
        "function": {
            "name": "pantry",
            "description": "Store items.",
            "parameters": {
                "type": "object",
                "properties": {"item": {"type": "string"}, "count": {"type": "integer", "minimum": 1}},
                "required": ["item", "count"],
            },
        },
    }

    def __init__(self, config: dict[str, Any] | None = None, tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self.settings = PantrySettings.read(self.config)

    def new_state(self, **create_kwargs: int) -> dict[str, int]:
        return dict(create_kwargs)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        stored, item = self.state(instance_id), parameters["item"]
        if item not in stored and len(stored) >= self.settings.shelf:
            raise PolicyFault(f"The shelf is full. It holds {', '.join(stored)}.")
        stored[item] = stored.get(item, 0) + parameters["count"]
        return ToolResult(ToolResponse(text=f"{stored[item]} {item} stored"), None, {"items": len(stored)})

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(len(self.state(instance_id)))
