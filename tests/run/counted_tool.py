"""A tool whose calls are counted by a server that is independent of the limiter (limiter/counting_server.py)."""

import asyncio
import time
from typing import Any

import aiohttp

from toolroll import BaseTool, InfraFault, ToolResponse, ToolResult
from toolroll.limiter.registry import get_limiter

SLOT_HOLD_S = 2.0


class CountedTool(BaseTool[None]):
    """Sends a request to the counting server within the limit."""

    default_schema = {  # noqa: RUF012
        "type": "function",
        "function": {"name": "nothing", "description": "Do nothing.", "parameters": {"type": "object"}},
    }

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        """Send a request that takes `ms` milliseconds."""
        limiter = get_limiter("counted", int(self.config["limit"]))
        async with limiter.slot(deadline=time.monotonic() + 60, hold=SLOT_HOLD_S):
            until = time.time() + SLOT_HOLD_S / 2
            url = f"{self.config['server']}/work?ms={self.config['ms']}&by=run&until={until}"
            try:
                async with asyncio.timeout(SLOT_HOLD_S), aiohttp.ClientSession() as session, session.get(url) as answer:
                    if answer.status != 200:
                        raise InfraFault(f"The server answered with status {answer.status}.")
            except (aiohttp.ClientError, OSError) as error:
                raise InfraFault(f"The server is unreachable: {error}") from error
        return ToolResult(ToolResponse(text="done"), None, {})
