"""McpTool: a tool of an MCP server, and loading of the tools of a config entry."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from toolroll.errors import (
    ConfigError,
    InfraFault,
    MissingExtra,
    PolicyFault,
    ToolContractError,
    unknown_name,
    validate,
)
from toolroll.images import read_image
from toolroll.limiter.limited import cache_wait_s, slot_wait_s
from toolroll.limiter.settings import ResourceLimits
from toolroll.schemas import JsonDict, ToolResponse
from toolroll.tools.base_tool import BaseTool, ToolResult
from toolroll.tools.mcp.connection import ListedTool, schema_hash
from toolroll.tools.mcp.content import to_response
from toolroll.tools.mcp.server import McpServer, ServerCall, listed_server
from toolroll.tools.mcp.settings import (
    VERL_CLASSES,
    McpServerSettings,
    McpToolOverride,
    VerlConfig,
    VerlServers,
    read_verl_servers,
    verl_limits,
)

T = TypeVar("T")


class McpTool(BaseTool[dict[str, Any]]):
    """A tool of an MCP server. Created by `load_mcp_tools`.

    Args:
        server: The server.
        tool: The tool, as the server describes it.
        settings: Settings of the entry.
        override: Changes to the tool.
        limits: Limits of the calls.

    Raises:
        ConfigError: If a hidden argument does not exist, or the schema of the tool is invalid.
    """

    def __init__(
        self,
        server: McpServer,
        tool: ListedTool,
        settings: McpServerSettings,
        override: McpToolOverride,
        limits: ResourceLimits | None = None,
    ) -> None:
        super().__init__({**settings.identity, "tool": tool.name}, _tool_schema(tool, override))
        self.limits = limits
        self.returns_images = settings.returns_images
        self.server = server
        self.server_tool = tool.name
        """Name of the tool on the server."""
        self._call_timeout = settings.call_timeout
        self._hidden = override.hidden
        self._required = set(_schema_part(tool, "required", list)) & set(override.hidden)

    @property
    def keeps_state(self) -> bool:
        """True if each trajectory has a separate server."""
        return self.server.settings.scope == "trajectory"

    @property
    def schema_hash(self) -> str:
        """Hash of the schema that the model sees."""
        return schema_hash(self.tool_schema.model_dump())

    def new_state(self, **create_kwargs: Any) -> dict[str, Any]:
        """Return the values of hidden arguments."""
        return create_kwargs

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Create an instance. With the scope `trajectory`, this starts its server."""
        created = await super().create(instance_id, **kwargs)
        await self.server.acquire(created[0], self.name)
        return created

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], *, deadline: float | None = None, **kwargs: Any
    ) -> ToolResult:
        """Call the tool.

        Args:
            instance_id: Id of the instance.
            parameters: Arguments of the model.
            deadline: Time by which the result must be available, on the clock of `time.monotonic()`.
            **kwargs: Values of hidden arguments, which override those of `create`.

        Returns:
            The response.

        Raises:
            PolicyFault: If the tool returns an error or an image that cannot be read, rejects the arguments or does not
                answer in time.
            InfraFault: If the server cannot be reached, has ended or violates the protocol.
        """
        arguments = {name: value for name, value in parameters.items() if name not in self._hidden}
        arguments |= self._hidden_arguments({**self.state(instance_id), **kwargs})
        waited_s = cache_wait_s() + (slot_wait_s() if self.limits is not None else 0.0)
        call = ServerCall(self.server_tool, arguments, self._call_timeout, deadline, waited_s)
        result = await self.server.call(instance_id, call)
        response = to_response(self.name, result, returns_images=self.returns_images)
        await _check_images(response.image or ())
        return ToolResult(response, None, {})

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Release an instance. The server of a trajectory ends with the last instance that uses it."""
        await super().release(instance_id)
        await self.server.release(instance_id, self.name)

    def _hidden_arguments(self, available: Mapping[str, Any]) -> dict[str, Any]:
        for name in self._required - available.keys():
            raise ToolContractError(
                f"Tool {self.name!r} requires {name!r} for every trajectory. Pass it in create_kwargs."
            )
        hidden = {name: available[name] for name in self._hidden if name in available}
        try:
            json.dumps(hidden, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise ToolContractError(f"The hidden arguments of tool {self.name!r} are not JSON: {error}.") from error
        return hidden


async def _check_images(images: Iterable[bytes]) -> None:
    """Raise PolicyFault for an image that cannot be read, such as a file that the model chose to show."""
    for image in images:
        try:
            await asyncio.to_thread(read_image, image)
        except MissingExtra:
            return  # the rollout reports it when it reads the image
        except ConfigError as error:
            raise PolicyFault("The tool returned an image that cannot be read.") from error


def _tool_schema(tool: ListedTool, override: McpToolOverride) -> JsonDict:
    properties = _schema_part(tool, "properties", dict)
    for name in override.hidden:
        if name not in properties:
            raise ConfigError(f"config.tools.{tool.name}.hidden: {unknown_name('argument', name, properties)}")
    schema = {"type": "object", **tool.input_schema}
    schema["properties"] = {name: one for name, one in properties.items() if name not in override.hidden}
    if "required" in schema:
        required = _schema_part(tool, "required", list)
        schema["required"] = [name for name in required if name not in override.hidden]
    function = {
        "name": override.name or tool.name,
        "description": override.description if override.description is not None else tool.description or "",
        "parameters": schema,
    }
    return {"type": "function", "function": function}


def _schema_part(tool: ListedTool, key: str, expected: type[T]) -> T:
    """Return a value of a tool's schema. It is empty if the server omits it, or sends null as some do."""
    value = tool.input_schema.get(key)
    if value is None:
        return expected()
    if not isinstance(value, expected):
        raise ConfigError(f"{key!r} of its schema: expected {expected.__name__}, got {type(value).__name__}.")
    return value


def load_mcp_tools(
    config: Mapping[str, Any],
    *,
    class_name: str | None = None,
    verl_servers: Mapping[str, Any] | None = None,
    limits: ResourceLimits | None = None,
) -> list[BaseTool[Any]]:
    """Load the tools of an entry with `type: mcp`, connecting to its server.

    Args:
        config: `config` of the entry.
        class_name: Class of verl, in an entry of verl's form.
        verl_servers: `mcp` of an entry in verl's form.
        limits: Limits of the calls of all tools of the entry. The default resource is the server.

    Returns:
        The tools, in the order of the entry or else of the server.

    Raises:
        ConfigError: If the settings are invalid, the server cannot be started or reached, or a tool does not exist.
        MissingExtra: If the MCP SDK is not installed.
    """
    if class_name is not None and class_name not in VERL_CLASSES:
        raise ConfigError(f"class_name: {class_name!r} cannot be used with `type: mcp`. Remove it.")
    if verl_servers is not None:
        return _load_verl_tools(config, verl_servers, limits)
    settings = validate(McpServerSettings, config, "config")
    return _load(settings, limits)


def _load(settings: McpServerSettings, limits: ResourceLimits | None) -> list[BaseTool[Any]]:
    server = _listed_server(settings)
    listing = server.listing
    overrides = settings.tools if settings.tools is not None else dict.fromkeys(listing, McpToolOverride())
    for name in overrides:
        if name not in listing:
            raise ConfigError(f"config.tools: {unknown_name('tool', name, listing)}")
    server.expose(listing[name] for name in overrides)
    if limits is not None and limits.resource is None:
        limits = limits.model_copy(update={"resource": settings.label})
    tools: list[BaseTool[Any]] = []
    for name, override in overrides.items():
        try:
            tools.append(McpTool(server, listing[name], settings, override, limits))
        except ConfigError as error:
            raise ConfigError(f"MCP server {settings.label}, tool {name!r}: {error}") from error
    return tools


def _load_verl_tools(
    config: Mapping[str, Any], verl_servers: Mapping[str, Any], limits: ResourceLimits | None
) -> list[BaseTool[Any]]:
    """Load the tools of an entry in verl's form.

    If several servers had no token, verl's client prefixed the names of their tools with the server's name.
    """
    read = validate(VerlConfig, config, "config")
    file = validate(VerlServers, verl_servers, "mcp")
    servers = read_verl_servers(file.mcp_servers_config_path, read.timeout)
    if limits is not None and read.rate_limit is not None:
        rate = f"`rates: {{requests: {read.rate_limit:g}}}`"
        raise ConfigError(f"config.rate_limit: cannot be used with `limits`. Remove it, and add {rate} to `limits`.")
    limits = limits or verl_limits(read, file.mcp_servers_config_path)
    plain = [name for name, one in servers.items() if "Authorization" not in one.headers]
    tools: list[BaseTool[Any]] = []
    for server_name, settings in servers.items():
        prefix = f"{server_name}_" if len(plain) > 1 and server_name in plain else ""
        listing = _listed_server(settings).listing
        selected = file.tool_selected_list or [prefix + name for name in listing]
        overrides = {name: McpToolOverride(name=prefix + name) for name in listing if prefix + name in selected}
        tools += _load(settings.model_copy(update={"tools": overrides}), limits)
    found = {tool.name for tool in tools}
    for name in file.tool_selected_list or ():
        if name not in found:
            raise ConfigError(f"mcp.tool_selected_list: {unknown_name('tool', name, found)}")
    return tools


def _listed_server(settings: McpServerSettings) -> McpServer:
    try:
        return listed_server(settings)
    except InfraFault as error:
        raise ConfigError(str(error)) from error
