"""A tool whose calls are counted by a server that shares no code with the limiter (limiter/counting_server.py)."""

import asyncio
import time
from typing import Any

import aiohttp

from toolroll import BaseTool, InfraFault, ToolResponse, ToolResult
from toolroll.limiter.limiter import get_limiter

HOLD = 2.0


class CountedTool(BaseTool[None]):
    """Does nothing, at the server, within the limit."""

    default_schema = {  # noqa: RUF012
        "type": "function",
        "function": {"name": "nothing", "description": "Do nothing.", "parameters": {"type": "object"}},
    }

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        """One request, which takes `ms` there."""
        limiter = get_limiter("counted", int(self.config["limit"]))
        async with limiter.slot(deadline=time.monotonic() + 60, hold=HOLD):
            until = time.time() + HOLD / 2
            url = f"{self.config['server']}/work?ms={self.config['ms']}&by=run&until={until}"
            try:
                async with asyncio.timeout(HOLD), aiohttp.ClientSession() as session, session.get(url) as answer:
                    if answer.status != 200:
                        raise InfraFault(f"the server said {answer.status}")
            except (aiohttp.ClientError, OSError) as error:
                raise InfraFault(f"the server can't be reached: {error}") from error
        return ToolResult(ToolResponse(text="done"), None, {})
