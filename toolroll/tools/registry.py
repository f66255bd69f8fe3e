"""Loading of tools from a YAML config file.

The format is that of verl:

    tools:
      - class_name: "my_tools.Search"       # a subclass of BaseTool, or a function with @tool
        config: {type: native, top_k: 3}    # settings of the tool
        tool_schema: {...}                  # optional if the class or function has a schema

omegaconf reads the file, so `${oc.env:NAME}` works.

Invariant: either all tools of the file are loaded, with unique names, or ConfigError states the file, the entry and the
problem.
"""

from __future__ import annotations

import inspect
import logging
from enum import StrEnum
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, ValidationError
from yaml import YAMLError

from toolroll._internal.dotted_path import import_dotted_path
from toolroll.errors import ConfigError, explain, validate
from toolroll.tools.base_tool import BaseTool
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
    """A class or function of Python. The default, and the only kind."""


class ToolEntry(BaseModel):
    """One entry under `tools`."""

    model_config = ConfigDict(extra="forbid")

    class_name: str
    """Dotted path of a subclass of BaseTool or of a function with @tool."""
    config: dict[str, Any] | None = None
    """Settings of the tool."""
    tool_schema: dict[str, Any] | None = None
    """Schema of the tool. By default, that of the class or function."""


def initialize_tools_from_config(tools_config_file: str | Path) -> list[BaseTool[Any]]:
    """Load the tools of a config file.

    Args:
        tools_config_file: Path of the YAML file.

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
        where = _location(path, number, entry.class_name)
        try:
            tool = build(entry)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
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


def build(entry: ToolEntry) -> BaseTool[Any]:
    """Create the tool of an entry.

    Args:
        entry: Entry of a config file.

    Returns:
        The tool.

    Raises:
        ConfigError: If the class cannot be imported, is not a tool, or rejects its settings or schema.
    """
    config = entry.config or {}
    kind = config.get("type", ToolType.NATIVE)
    if kind not in list(ToolType):
        raise ConfigError(f"config.type: unknown type {kind!r}. Use 'native'.")
    tool_class = get_tool_class(entry.class_name)
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
