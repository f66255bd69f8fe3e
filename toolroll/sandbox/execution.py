"""Execution and Notebook: what a program did, read from either server's answer.

What the service did is no result: reading an answer that says so raises Failure.
"""

from __future__ import annotations

from base64 import b64decode
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from toolroll.errors import Fault
from toolroll.sandbox import protocol
from toolroll.sandbox.call import Call, Failure, short
from toolroll.sandbox.protocol import CommandRunResult, CommandStatus, RunStatus


class Outcome(StrEnum):
    """How a program came out. FAILED: by a return code that isn't 0, or a signal."""

    OK = "ok"
    FAILED = "failed"
    COMPILE_FAILED = "compile_failed"
    TIMEOUT = "timeout"
    COMPILE_TIMEOUT = "compile_timeout"
    OUT_OF_MEMORY = "out_of_memory"


@dataclass(frozen=True, kw_only=True)
class _Result:
    outcome: Outcome
    files: dict[str, bytes]
    """Those of `fetch_files` that were there after the run."""
    queue_time: float | None
    """Seconds that the request waited in the server; None where it doesn't say."""
    endpoint: str
    attempts: int

    @property
    def fault(self) -> Fault | None:
        """None if all went well, else the policy's: the infrastructure's faults are raised."""
        return None if self.outcome is Outcome.OK else Fault.POLICY


@dataclass(frozen=True, kw_only=True)
class Execution(_Result):
    """What a program did. `stdout` and so on are the program's or, where it wasn't reached, the compiler's."""

    stdout: str
    stderr: str
    stdout_truncated: bool
    stderr_truncated: bool
    return_code: int | None
    """None if it ran out of time; −9 if signal 9 ended it."""
    execution_time: float
    """Seconds; 0 where the server doesn't say."""
    compile_result: CommandRunResult | None
    run_result: CommandRunResult | None
    session_is_new: bool | None
    """Whether the session began with this call; None where none was named, or the server has no sessions."""
    session_died: bool | None
    """Whether the one before it had ended by its programs' own doing."""
    session_is_over: bool | None
    """Whether the program ended it."""


@dataclass(frozen=True, kw_only=True)
class Notebook(_Result):
    """What the cells did. The outcome is FAILED if one of them raised."""

    cells: list[protocol.CellRunResult]
    driver: CommandRunResult | None


def read_execution(body: bytes, call: Call) -> Execution:
    """The answer of `/run_code`."""
    answer = protocol.read(protocol.RunCodeResponse, body)
    common = _common(answer, call, answer.compile_result, answer.run_result)
    last = answer.run_result or answer.compile_result or CommandRunResult(status=CommandStatus.FINISHED)
    return Execution(
        outcome=_outcome(answer),
        stdout=last.stdout or "",
        stderr=last.stderr or "",
        stdout_truncated=last.stdout_truncated,
        stderr_truncated=last.stderr_truncated,
        return_code=last.return_code,
        execution_time=last.execution_time or 0.0,
        compile_result=answer.compile_result,
        run_result=answer.run_result,
        session_is_new=answer.session_is_new,
        session_died=answer.session_died,
        session_is_over=answer.session_is_over,
        **common,
    )


def _outcome(answer: protocol.RunCodeResponse) -> Outcome:
    """What the commands say comes first. The status decides where they say nothing, as where none was run."""
    compiling = answer.compile_result, Outcome.COMPILE_TIMEOUT, Outcome.COMPILE_FAILED
    running = answer.run_result, Outcome.TIMEOUT, Outcome.FAILED
    for command, timeout, failed in (compiling, running):
        if command is not None and command.memory_exceeded:
            return Outcome.OUT_OF_MEMORY
        if command is not None and command.status is CommandStatus.TIME_LIMIT_EXCEEDED:
            return timeout
        if command is not None and command.return_code:
            return failed
    return Outcome.OK if answer.status is RunStatus.SUCCESS else Outcome.FAILED


def read_notebook(body: bytes, call: Call) -> Notebook:
    """The answer of `/run_jupyter`."""
    answer = protocol.read(protocol.RunJupyterResponse, body)
    common = _common(answer, call, answer.driver)
    outcome = Outcome.OK if answer.status is RunStatus.SUCCESS else Outcome.FAILED
    if any(cell.error for cell in answer.cells):
        outcome = Outcome.FAILED
    if answer.driver is not None and answer.driver.status is CommandStatus.TIME_LIMIT_EXCEEDED:
        outcome = Outcome.TIMEOUT
    if answer.driver is not None and answer.driver.memory_exceeded:
        outcome = Outcome.OUT_OF_MEMORY
    return Notebook(outcome=outcome, cells=answer.cells, driver=answer.driver, **common)


def _common(
    answer: protocol.RunCodeResponse | protocol.RunJupyterResponse, call: Call, *commands: CommandRunResult | None
) -> dict[str, Any]:
    """What every result has. Raises where it is the service that failed."""
    broken = [command.stderr for command in commands if command and command.status is CommandStatus.ERROR]
    if broken or answer.status is RunStatus.SANDBOX_ERROR:
        said = answer.message or (broken and broken[0]) or "it doesn't say why"
        raise Failure(f"the sandbox failed: {short(said)}", again=True, begun=True)
    files = {name: b64decode(content, validate=True) for name, content in answer.files.items()}
    where = {"endpoint": call.endpoint.url, "attempts": call.tried.total()}
    return {"files": files, "queue_time": answer.queue_time, **where}
