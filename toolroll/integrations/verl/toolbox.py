"""The tools of a worker of verl's, as our loop runs them.

verl has loaded them by then, once for each of its workers, by its own registry. That keeps of a schema no more than
each parameter's type, description and enum. Ours are made anew from the same file, with their schemas as written; those
that were written for verl are taken as verl made them, with theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolroll.errors import ConfigError
from toolroll.integrations.verl.foreign_tool import ForeignTool
from toolroll.tools.base_tool import BaseTool
from toolroll.tools.registry import build, read_entries


def tools_of(loaded: Sequence[Any], tool_config_path: str | None) -> list[BaseTool[Any]]:
    """The tools that verl loaded: those of the file, in its order, and then functions."""
    entries = read_entries(tool_config_path) if tool_config_path else []
    if len(entries) > len(loaded):
        raise ConfigError(f"{tool_config_path} has {len(entries)} tools, but verl loaded {len(loaded)} of them.")
    tools: list[BaseTool[Any]] = []
    for entry, tool in zip(entries, loaded, strict=False):
        tools.append(build(entry) if isinstance(tool, BaseTool) else ForeignTool(tool, entry.tool_schema))
    return [*tools, *(ForeignTool(tool) for tool in loaded[len(entries) :])]


def chosen(tools: Sequence[BaseTool[Any]], extra_info: Any) -> list[BaseTool[Any]]:
    """Those that the sample's row asks for (`extra_info.tool_selection`), or all."""
    names = extra_info.get("tool_selection") if isinstance(extra_info, dict) else None
    if names is None or len(names) == 0:
        return list(tools)
    by_name = {tool.name: tool for tool in tools}
    if unknown := [str(name) for name in names if name not in by_name]:
        raise ConfigError(
            f"A row's extra_info.tool_selection names {', '.join(unknown)}, which there isn't; "
            f"the tools are {', '.join(by_name)}."
        )
    return [by_name[name] for name in names]
