"""Results of programs and notebooks, parsed from the responses of a sandbox.

A response that reports a failure of the sandbox itself has no result: the parsers raise `AttemptFailed`.
"""

from __future__ import annotations

from base64 import b64decode
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from toolroll._internal.text import shorten_middle
from toolroll.errors import Fault
from toolroll.http import AttemptFailed, HttpRequest
from toolroll.sandbox import protocol
from toolroll.sandbox.protocol import CommandRunResult, CommandStatus, RunStatus

MAX_FAILURE_CHARS = 400
MAX_FAILURE_HEAD_CHARS = 100


class ExecutionOutcome(StrEnum):
    """Outcome of a program."""

    OK = "ok"
    FAILED = "failed"
    """Non-zero return code or signal."""
    COMPILE_FAILED = "compile_failed"
    TIMEOUT = "timeout"
    COMPILE_TIMEOUT = "compile_timeout"
    OUT_OF_MEMORY = "out_of_memory"


@dataclass(frozen=True, kw_only=True)
class _ExecutionResult:
    outcome: ExecutionOutcome
    files: dict[str, bytes]
    """Requested files that existed after the run, by path."""
    queue_time: float | None
    """Time that the request waited in the server's queue, in seconds. None if the server does not report it."""
    endpoint: str
    """URL of the server that ran the program."""
    attempts: int
    """Number of attempts, including the successful one."""

    @property
    def fault(self) -> Fault | None:
        """None after a success, otherwise `Fault.POLICY`. Infra faults are raised as exceptions."""
        return None if self.outcome is ExecutionOutcome.OK else Fault.POLICY


@dataclass(frozen=True, kw_only=True)
class Execution(_ExecutionResult):
    """Result of a program. The output is that of the compiler if the program did not start."""

    stdout: str
    stderr: str
    stdout_truncated: bool
    stderr_truncated: bool
    return_code: int | None
    """Return code. None after a timeout, -9 if signal 9 ended the program."""
    execution_time: float
    """Run time in seconds. 0 if the server does not report it."""
    compile_result: CommandRunResult | None
    run_result: CommandRunResult | None
    session_is_new: bool | None
    """True if this call started the session. None without a session, or if the server does not support sessions."""
    session_died: bool | None
    """True if a program ended the previous session of this name."""
    session_is_over: bool | None
    """True if this program ended the session."""


@dataclass(frozen=True, kw_only=True)
class Notebook(_ExecutionResult):
    """Result of a notebook. The outcome is FAILED if a cell raised an exception."""

    cells: list[protocol.CellRunResult]
    driver: CommandRunResult | None


def read_execution(body: bytes, request: HttpRequest[Any]) -> Execution:
    """Parse the response of `/run_code`."""
    response = protocol.read(protocol.RunCodeResponse, body)
    common = _common_fields(response, request, response.compile_result, response.run_result)
    compiler = response.compile_result, ExecutionOutcome.COMPILE_TIMEOUT, ExecutionOutcome.COMPILE_FAILED
    program = response.run_result, ExecutionOutcome.TIMEOUT, ExecutionOutcome.FAILED
    last = response.run_result or response.compile_result or CommandRunResult(status=CommandStatus.FINISHED)
    return Execution(
        outcome=_outcome(response.status, compiler, program),
        stdout=last.stdout or "",
        stderr=last.stderr or "",
        stdout_truncated=last.stdout_truncated,
        stderr_truncated=last.stderr_truncated,
        return_code=last.return_code,
        execution_time=last.execution_time or 0.0,
        compile_result=response.compile_result,
        run_result=response.run_result,
        session_is_new=response.session_is_new,
        session_died=response.session_died,
        session_is_over=response.session_is_over,
        **common,
    )


def read_notebook(body: bytes, request: HttpRequest[Any]) -> Notebook:
    """Parse the response of `/run_jupyter`."""
    response = protocol.read(protocol.RunJupyterResponse, body)
    common = _common_fields(response, request, response.driver)
    outcome = _outcome(response.status, (response.driver, ExecutionOutcome.TIMEOUT, ExecutionOutcome.FAILED))
    if outcome is ExecutionOutcome.OK and any(cell.error for cell in response.cells):
        outcome = ExecutionOutcome.FAILED
    return Notebook(outcome=outcome, cells=response.cells, driver=response.driver, **common)


def shorten_error(text: str) -> str:
    """Return at most `MAX_FAILURE_CHARS` characters from the start and the end of an error message."""
    return shorten_middle(text, MAX_FAILURE_CHARS, head_chars=MAX_FAILURE_HEAD_CHARS)


def _outcome(
    status: RunStatus, *commands: tuple[CommandRunResult | None, ExecutionOutcome, ExecutionOutcome]
) -> ExecutionOutcome:
    """Return the outcome of the first command that failed, or of the request if no command did.

    Args:
        status: Status of the request.
        *commands: Each command, its outcome after a timeout, and its outcome after another failure.
    """
    for command, timeout, failed in commands:
        if command and command.memory_exceeded:
            return ExecutionOutcome.OUT_OF_MEMORY
        if command and command.status is CommandStatus.TIME_LIMIT_EXCEEDED:
            return timeout
        if command and command.return_code:
            return failed
    return ExecutionOutcome.OK if status is RunStatus.SUCCESS else ExecutionOutcome.FAILED


def _common_fields(
    response: protocol.SandboxResponse, request: HttpRequest[Any], *commands: CommandRunResult | None
) -> dict[str, Any]:
    """Return the fields that all results have.

    Raises:
        AttemptFailed: If the sandbox failed.
    """
    errors = [command.stderr for command in commands if command and command.status is CommandStatus.ERROR]
    if errors or response.status is RunStatus.SANDBOX_ERROR:
        reason = response.message or (errors and errors[0]) or "no reason given"
        raise AttemptFailed(f"the sandbox failed: {shorten_error(reason)}", retryable=True, processed=True)
    return {
        "files": {name: b64decode(content, validate=True) for name, content in response.files.items()},
        "queue_time": response.queue_time,
        "endpoint": request.url,
        "attempts": request.history.attempts,
    }
