"""InterpreterSession: a Python interpreter whose variables last for a trajectory.

On a server with sessions, each trajectory uses one of them. If the server loses it, because it was restarted or evicted
the session, the earlier programs are run again in a new session. If a program ended the session, the session is not
rebuilt and the model is informed. On a server without sessions, such as SandboxFusion, every call runs all earlier
programs again, with their output discarded. This costs the run time of all earlier programs, and random or
time-dependent values differ from the first run.

Invariants: calls of one trajectory run one at a time, in the order in which they were made. No other trajectory has the
session's id.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import replace

from toolroll.errors import InfraFault, PolicyFault, SandboxUnavailable
from toolroll.sandbox.execution import ExecutionOutcome
from toolroll.sandbox.limited import LimitedSandbox, RunResult

logger = logging.getLogger(__name__)

MAX_SESSION_ATTEMPTS = 3
"""Number of consecutive times that a session may be lost before the call fails."""
MAX_REPLAY_CHARS = 1_000_000
"""Maximum total length of the programs of a replayed session."""
MAX_REPLAY_TIME_S = 300.0
"""Maximum run time of a program together with all replayed ones."""

_COMPLETED = (ExecutionOutcome.OK, ExecutionOutcome.FAILED)
"""Outcomes of programs that are run again. A program that was stopped would be stopped again."""

_REPLAY_PROGRAM = """
def _replay(earlier, code, marker, name="main.py"):
    import ast, linecache, os, sys, traceback, types
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    saved, devnull = (os.dup(1), os.dup(2)), os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1), os.dup2(devnull, 2)
    for source in earlier:
        try:
            exec(compile(source, name, "exec"), main.__dict__)
        except BaseException:
            pass
    sys.stdout.flush(), sys.stderr.flush()
    os.dup2(saved[0], 1), os.dup2(saved[1], 2)
    os.write(1, marker.encode())
    linecache.cache[name] = len(code), None, code.splitlines(True), name
    try:
        tree = ast.parse(code, name)
    except (SyntaxError, ValueError) as error:
        traceback.print_exception(type(error), error, None)
        sys.exit(1)
    last = tree.body[-1] if tree.body else None
    shown = []
    if isinstance(last, ast.Expr) and getattr(getattr(last.value, "func", None), "attr", "") != "write":
        line = code.encode().splitlines()[last.end_lineno - 1]
        if not line[last.end_col_offset:].lstrip().startswith(b";"):
            shown = [tree.body.pop()]
    try:
        exec(compile(tree, name, "exec"), main.__dict__)
        if shown:
            exec(compile(ast.Interactive(shown), name, "single"), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        traceback.print_exception(type(error), error, error.__traceback__.tb_next)
        sys.exit(1)
_replay({earlier!a}, {code!a}, {marker!r})
"""
"""Program that runs `code` after the earlier programs of its session. Supports Python 3.8 and newer."""


class SessionLost(Exception):
    """Raised when the server no longer has the session."""


class InterpreterSession:
    """The interpreter of one trajectory. Call `close()` at the end.

    Args:
        sandbox: Sandbox that runs the programs.
    """

    def __init__(self, sandbox: LimitedSandbox) -> None:
        self._sandbox = sandbox
        self._session_id = ""
        """Id of the session on the server, or "" if there is none."""
        self._programs: list[str] = []
        """Earlier programs that created the current state."""
        self._programs_time_s = 0.0
        """Total run time of the earlier programs."""
        self._lock = asyncio.Lock()

    async def run(self, code: str, *, run_timeout: float, deadline: float | None) -> RunResult:
        """Run a program with the state that the earlier programs left.

        Args:
            code: The program.
            run_timeout: Time limit of the program, in seconds.
            deadline: Time by which the result must be available, on the clock of `time.monotonic()`.

        Returns:
            The result. If its `session_is_over` is True, the state of the earlier programs is lost.

        Raises:
            PolicyFault: If the previous program ran until the deadline, or the replayed programs are too long.
            InfraFault: If the sandbox failed.
        """
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                await self._lock.acquire()
        except TimeoutError:
            raise PolicyFault("The program was not run: the previous program took all the time.") from None
        try:
            result = await self._run_in_session(code, run_timeout, deadline) if self._sandbox.keeps_sessions else None
            if result is None:
                result = await self._run_replayed(code, run_timeout, deadline)
            self._programs_time_s += result.execution.execution_time
            return result
        finally:
            self._lock.release()

    async def close(self) -> None:
        """End the session. If the server cannot be reached, the session expires by itself."""
        session_id, self._session_id = self._session_id, ""
        if not session_id or not self._sandbox.keeps_sessions:
            return
        try:
            await self._sandbox.end_session(session_id)
        except InfraFault as error:
            logger.info("Session %s could not be ended: %s", session_id, error)

    async def _run_in_session(self, code: str, run_timeout: float, deadline: float | None) -> RunResult | None:
        """Run a program in the session, rebuilding it if necessary. Return None if the server has no sessions."""
        for _ in range(MAX_SESSION_ATTEMPTS):
            try:
                if not self._session_id:
                    await self._rebuild_session(run_timeout, deadline)
                return await self._run_program(code, run_timeout, deadline)
            except SessionLost:
                logger.warning("Session %s was lost: rerunning %d programs", self._session_id, len(self._programs))
                await self.close()  # the server has created an empty session with this id
        remedy = "Increase the number of sessions that the server keeps (toolroll sandbox serve --sessions)."
        problem = f"a session was lost {MAX_SESSION_ATTEMPTS} times in a row"
        raise SandboxUnavailable(f"{self._sandbox.resource}: {problem}. {remedy}")

    async def _rebuild_session(self, run_timeout: float, deadline: float | None) -> None:
        """Start a session and run the earlier programs in it. On failure, no partly rebuilt session remains."""
        self._session_id = self._sandbox.new_session()
        try:
            for number, program in enumerate(self._programs):
                result = await self._send(program, run_timeout, deadline)
                if number and result.execution.session_is_new:
                    raise SessionLost
        except BaseException:
            await self.close()
            raise

    async def _run_program(self, code: str, run_timeout: float, deadline: float | None) -> RunResult | None:
        earlier = self._programs
        self._programs = [*earlier, code]  # even if this call is cancelled, the server runs the program
        result = await self._send(code, run_timeout, deadline)
        execution = result.execution
        if execution.session_is_new is None:
            logger.warning("%s has no sessions: each call reruns the earlier programs", self._sandbox.resource)
            self._sandbox.keeps_sessions, self._programs = False, earlier
            return None
        if execution.session_is_new and earlier:
            if not execution.session_died:
                self._programs = earlier
                raise SessionLost
            # A program ended the session after its call: this one started without the earlier state.
            self._programs = [code]
            return result._replace(execution=replace(execution, session_is_over=True))
        if execution.session_is_over:
            self._forget_programs()
        elif execution.outcome not in _COMPLETED:
            self._programs = earlier
        return result

    async def _send(self, code: str, run_timeout: float, deadline: float | None) -> RunResult:
        return await self._sandbox.run(code, run_timeout=run_timeout, session_id=self._session_id, deadline=deadline)

    async def _run_replayed(self, code: str, run_timeout: float, deadline: float | None) -> RunResult:
        """Run the earlier programs and then this one, on a server without sessions."""
        if sum(map(len, self._programs)) + len(code) > MAX_REPLAY_CHARS:
            raise PolicyFault(f"The program was not run: this session exceeds {MAX_REPLAY_CHARS} characters of code.")
        result, stdout = await self._replay(code, run_timeout, deadline)
        is_over = stdout is None and bool(self._programs) and result.execution.outcome is not ExecutionOutcome.TIMEOUT
        if is_over:  # an earlier program ends the interpreter
            self._forget_programs()
            result, stdout = await self._replay(code, run_timeout, deadline)
        time_s = max(0.0, result.execution.execution_time - self._programs_time_s)
        execution = replace(result.execution, stdout=stdout or "", execution_time=time_s, session_is_over=is_over)
        if execution.outcome in _COMPLETED:
            self._programs = [*self._programs, code]
        return result._replace(execution=execution, run_timeout=run_timeout)

    async def _replay(self, code: str, run_timeout: float, deadline: float | None) -> tuple[RunResult, str | None]:
        """Return the result, and the output of `code` or None if it was not reached."""
        marker = f"<{secrets.token_hex(16)}>"  # separates the output of `code` from that of the earlier programs
        program = _REPLAY_PROGRAM.format(earlier=self._programs, code=code, marker=marker)
        total_timeout_s = min(run_timeout + 2 * self._programs_time_s, max(run_timeout, MAX_REPLAY_TIME_S))
        result = await self._sandbox.run(program, run_timeout=total_timeout_s, deadline=deadline)
        before, found, after = result.execution.stdout.partition(marker)
        return result, before + after if found else None

    def _forget_programs(self) -> None:
        self._programs, self._programs_time_s = [], 0.0
