"""Tools of an agent loop worker.

verl loads the tools once per worker with its own registry, which keeps only the type, description and enum of each
parameter. toolroll's tools are created again from the same file, with their schemas as written. Tools written for verl
are used as verl created them, with the schema of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from toolroll.errors import ConfigError, unknown_name
from toolroll.schemas import ToolResponse
from toolroll.tools.base_tool import BaseTool, ToolResult, as_result
from toolroll.tools.registry import ToolEntry, build, initialize_tools_from_config, read_entries, set_cache


class VerlTool(BaseTool[None]):
    """Adapter for a `verl.tools.base_tool.BaseTool` or a function of `rollout.multi_turn.function_tool_path`.

    Unlike in verl's loop, an instance lasts for the trajectory, arguments are validated against the schema, and the
    instance is always released. The tool does not receive verl's `agent_data`.

    Args:
        tool: The tool as verl created it.
        entry: Entry of the config file, whose schema and limits replace those of the tool.

    Raises:
        ConfigError: If the entry has a cache: the tool may depend on its trajectory.
    """

    def __init__(self, tool: Any, entry: ToolEntry | None = None) -> None:
        super().__init__({}, entry.tool_schema if entry and entry.tool_schema else tool.tool_schema)
        if entry and entry.limits:
            self.limits = entry.limits
        if entry:
            set_cache(self, entry, Path())
        self.tool = tool
        self._is_function = hasattr(tool, "call") and not hasattr(tool, "execute")

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Create an instance, passing the arguments as a single `create_kwargs` mapping like verl."""
        created_id, response = await super().create(instance_id)
        if not self._is_function:
            created_id, _ = await self.tool.create(created_id, create_kwargs=kwargs)
        return created_id, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        """Execute one call."""
        kwargs.pop("deadline", None)  # unknown to tools of verl
        if not self._is_function:
            return as_result(self.name, await self.tool.execute(instance_id, parameters, **kwargs))
        from verl.tools.function_tool import normalize_function_tool_return

        return as_result(self.name, normalize_function_tool_return(await self.tool.call(parameters)))

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the tool's reward for the trajectory. 0.0 for a function."""
        return 0.0 if self._is_function else await self.tool.calc_reward(instance_id, **kwargs)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Release an instance."""
        await super().release(instance_id)
        if not self._is_function:
            await self.tool.release(instance_id, **kwargs)


def convert_tools(loaded: Sequence[Any], tool_config_path: str | None) -> list[BaseTool[Any]]:
    """Convert the tools that verl loaded: those of the config file in its order, then functions.

    Args:
        loaded: Tools loaded by verl.
        tool_config_path: verl's `multi_turn.tool_config_path`.

    Raises:
        ConfigError: If verl did not load all tools of the file, or an entry is invalid.
    """
    entries = read_entries(tool_config_path) if tool_config_path else []
    if len(entries) > len(loaded):
        raise ConfigError(f"{tool_config_path} has {len(entries)} tools, but verl loaded only {len(loaded)} of them.")
    directory = Path(tool_config_path or "").parent
    return [
        build(entry, directory)[0] if entry and isinstance(tool, BaseTool) else VerlTool(tool, entry)
        for entry, tool in zip_longest(entries, loaded)
    ]


def add_tools(tools: list[BaseTool[Any]], tool_config_path: str | None) -> list[BaseTool[Any]]:
    """Return the tools and those of a further config file.

    Raises:
        ConfigError: If the file cannot be loaded, or two tools have the same name.
    """
    further = initialize_tools_from_config(tool_config_path) if tool_config_path else []
    for tool in further:
        if tool.name in {one.name for one in tools}:
            raise ConfigError(
                f"{tool_config_path}: verl has loaded a tool with the same name, {tool.name!r}. Rename one."
            )
    return [*tools, *further]


def select_tools(tools: Sequence[BaseTool[Any]], extra_info: Any) -> list[BaseTool[Any]]:
    """Return the tools that a row selects with `extra_info.tool_selection`, or all tools.

    Raises:
        ConfigError: If a selected tool does not exist.
    """
    names = extra_info.get("tool_selection") if isinstance(extra_info, dict) else None
    if names is None or len(names) == 0:
        return list(tools)
    by_name = {tool.name: tool for tool in tools}
    for name in names:
        if name not in by_name:
            raise ConfigError(f"extra_info.tool_selection: {unknown_name('tool', str(name), by_name)}")
    return [by_name[name] for name in names]
