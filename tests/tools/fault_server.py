"""An MCP server whose tools fail in every way.

    python fault_server.py

Environment: START_DELAY is the time before it starts, in seconds. DESCRIPTION is a file with the description of `echo`,
which is read at each start and by `reload`. GARBAGE is written to stdout before the server starts.
"""

import asyncio
import base64
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mcp import MCPError
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import INVALID_PARAMS, ImageContent, TextContent

WIRE = os.dup(1)
"""The real stdout, which the SDK replaces."""
DESCRIPTION = os.environ.get("DESCRIPTION")
server = MCPServer("faults")


def description() -> str:
    return Path(DESCRIPTION).read_text() if DESCRIPTION else "Return a text."


async def echo(text: str) -> str:
    return text


server.tool(description=description())(echo)


@server.tool()
async def pid() -> str:
    """Return the process id."""
    return str(os.getpid())


@server.tool()
async def remember(key: str, value: str = "") -> str:
    """Return the earlier value of a key and set another."""
    earlier = os.environ.get(f"STATE_{key}", "")
    os.environ[f"STATE_{key}"] = value
    return earlier


@server.tool()
async def trace(context: Context[Any, Any]) -> str:
    """Return the trace context of the call."""
    return str((context.request_context.meta or {}).get("traceparent"))


@server.tool()
async def picture() -> list[TextContent | ImageContent]:
    """Return a text and a picture of one pixel."""
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4z8DwHwAFAAH/iZk9HQAAAABJRU5ErkJggg=="
    base64.b64decode(pixel, validate=True)
    return [TextContent(type="text", text="a pixel"), ImageContent(type="image", data=pixel, mime_type="image/png")]


@server.tool()
async def damaged_picture() -> ImageContent:
    """Return the start of a picture."""
    return ImageContent(type="image", data=base64.b64encode(b"\x89PNG\r\n").decode(), mime_type="image/png")


@server.tool()
async def fail(reason: str) -> str:
    """Fail."""
    raise ToolError(reason)


@server.tool()
async def reject(reason: str) -> str:
    """Reject the arguments."""
    raise MCPError(INVALID_PARAMS, reason)


@server.tool()
async def probe(code: str) -> str:
    """Return the value of an expression, or the error."""
    try:
        return str(eval(code))
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


@server.tool()
async def hang() -> str:
    """Never answer."""
    await asyncio.sleep(1000)
    return ""


@server.tool()
async def freeze() -> str:
    """Never answer anything again."""
    time.sleep(1000)
    return ""


@server.tool()
async def crash(status: int = 3) -> str:
    """End the process."""
    print("the server crashed", file=sys.stderr, flush=True)
    os._exit(status)


@server.tool()
async def write(text: str, times: int = 1) -> str:
    """Write a text to stdout many times."""

    def write_all() -> None:
        for _ in range(times):
            os.write(WIRE, text.encode())

    await asyncio.to_thread(write_all)
    return "written"


@server.tool()
async def respond(result: str, context: Context[Any, Any]) -> str:
    """Respond with a text, in Latin-1, as the result."""
    response = f'{{"jsonrpc": "2.0", "id": {json.dumps(context.request_context.request_id)}, "result": {result}}}\n'
    os.write(WIRE, response.encode("latin-1"))
    return ""


@server.tool()
async def respond_long(form: str, context: Context[Any, Any]) -> str:
    """Write a message of more than 16 MiB, in a form of which only the notification is not the response."""
    request_id, text = json.dumps(context.request_context.request_id), "x" * (17 << 20)
    message = {
        "id first": f'{{"jsonrpc":"2.0","id":{request_id},"result":{{"text":"{text}"}}}}\n',
        "id last": f'{{"result":{{"text":"{text}"}},"jsonrpc":"2.0","id":{request_id}}}\n',
        "notification": f'{{"jsonrpc":"2.0","method":"notifications/message","params":{{"data":"{text}"}}}}\n',
    }[form]
    await asyncio.to_thread(os.write, WIRE, message.encode())
    return "written"


@server.tool()
async def spawn() -> str:
    """Start a process that leaves the session of the server, and return its id."""
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return str(child.pid)


@server.tool()
async def spawn_many(count: int) -> str:
    """Start processes that wait, and return the number that the system has allowed."""
    started = 0
    with suppress(BlockingIOError):
        while started < count:
            os.posix_spawn("/bin/sleep", ["sleep", "1000"], {})
            started += 1
    return str(started)


@server.tool()
async def reload(context: Context[Any, Any]) -> str:
    """Read the description of `echo` again and announce it."""
    server.remove_tool("echo")
    server.tool(description=description())(echo)
    await context.notify_tools_changed()
    return "reloaded"


if __name__ == "__main__":
    time.sleep(float(os.environ.get("START_DELAY", "0")))
    os.write(WIRE, os.environ.get("GARBAGE", "").encode())
    server.run("stdio")
