"""Serve the tools of a config file as an MCP server, so that any harness can call them.

    toolroll tools serve tools.yaml --mcp

Each client has a session with its own instance of every tool. `session.py` and `sessions.py` know nothing about the
protocol; `protocol.py` answers its requests, and `stdio.py` and `http.py` decide to which session a request belongs.
"""

from toolroll.errors import MissingExtra

try:
    import mcp_types  # noqa: F401  (a dependency of the SDK from version 2)
except ImportError as error:
    raise MissingExtra("mcp", "mcp") from error
