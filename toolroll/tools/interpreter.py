"""Interpreter: Python that remembers, from one call of a trajectory to the next.

On a server that keeps sessions it is one. A session that is lost through no doing of its programs (the server was
started anew, or needed the room) is rebuilt: they are run again, in a new one. A server that keeps none, such as
SandboxFusion, runs the earlier programs again at every call (replay.py). One call at a time, in the order in which they
came; nobody else has the session's name.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from uuid import uuid4

from toolroll.errors import InfraFault, SandboxUnavailable
from toolroll.runner import CodeRunner, Ran
from toolroll.sandbox.execution import Outcome
from toolroll.tools.replay import replaying

logger = logging.getLogger(__name__)


@dataclass
class Server:
    """What has turned out about the server, for all interpreters there."""

    keeps_sessions: bool = True


class Interpreter:
    """One trajectory's. Ends with `end`."""

    def __init__(self, runner: CodeRunner, server: Server) -> None:
        self._runner = runner
        self._server = server
        self._session = uuid4().hex
        self._earlier: list[str] = []
        """The programs that made what there is."""
        self._seconds = 0.0
        """How long these took, together."""
        self._turn = asyncio.Lock()

    async def run(self, code: str, *, run_timeout: float, deadline: float | None) -> Ran:
        """Run a program after those before it. `session_is_over` in what it did: what they had defined is gone."""
        async with self._turn:
            if self._server.keeps_sessions:
                ran = await self._run_in_session(code, run_timeout, deadline)
            if not self._server.keeps_sessions:
                ran = await self._run_again(code, run_timeout, deadline)
            execution = ran.execution
            if execution.session_is_over:
                self._earlier, self._seconds = [], 0.0
            elif execution.outcome in (Outcome.OK, Outcome.FAILED):  # one that was stopped would be stopped again
                self._earlier.append(code)
                self._seconds += execution.execution_time
            return ran

    async def end(self) -> None:
        """End it. Where the server can't be reached, it ends the session by itself after a while."""
        if not self._server.keeps_sessions:
            return
        try:
            await self._runner.end_session(self._session)
        except InfraFault as error:
            logger.info("session %s could not be ended: %s", self._session, error)

    async def _run_in_session(self, code: str, run_timeout: float, deadline: float | None) -> Ran:
        ran = await self._runner.run(code, run_timeout=run_timeout, session_id=self._session, deadline=deadline)
        if ran.execution.session_is_new is None:
            logger.warning("%s keeps no sessions: each call runs the earlier programs again", self._runner.resource)
            self._server.keeps_sessions = False
        elif ran.execution.session_is_new and self._earlier:
            logger.warning("session %s was lost: running %d programs again", self._session, len(self._earlier))
            await self.end()  # what it found empty
            self._session = uuid4().hex
            for program in [*self._earlier, code]:
                ran = await self._runner.run(
                    program, run_timeout=run_timeout, session_id=self._session, deadline=deadline
                )
            if ran.execution.session_is_new:
                raise SandboxUnavailable(f"{self._runner.resource}: the session was lost again while it was rebuilt.")
        return ran

    async def _run_again(self, code: str, run_timeout: float, deadline: float | None) -> Ran:
        seconds = run_timeout + 2 * self._seconds
        ran = await self._runner.run(replaying(self._earlier, code), run_timeout=seconds, deadline=deadline)
        own = max(0.0, ran.execution.execution_time - self._seconds)
        return ran._replace(execution=replace(ran.execution, execution_time=own))
