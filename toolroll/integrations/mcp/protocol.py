"""The MCP requests that the server answers, and the form of its answers.

| result of a call | answer |
|---|---|
| response of the tool | its images and then its text |
| policy fault | a result with `isError` and the text that the model reads |
| infra fault | a JSON-RPC error, so that the harness and not the model handles it |
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import mcp_types as types
from mcp import MCPError
from mcp.server import Server, ServerRequestContext

from toolroll._internal.text import replace_lone_surrogates
from toolroll.errors import Fault
from toolroll.integrations.mcp.session import ToolSession
from toolroll.integrations.mcp.sessions import ToolSessions
from toolroll.rollout.trajectory import CallRecord
from toolroll.tools.base_tool import BaseTool

SERVER_NAME = "toolroll"
INFRA_FAULT = "Infrastructure failure, not caused by the arguments of the call: "
"""Start of the message of an infra fault. Many harnesses show it to their model."""

Context = ServerRequestContext[Any, Any]
SessionOf = Callable[[Context], ToolSession]


def build_server(sessions: ToolSessions, session_of: SessionOf) -> Server[Any]:
    """Return an MCP server for the tools.

    Args:
        sessions: Sessions of the server.
        session_of: Function that returns the session to which a request belongs.
    """

    async def list_tools(_: Context, __: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[describe(tool) for tool in sessions.tools.values()])

    async def call_tool(context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        return to_result(await session_of(context).call(params.name, params.arguments))

    return Server(SERVER_NAME, version=version("toolroll"), on_list_tools=list_tools, on_call_tool=call_tool)


def describe(tool: BaseTool[Any]) -> types.Tool:
    """Return a tool as MCP describes it. Hidden parameters are not part of its schema."""
    function = tool.tool_schema.function
    return types.Tool(
        name=function.name, description=function.description, input_schema=function.parameters.model_dump()
    )


def to_result(record: CallRecord) -> types.CallToolResult:
    """Return the answer to a call.

    Raises:
        MCPError: If the call had an infra fault or was cancelled.
    """
    if record.error is not None and record.fault is not Fault.POLICY:
        prefix = INFRA_FAULT if record.fault is Fault.INFRA else ""
        text = replace_lone_surrogates(f"{prefix}{record.error}")  # which the protocol cannot encode
        raise MCPError(types.INTERNAL_ERROR, text, {"fault": record.fault})
    content: list[types.ContentBlock] = [
        types.ImageContent(data=base64.b64encode(image.data).decode("ascii"), mime_type=image.media_type)
        for image in record.images
    ]
    if record.answer:  # model APIs reject empty texts
        content.append(types.TextContent(text=record.answer))
    return types.CallToolResult(content=content, is_error=record.fault is Fault.POLICY)


def client_of(context: Context) -> str | None:
    """Return name and version of the client, if it named itself."""
    params = context.session.client_params
    return f"{params.client_info.name} {params.client_info.version}" if params else None
