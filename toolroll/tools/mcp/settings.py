"""Settings of MCP servers in the tool config file.

    tools:
      - config:
          type: mcp
          command: npx                     # a server that is started, or
          args: ["-y", "@modelcontextprotocol/server-filesystem", "."]
          # url: https://example.com/mcp   # a server that runs already
          scope: trajectory
          tools: [read_text_file, write_file]

Entries for verl's former MCP tools load as well. They name a JSON file with `mcpServers`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from toolroll._internal.text import hide_credentials, shorten
from toolroll.errors import ConfigError, validate
from toolroll.limiter.settings import ResourceLimits

logger = logging.getLogger(__name__)

MAX_LABEL_CHARS = 80
SECRET_OPTION = re.compile("key|token|secret|passw|auth|credential|cookie", re.IGNORECASE)
"""Options, variables and headers whose values are not shown."""
SECRET_ASSIGNMENT = re.compile(rf"([\w-]*(?:{SECRET_OPTION.pattern})[\w-]*(?:=|: *)).+", re.IGNORECASE | re.DOTALL)
"""An option, variable or header with its value, as in `--api-key=1`, `API_KEY=1` and `Authorization: Bearer 1`."""
URL_QUERY = re.compile(r"(://[^\s?'\"]*\?)[^\s'\"]+")
FASTMCP_KEYS = ("description", "disabled", "icon", "keep_alive", "sse_read_timeout", "timeout")
"""Keys of a server in the files that verl's client (`fastmcp`) reads, which have no effect here."""
VERL_CLASSES = ("verl.tools.mcp_base_tool.MCPBaseTool", "verl.tools.mcp_search_tool.MCPSearchTool")


class McpToolOverride(BaseModel):
    """Changes to one tool of a server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str | None = Field(default=None, min_length=1)
    """Name by which the model calls the tool. Default: the server's name of it."""
    description: str | None = None
    """Description that the model reads. Default: the server's."""
    hidden: tuple[str, ...] = ()
    """Arguments that the model does not see. Their values come from the trajectory's `create_kwargs` or
    `execute_kwargs` for the tool."""


class ServerIsolation(BaseModel):
    """Isolation of a server that is started: no network, a private /tmp, and limits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_mb: int = Field(default=1024, ge=32)
    """Memory limit of each process of the server, in megabytes."""
    readable: tuple[str, ...] = ()
    """Paths that the server may read, besides those of the system and of this Python."""


class McpServerSettings(BaseModel):
    """An MCP server, and how to use it: the `config` of an entry with `type: mcp`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["mcp"] = "mcp"
    """Kind of tool."""
    command: str | None = Field(default=None, min_length=1)
    """Program of a server that communicates over stdin and stdout."""
    args: tuple[str, ...] = ()
    """Arguments of the program."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the program. It also gets HOME, LOGNAME, PATH, SHELL, TERM and USER, and no others."""
    cwd: str | None = None
    """Working directory of the program. Default: that of this process, and a new temporary directory for each server
    if `scope` is `trajectory`."""
    url: str | None = None
    """URL of a server with streamable HTTP."""
    headers: dict[str, str] = Field(default_factory=dict)
    """HTTP headers of all requests, e.g. `Authorization: Bearer ${oc.env:TOKEN}`."""
    transport: Literal["http", "sse"] = "http"
    """`sse` for a URL of the HTTP+SSE transport, which MCP replaced by streamable HTTP in 2025."""
    tools: dict[str, McpToolOverride] | None = None
    """Tools to expose: a list of names, or a mapping from names to overrides. Default: all."""
    scope: Literal["process", "trajectory"] = "process"
    """`process` for one connection per process; `trajectory` for a separate server, or a separate connection to a URL,
    for each trajectory."""
    isolate: ServerIsolation | None = None
    """Run the program in the sandbox jail: `true`, or a mapping with `memory_mb` and `readable`."""
    returns_images: bool = False
    """Pass images to the model, which must be able to see them. Default: the model reads that there is an image."""
    start_timeout: float = Field(default=60.0, gt=0)
    """Timeout for starting the server and connecting to it, in seconds."""
    call_timeout: float = Field(default=60.0, gt=0)
    """Timeout for one call, in seconds. `limits.call_timeout` of the rollout applies as well."""

    @field_validator("tools", mode="before")
    @classmethod
    def _read_tools(cls, tools: Any) -> Any:
        """Accept a list of names, and None as no overrides."""
        if isinstance(tools, list):
            return {name: {} for name in tools}
        return {name: one or {} for name, one in tools.items()} if isinstance(tools, Mapping) else tools

    @field_validator("headers")
    @classmethod
    def _check_headers(cls, headers: dict[str, str]) -> dict[str, str]:
        """Remove line breaks at the ends of values, and reject others. The HTTP client would show them in its error."""
        stripped = {name: value.strip() for name, value in headers.items()}
        for name, value in stripped.items():
            if not (name + value).isascii() or not (name + value).isprintable():
                raise ValueError(f"the header {name!r} has characters that are not printable ASCII. Remove them")
        return stripped

    @field_validator("isolate", mode="before")
    @classmethod
    def _read_isolate(cls, isolate: Any) -> Any:
        return {} if isolate is True else None if isolate is False else isolate

    @model_validator(mode="after")
    def _check_server(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("set either `command` or `url`")
        if self.command is None and (self.args or self.env or self.cwd or self.isolate):
            raise ValueError("`args`, `env`, `cwd` and `isolate` need a `command`")
        if self.isolate and self.cwd:
            raise ValueError("an isolated server has a private directory: remove `cwd`")
        if self.url is None and (self.headers or self.transport != "http"):
            raise ValueError("`headers` and `transport` need a `url`")
        return self

    @property
    def program(self) -> str:
        """The command, whose path does not depend on the working directory."""
        command = str(self.command)
        return str(Path(command).absolute()) if "/" in command else command

    @property
    def label(self) -> str:
        """Name of the server for messages and limits, without credentials."""
        text = shlex.join(_hide_secrets([self.command, *self.args])) if self.command else str(self.url)
        return shorten(hide_url_secrets(text), MAX_LABEL_CHARS)

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that can change results. `env` and `headers` are a hash, without those that look like secrets.

        Secrets may change without changing results.
        """
        identity = self.model_dump(mode="json", include={"command", "args", "cwd", "url", "returns_images"})
        values = {**self.env, **self.headers}
        if public := {name: value for name, value in values.items() if SECRET_OPTION.search(name) is None}:
            identity["env_and_headers"] = hashlib.sha256(json.dumps(public, sort_keys=True).encode()).hexdigest()
        return identity

    @property
    def connection_key(self) -> str:
        """Text that is equal for settings that can share connections."""
        return self.model_dump_json(exclude={"tools", "returns_images", "call_timeout"})


def hide_url_secrets(text: str) -> str:
    """Replace user name, password and query of every URL in a text. Queries may contain API keys.

    >>> hide_url_secrets("no answer of https://me:pw@host/mcp?key=1")
    'no answer of https://***@host/mcp?***'
    """
    return URL_QUERY.sub(r"\1***", hide_credentials(text))


def _hide_secrets(command: list[str]) -> list[str]:
    """Replace the values of options, variables and headers that look like secrets."""
    hidden, is_value = [], False
    for part in command:
        shown = part if "://" in part else SECRET_ASSIGNMENT.sub(r"\1***", part)
        hidden.append("***" if is_value else shown)
        is_value = shown == part and part.startswith("-") and SECRET_OPTION.search(part) is not None
    return hidden


class VerlServers(BaseModel):
    """`mcp` of an entry in verl's form."""

    model_config = ConfigDict(extra="forbid")

    mcp_servers_config_path: str
    """JSON file with `mcpServers`."""
    tool_selected_list: list[str] | None = None
    """Names of the tools to expose. Default: all."""


class VerlConfig(BaseModel):
    """`config` of an entry in verl's form."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["mcp"] = "mcp"
    rate_limit: float | None = Field(default=None, gt=0)
    """Maximum number of calls per second of all tools together."""
    timeout: float = Field(default=30.0, gt=0)
    """Timeout for one call, in seconds."""


def verl_limits(config: VerlConfig, path: str) -> ResourceLimits | None:
    """Return the limits of an entry in verl's form."""
    if config.rate_limit is None:
        return None
    return ResourceLimits(resource=Path(path).name, rates={"requests": config.rate_limit})


def read_verl_servers(path: str, call_timeout: float) -> dict[str, McpServerSettings]:
    """Read a file with `mcpServers`.

    Args:
        path: JSON file. Each server has a `command`, or a `url` with an optional `auth_token`.
        call_timeout: Timeout for one call.

    Returns:
        The settings of the servers by name.

    Raises:
        ConfigError: If the file cannot be read or a server is invalid.
    """
    where = f"mcp.mcp_servers_config_path {path}"
    try:
        content = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{where}: invalid JSON: {error}.") from error
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ConfigError(f'{where}: has no servers. Expected: {{"mcpServers": {{"name": {{"url": "https://…"}}}}}}.')
    return {name: _read_verl_server(f"{where}, server {name!r}", one, call_timeout) for name, one in servers.items()}


def _read_verl_server(where: str, server: Any, call_timeout: float) -> McpServerSettings:
    if not isinstance(server, dict):
        raise ConfigError(f"{where}: expected a mapping, got {type(server).__name__}.")
    if ignored := [key for key in FASTMCP_KEYS if key in server]:
        logger.warning("%s: ignored %s", where, ", ".join(ignored))
    known = ("auth_token", "transport", "type", *FASTMCP_KEYS)
    settings = {key: value for key, value in server.items() if key not in known}
    headers = settings.get("headers", {})
    if (token := server.get("auth_token")) is not None and isinstance(headers, dict):
        settings["headers"] = {**headers, "Authorization": f"Bearer {token}"}
    # A token implied SSE, and so did the path of the URL.
    is_sse = token is not None or urlsplit(str(server.get("url", ""))).path.rstrip("/").endswith("/sse")
    kind = server.get("transport", "sse" if is_sse else "http")
    if "url" in server:
        settings["transport"] = "sse" if kind == "sse" else "http"
    return validate(McpServerSettings, {**settings, "call_timeout": call_timeout}, where)
