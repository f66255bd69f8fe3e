"""All sessions of a server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from toolroll.errors import validate
from toolroll.images import read_image
from toolroll.integrations.mcp.session import ToolSession
from toolroll.records.writer import RecordWriter
from toolroll.rollout.limits import Limits
from toolroll.rollout.tool_execution import ToolExecutor
from toolroll.tools.base_tool import BaseTool

logger = logging.getLogger(__name__)

TURN_MARGIN_S = 60.0
"""Time by which the timeout of a turn exceeds that of its call, so that a call always ends at its own timeout."""


class ToolSessions:
    """Opens and ends sessions. Use it as an async context manager, which ends all sessions.

    Args:
        tools: Tools that clients may call.
        create_kwargs: Arguments of `BaseTool.create`, by tool name.
        call_timeout_s: Timeout for one call.
        records: Writes a record of each session that made calls, or None.

    Raises:
        ConfigError: If the timeout is invalid.
    """

    def __init__(
        self,
        tools: Sequence[BaseTool[Any]],
        *,
        create_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        call_timeout_s: float = 120.0,
        records: RecordWriter | None = None,
    ) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self._create_kwargs = create_kwargs or {}
        later = call_timeout_s + TURN_MARGIN_S
        timeouts = {"call_timeout": call_timeout_s, "turn_timeout": later, "trajectory_timeout": later}
        self._limits = validate(Limits, timeouts, "tools serve")
        self._records = records
        self._executor = ToolExecutor(self.tools, lambda text, _: text, read_image)
        self._open: set[ToolSession] = set()
        self._ending: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ToolSessions:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def open(self, client: str | None = None) -> ToolSession:
        """Open a session. Nothing is created before its first call.

        Args:
            client: Name and version of the client, for the record.
        """
        session = ToolSession(
            self.tools,
            self._executor,
            self._limits,
            self._create_kwargs,
            client,
            is_recorded=self._records is not None,
        )
        self._open.add(session)
        return session

    def end(self, session: ToolSession) -> None:
        """End a session in the background, unless it has ended. Does not wait, so a cancelled caller can call it."""
        if session in self._open:
            self._open.discard(session)
            self._ending.add(task := asyncio.create_task(self._end(session)))
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End all sessions and wait until their instances are released and their records are written."""
        while self._open or self._ending:
            for session in list(self._open):
                self.end(session)
            await asyncio.wait(self._ending)

    async def _end(self, session: ToolSession) -> None:
        try:
            trajectory = await session.end()
            if self._records is not None and trajectory is not None:
                await self._records.write(trajectory, 0)
        except Exception:  # for example a full disk, which must not affect other sessions
            logger.exception("A session could not be ended or recorded.")
