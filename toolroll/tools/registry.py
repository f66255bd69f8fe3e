"""Loading of tools from a YAML config file.

The format is that of verl:

    tools:
      - class_name: "my_tools.Search"       # a subclass of BaseTool, or a function with @tool
        config: {type: native, top_k: 3}    # settings of the tool
        tool_schema: {...}                  # optional if the class or function has a schema
        limits: {limit: 8, rpm: 600}        # optional, see ResourceLimits
        cache: {scope: run}                 # optional, see CacheSettings
      - config: {type: mcp, command: "my-server"}  # all tools of an MCP server, see toolroll/tools/mcp/settings.py

omegaconf reads the file, so `${oc.env:NAME}` works.

Invariant: either all tools of the file are loaded, with unique names, or ConfigError states the file, the entry and the
problem.
"""

from __future__ import annotations

import inspect
import logging
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Self

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from yaml import YAMLError

from toolroll._internal.dotted_path import import_dotted_path
from toolroll.errors import ConfigError, MissingExtra, explain, validate
from toolroll.limiter.settings import ResourceLimits
from toolroll.tools.base_tool import BaseTool
from toolroll.tools.cache_settings import CacheSettings
from toolroll.tools.function_tool import FunctionTool

logger = logging.getLogger(__name__)

VERL_CLASS_ALIASES = {
    "verl.tools.gsm8k_tool.Gsm8kTool": "toolroll.tools.gsm8k_tool.Gsm8kTool",
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": "toolroll.tools.sandbox_fusion_tool.SandboxFusionTool",
}
"""Classes that verl has removed, and their replacements. Existing config files keep working."""

# omegaconf 2.4 rejects files with more than 10,000 nodes, which protects against YAML aliases that expand
# exponentially. A few hundred tools exceed that, and the file is trusted anyway: it names classes to import.
_HAS_NODE_LIMIT = "max_yaml_expanded_nodes" in inspect.signature(OmegaConf.load).parameters
_WITHOUT_NODE_LIMIT: dict[str, Any] = {"max_yaml_expanded_nodes": None} if _HAS_NODE_LIMIT else {}


class ToolType(StrEnum):
    """Kinds of tools, which `config.type` states."""

    NATIVE = "native"
    """A class or function of Python. The default."""
    MCP = "mcp"
    """Tools of an MCP server."""


class ToolEntry(BaseModel):
    """One entry under `tools`."""

    model_config = ConfigDict(extra="forbid")

    class_name: str | None = None
    """Dotted path of a subclass of BaseTool or of a function with @tool. Not needed with `type: mcp`."""
    config: dict[str, Any] | None = None
    """Settings of the tool."""
    mcp: dict[str, Any] | None = None
    """File with the MCP servers, in verl's form of an entry with `type: mcp`."""
    tool_schema: dict[str, Any] | None = None
    """Schema of the tool. By default, that of the class or function."""
    limits: ResourceLimits | None = None
    """Limits of the tool's calls. By default, those of the class or function."""
    cache: CacheSettings | Literal[False] | None = None
    """Cache of the tool's results, which requires that the tool is pure; or false for none. By default, that of the
    class or function."""

    @property
    def kind(self) -> str:
        """The tool's `config.type`."""
        return str((self.config or {}).get("type", ToolType.NATIVE))

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.kind not in list(ToolType):
            raise ValueError(f"config.type: unknown type {self.kind!r}. Use 'native' or 'mcp'")
        if self.kind == ToolType.MCP:
            if self.tool_schema is not None:
                raise ValueError("tool_schema: the schemas of MCP tools come from the server. Remove it")
        elif self.class_name is None:
            raise ValueError("missing key 'class_name'")
        elif self.mcp is not None:
            raise ValueError("mcp: only valid with `config: {type: mcp}`")
        return self


def initialize_tools_from_config(tools_config_file: str | Path, *, kind: ToolType | None = None) -> list[BaseTool[Any]]:
    """Load the tools of a config file.

    Args:
        tools_config_file: Path of the YAML file.
        kind: Kind of the tools to load. Default: all.

    Returns:
        The tools, in the order of the file.

    Raises:
        ConfigError: If the file cannot be read, or an entry is invalid or cannot be loaded.

    Example:
        >>> [tool.name for tool in initialize_tools_from_config("examples/gsm8k/tool_config.yaml")]
        ['calc_gsm8k_reward']
    """
    path = Path(tools_config_file)
    tools: dict[str, BaseTool[Any]] = {}
    for number, entry in enumerate(read_entries(path), start=1):
        if kind not in (None, entry.kind):
            continue
        where = _location(path, number, entry.class_name)
        try:
            built = build(entry, path.parent)
        except MissingExtra:
            raise
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        for tool in built:
            if tool.name in tools:
                first = list(tools).index(tool.name) + 1
                raise ConfigError(f"{where}: tool {first} has the same name, {tool.name!r}. Rename one.")
            tools[tool.name] = tool
    logger.info("Initialize tools from configuration %s: %s", path, ", ".join(tools) or "none")
    return list(tools.values())


def read_entries(tools_config_file: str | Path) -> list[ToolEntry]:
    """Read and validate the entries of a config file without creating the tools.

    Args:
        tools_config_file: Path of the YAML file.

    Returns:
        The entries, in the order of the file.

    Raises:
        ConfigError: If the file cannot be read or an entry is invalid.
    """
    path, entries = Path(tools_config_file), []
    for number, raw in enumerate(_read_tools_list(path), start=1):
        class_name = raw.get("class_name") if isinstance(raw, dict) else None
        entries.append(validate(ToolEntry, raw, _location(path, number, class_name)))
    return entries


def _location(path: Path, number: int, class_name: Any) -> str:
    return f"{path}, tool {number}" + (f" ({class_name})" if class_name is not None else "")


def _read_tools_list(path: Path) -> list[Any]:
    try:
        config = OmegaConf.load(path, **_WITHOUT_NODE_LIMIT)
        content = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: file not found. Pass the path of a tool config (YAML).") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except YAMLError as error:
        raise ConfigError(f"{path}: invalid YAML: {' '.join(str(error).split())}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: at {error.full_key or 'the top level'}: {error.msg or error}") from error
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(content, dict) or not isinstance(entries, list):
        raise ConfigError(f"{path}: has no list `tools`. Expected:\ntools:\n  - class_name: my_module.MyTool")
    if unknown := content.keys() - {"tools"}:
        keys = ", ".join(repr(key) for key in sorted(map(str, unknown)))
        raise ConfigError(f"{path}: unknown key {keys}. The only valid key is `tools`.")
    return entries


def build(entry: ToolEntry, directory: Path = Path()) -> list[BaseTool[Any]]:
    """Create the tools of an entry: one, or those of an MCP server.

    Args:
        entry: Entry of a config file.
        directory: Directory of the config file, to which relative paths refer.

    Returns:
        The tools.

    Raises:
        ConfigError: If the class cannot be imported, is not a tool, or rejects its settings or schema, or the MCP
            server cannot be used.
    """
    if entry.kind == ToolType.MCP:
        from toolroll.tools.mcp.mcp_tool import load_mcp_tools

        options: dict[str, Any] = {"class_name": entry.class_name, "verl_servers": entry.mcp, "limits": entry.limits}
        tools = load_mcp_tools(entry.config or {}, **options)
    else:
        tools = [_create(entry)]
        if entry.limits is not None:
            tools[0].limits = entry.limits
    for tool in tools:
        set_cache(tool, entry, directory)
    return tools


def set_cache(tool: BaseTool[Any], entry: ToolEntry, directory: Path) -> None:
    """Apply the `cache` of an entry to its tool.

    Args:
        tool: The tool.
        entry: The entry.
        directory: Directory of the config file.

    Raises:
        ConfigError: If results of the tool may depend on the trajectory.
    """
    if entry.cache is False:
        tool.pure, tool.cache = False, None
    elif entry.cache is not None:
        if tool.keeps_state:
            raise ConfigError(
                f"cache: results of {tool.name!r} may depend on the trajectory. Remove it, or set `pure = True` in the "
                "class if they depend on the arguments alone."
            )
        tool.cache = entry.cache.with_path_in(directory)


def _create(entry: ToolEntry) -> BaseTool[Any]:
    config = entry.config or {}
    tool_class = get_tool_class(str(entry.class_name))
    if isinstance(tool_class, FunctionTool):
        return tool_class.with_config(config, entry.tool_schema)
    try:
        return tool_class(config, entry.tool_schema)
    except ConfigError:
        raise
    except ValidationError as error:
        raise ConfigError(f"creating the tool failed: {explain(error)}.") from error
    except Exception as error:
        raise ConfigError(f"creating the tool failed: {type(error).__name__}: {error}") from error


def get_tool_class(cls_name: str) -> type[BaseTool[Any]] | FunctionTool:
    """Import a tool class, or a function with `@tool`.

    Args:
        cls_name: Dotted path. The classes of `VERL_CLASS_ALIASES` are replaced.

    Returns:
        The class or function. Call it with `config=` and `tool_schema=` to create a tool.

    Raises:
        ConfigError: If the path cannot be imported or is not a tool.

    Example:
        >>> get_tool_class("verl.tools.gsm8k_tool.Gsm8kTool")
        <class 'toolroll.tools.gsm8k_tool.Gsm8kTool'>
    """
    found = import_dotted_path(VERL_CLASS_ALIASES.get(cls_name, cls_name))
    if isinstance(found, FunctionTool) or (isinstance(found, type) and issubclass(found, BaseTool)):
        return found
    is_function = callable(found) and not isinstance(found, type)
    remedy = "Decorate it with @tool" if is_function else "Derive it from toolroll.BaseTool"
    raise ConfigError(f"{cls_name} is not a tool. {remedy}.")
