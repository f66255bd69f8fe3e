"""Interpreter: Python that remembers, from one call of a trajectory to the next.

On a server that keeps sessions it is one. A session that is lost through no doing of its programs (the server was
started anew, or needed the room) is rebuilt: they are run again, in a new one. One that a program ended is gone, and
the model is told so. A server that keeps none, such as SandboxFusion, runs the earlier programs again at every call
(replay.py). One call at a time, in the order in which they came; nobody else has the session's name.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace

from toolroll.errors import InfraFault, PolicyFault, SandboxUnavailable
from toolroll.runner import CodeRunner, Ran
from toolroll.sandbox.execution import Outcome
from toolroll.tools.replay import Replay

logger = logging.getLogger(__name__)

REBUILDS = 3
"""How often in a row a session may be lost before that is the infrastructure's fault."""
MOST_REPLAYED = 1_000_000
"""Characters of programs that are sent again at every call to a server without sessions."""
LONGEST = 300.0
"""Seconds that a program with all those before it may take there."""


@dataclass
class Server:
    """What has turned out about the server, for all interpreters there."""

    keeps_sessions: bool = True


class Lost(Exception):
    """The session isn't there any more."""


class Interpreter:
    """One trajectory's. Ends with `end`."""

    def __init__(self, runner: CodeRunner, server: Server) -> None:
        self._runner = runner
        self._server = server
        self._session = ""
        """Its name at the server; empty where there is none."""
        self._earlier: list[str] = []
        """The programs that made what there is."""
        self._seconds = 0.0
        """How long these took, together."""
        self._turn = asyncio.Lock()

    async def run(self, code: str, *, run_timeout: float, deadline: float | None) -> Ran:
        """Run a program after those before it. `session_is_over` in what it did: what they had defined is gone."""
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                await self._turn.acquire()
        except TimeoutError:
            raise PolicyFault("It was not run: the program before it took all the time.") from None
        try:
            ran = await self._run_in_session(code, run_timeout, deadline) if self._server.keeps_sessions else None
            if ran is None:
                ran = await self._run_again(code, run_timeout, deadline)
            self._seconds += ran.execution.execution_time
            return ran
        finally:
            self._turn.release()

    async def end(self) -> None:
        """End it. Where the server can't be reached, it ends the session by itself after a while."""
        session, self._session = self._session, ""
        if not session or not self._server.keeps_sessions:
            return
        try:
            await self._runner.end_session(session)
        except InfraFault as error:
            logger.info("session %s could not be ended: %s", session, error)

    async def _run_in_session(self, code: str, run_timeout: float, deadline: float | None) -> Ran | None:
        """Run it in the session. None: the server keeps none."""
        for _ in range(REBUILDS):
            try:
                if not self._session:
                    await self._rebuild(run_timeout, deadline)
                return await self._cell(code, run_timeout, deadline)
            except Lost:
                logger.warning("session %s was lost: running %d programs again", self._session, len(self._earlier))
                await self.end()  # what was found empty
        raise SandboxUnavailable(
            f"{self._runner.resource}: a session was lost {REBUILDS} times in a row. Does the server keep enough of "
            "them? (toolroll sandbox serve --sessions)"
        )

    async def _rebuild(self, run_timeout: float, deadline: float | None) -> None:
        """A new session, with what the earlier programs made. One that is cut short leaves nothing half made."""
        self._session = self._runner.new_session()
        try:
            for number, program in enumerate(self._earlier):
                ran = await self._ask(program, run_timeout, deadline)
                if number and ran.execution.session_is_new:
                    raise Lost
        except BaseException:
            await self.end()
            raise

    async def _cell(self, code: str, run_timeout: float, deadline: float | None) -> Ran | None:
        before = self._earlier
        self._earlier = [*before, code]  # it is run, whether or not its answer is waited for
        ran = await self._ask(code, run_timeout, deadline)
        execution = ran.execution
        if execution.session_is_new is None:
            logger.warning("%s keeps no sessions: each call runs the earlier programs again", self._runner.resource)
            self._server.keeps_sessions, self._earlier = False, before
            return None
        if execution.session_is_new and before:
            self._earlier = before
            if not execution.session_died:
                raise Lost
            # By their own doing: it has begun with nothing, and the model must know.
            self._earlier = [code]
            return ran._replace(execution=replace(execution, session_is_over=True))
        if execution.session_is_over:
            self._earlier, self._seconds = [], 0.0
        elif execution.outcome not in (Outcome.OK, Outcome.FAILED):  # one that was stopped would be stopped again
            self._earlier = before
        return ran

    async def _ask(self, code: str, run_timeout: float, deadline: float | None) -> Ran:
        return await self._runner.run(code, run_timeout=run_timeout, session_id=self._session, deadline=deadline)

    async def _run_again(self, code: str, run_timeout: float, deadline: float | None) -> Ran:
        """Run the earlier programs and then this one, where nothing is kept."""
        if sum(map(len, self._earlier)) + len(code) > MOST_REPLAYED:
            raise PolicyFault(f"It was not run: all programs together have more than {MOST_REPLAYED} characters.")
        ran, said = await self._replay(code, run_timeout, deadline)
        is_over = said is None and bool(self._earlier) and ran.execution.outcome is not Outcome.TIMEOUT
        if is_over:  # one of them ends the interpreter
            self._earlier, self._seconds = [], 0.0
            ran, said = await self._replay(code, run_timeout, deadline)
        own = max(0.0, ran.execution.execution_time - self._seconds)
        execution = replace(ran.execution, stdout=said or "", execution_time=own, session_is_over=is_over)
        if execution.outcome in (Outcome.OK, Outcome.FAILED):
            self._earlier = [*self._earlier, code]
        return Ran(execution, ran.waited, run_timeout)

    async def _replay(self, code: str, run_timeout: float, deadline: float | None) -> tuple[Ran, str | None]:
        """What came of it all, and what the last program wrote; None where it was never reached."""
        replay = Replay(self._earlier, code)
        seconds = min(run_timeout + 2 * self._seconds, max(run_timeout, LONGEST))
        ran = await self._runner.run(replay.program, run_timeout=seconds, deadline=deadline)
        return ran, replay.said(ran.execution.stdout)
