"""The registry: a YAML file becomes tools.

The file is the one that verl's users have:

    tools:
      - class_name: "my_tools.Search"       # a BaseTool, or a function made a tool by @tool
        config: {type: native, top_k: 3}    # the tool's own settings
        tool_schema: {...}                  # left out where the class or function has its own

It is read by omegaconf, so `${oc.env:NAME}` works. Either every tool in it loads, or `ConfigError` says what is wrong,
in which file, at which entry, and what to do. Nothing is skipped, and no two tools have one name.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from yaml import YAMLError

from toolroll.errors import ConfigError, did_you_mean, explain
from toolroll.tools.base_tool import BaseTool
from toolroll.tools.function_tool import FunctionTool

ALIASES = {
    "verl.tools.gsm8k_tool.Gsm8kTool": "toolroll.tools.gsm8k_tool.Gsm8kTool",
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": "toolroll.tools.sandbox_fusion_tool.SandboxFusionTool",
}
"""Classes that verl dropped, and ours that take their place, so that old files go on working."""


# omegaconf 2.4 refuses files of more than 10,000 nodes, to guard against aliases that multiply; 2.3 has no limit.
# A few hundred tools are more than that, and who can name a class to import can do worse than a large file.
_ANY_SIZE: dict[str, Any] = (
    {"max_yaml_expanded_nodes": None}
    if "max_yaml_expanded_nodes" in inspect.signature(OmegaConf.load).parameters
    else {}
)


class ToolEntry(BaseModel):
    """One entry under `tools`."""

    model_config = ConfigDict(extra="forbid")

    class_name: str
    config: Annotated[dict[str, Any], BeforeValidator(lambda given: {} if given is None else given)] = Field(
        default_factory=dict
    )
    tool_schema: dict[str, Any] | None = None


def initialize_tools_from_config(tools_config_file: str | Path) -> list[BaseTool[Any]]:
    """The tools of a config file, in its order.

    >>> [tool.name for tool in initialize_tools_from_config("examples/gsm8k/tool_config.yaml")]
    ['calc_gsm8k_reward']
    """
    path = Path(tools_config_file)
    tools: dict[str, tuple[BaseTool[Any], str]] = {}
    for number, entry in enumerate(read_entries(path), start=1):
        where = _where(path, number, entry.class_name)
        try:
            tool = build(entry)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        if tool.name in tools:
            raise ConfigError(
                f"{where}: its name, {tool.name!r}, is taken by {tools[tool.name][1]}. "
                "A model tells tools apart by name: change one."
            )
        tools[tool.name] = tool, f"tool {number}"
    return [tool for tool, _ in tools.values()]


def read_entries(tools_config_file: str | Path) -> list[ToolEntry]:
    """What stands in a config file, checked; nothing of it is made yet."""
    path, entries = Path(tools_config_file), []
    for number, raw in enumerate(_read_list(path), start=1):
        try:
            entries.append(ToolEntry.model_validate(raw))
        except ValidationError as error:
            where = _where(path, number, raw.get("class_name") if isinstance(raw, dict) else None)
            raise ConfigError(f"{where}: {explain(error, ToolEntry.model_fields)}.") from error
    return entries


def _where(path: Path, number: int, class_name: Any) -> str:
    return f"{path}, tool {number}" + (f" ({class_name})" if class_name is not None else "")


def _read_list(path: Path) -> list[Any]:
    try:
        content = OmegaConf.to_container(OmegaConf.load(path, **_ANY_SIZE), resolve=True, throw_on_missing=True)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file. Give the path of a tool config (YAML).") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from error
    except YAMLError as error:
        raise ConfigError(f"{path}: is not valid YAML: {' '.join(str(error).split())}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: at {error.full_key or 'the top level'}: {error.msg or error}") from error
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(content, dict) or not isinstance(entries, list):
        raise ConfigError(f"{path}: has no list `tools`. It should read:\ntools:\n  - class_name: my_module.MyTool")
    if unknown := content.keys() - {"tools"}:
        raise ConfigError(f"{path}: has {_list(unknown)} beside `tools`. Only `tools` is known here.")
    return entries


def build(entry: ToolEntry) -> BaseTool[Any]:
    """The tool that an entry describes."""
    kind = entry.config.get("type", "native")
    if kind != "native":
        raise ConfigError(f"config.type is {kind!r}; only 'native' is known.")
    found = import_by_name(ALIASES.get(entry.class_name, entry.class_name))
    if isinstance(found, FunctionTool):
        return found.configured(entry.config, entry.tool_schema)
    if not (isinstance(found, type) and issubclass(found, BaseTool)):
        remedy = (
            "put @tool on it" if callable(found) and not isinstance(found, type) else "derive it from toolroll.BaseTool"
        )
        raise ConfigError(f"{entry.class_name} is not a tool: {remedy}.")
    try:
        return found(entry.config, entry.tool_schema)
    except ConfigError:
        raise
    except ValidationError as error:
        raise ConfigError(f"making the tool failed: {explain(error)}.") from error
    except Exception as error:
        raise ConfigError(f"making the tool failed: {type(error).__name__}: {error}") from error


def import_by_name(dotted: str) -> Any:
    """What `package.module.Name` names. Raises ConfigError that says which part of it failed."""
    module_name, _, attribute = dotted.rpartition(".")
    if not module_name:
        raise ConfigError(f"{dotted!r} has no module: write it as my_module.{dotted or 'MyTool'}.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        remedy = (
            "install it, or put its folder on PYTHONPATH"
            if error.name and module_name.startswith(error.name)
            else "install it"
        )
        raise ConfigError(f"there is no module {error.name!r} for it: {remedy}.") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"importing {module_name} failed: {type(error).__name__}: {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(f"{module_name} has no {attribute!r}{did_you_mean(attribute, dir(module))}.") from error


def _list(keys: Iterable[object]) -> str:
    return ", ".join(repr(key) for key in sorted(map(str, keys)))
