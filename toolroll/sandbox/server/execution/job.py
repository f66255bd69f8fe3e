"""One program, from its spec to its result.

Invariants:

- A job always ends. After its timeout a program is interrupted, so that it can flush its output and print a traceback,
  and then killed together with its descendants.
- Only a running program times out. How late its end is noticed does not matter.
- The behaviour of the program is always a result: a return code, a signal, a timeout, out of memory. `JobFailed` is
  raised only for failures that the program cannot cause.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from toolroll.sandbox.protocol import CommandRunResult, CommandStatus, RunCodeResponse, RunStatus
from toolroll.sandbox.server.execution.output import OutputReader
from toolroll.sandbox.server.execution.process_times import ProcessTimes
from toolroll.sandbox.server.execution.time_limit import TimeLimit, TimeVerdict
from toolroll.sandbox.server.interpreter.zygote_handle import SandboxProcess, ZygoteHandle
from toolroll.sandbox.server.job_spec import JailPlan, JobSpec, is_supervised

FETCH_TIMEOUT_S = 30.0
"""Timeout for sending the fetched files of a program."""
KILL_DELAY_S = 0.25
"""Delay between the interrupt of a program and its kill."""
_REPORT_OVERHEAD_BYTES = 8 << 20
"""Maximum size of a supervisor's report, without the content of fetched files."""
_INVALID_FILE = "InvalidFile: "
STARVED = "the machine was too busy: the program did not have its time within {seconds:.1f} s"


class JobFailed(Exception):
    """Raised when the server, not the program, failed."""


class InvalidProgram(Exception):
    """Raised when a program cannot be started because of the content of the request."""


@dataclass(eq=False)
class Job:
    """One run of a program."""

    process: SandboxProcess
    plan: JailPlan
    stdin: bytes
    timeouts_s: Sequence[float]
    """Timeout of each command: the compiler, if there is one, and the program."""
    output_limit_bytes: int
    """Number of bytes to keep of stdout, and of stderr."""
    wall_timeout_s: float | None = None
    """Maximum elapsed time of all commands together."""
    _verdict: TimeVerdict = TimeVerdict.WITHIN_LIMIT
    _commands_ended: int = 0
    _timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.process.on_start = self._start_timer
        self._is_supervised = is_supervised(self.plan, self.process.spec)

    async def run(self, zygote: ZygoteHandle) -> RunCodeResponse:
        """Run the program in a child of a zygote. Cancellation kills the program.

        Returns:
            The result of the program.

        Raises:
            JobFailed: If the server failed.
            InvalidProgram: If the program cannot be started because of the content of the request.
        """
        readers: list[OutputReader] = []  # stdout and stderr of each command, then the supervisor's report
        try:
            for _ in range(2 * len(self.timeouts_s)):
                readers.append(OutputReader(self.output_limit_bytes))  # noqa: PERF401 (all are closed if one fails)
            report_limit = report_limit_bytes(self.process.spec)
            report = OutputReader(report_limit, self._on_report, watch=self._is_supervised)
            readers.append(report)
            *compiler, stdout, stderr = [reader.write_fd for reader in readers[:-1]]
            zygote.submit(self.process, self.stdin, [stdout, stderr, report.write_fd, *compiler])
            for reader in readers:
                reader.close_write_end()
            await asyncio.shield(self.process.exited)
            return self._result(readers[:-1], report)
        except OSError as error:
            self.process.failed(f"the output of the program could not be read: {error}")
            raise JobFailed(self.process.failure) from error
        finally:
            if self._timer:
                self._timer.cancel()
            self.process.kill()
            for reader in readers:
                reader.close()
            # A cancelled job ends when its program has ended: until then, the program occupies the machine.
            await self.process.wait()

    def _on_report(self, chunk: bytes) -> None:
        """Restart the timer whenever the supervisor reports the end of a command."""
        self._commands_ended += chunk.count(b"\n")
        if self._timer and self._verdict is TimeVerdict.WITHIN_LIMIT:
            self._timer.cancel()
            self._start_timer()

    def _start_timer(self) -> None:
        """Start the timer of the next command, or that of the fetched files."""
        loop = asyncio.get_running_loop()
        if self._commands_ended >= len(self.timeouts_s):
            self._timer = loop.call_later(FETCH_TIMEOUT_S, self.process.kill)
            return
        max_elapsed_s = None if self.wall_timeout_s is None else self.wall_timeout_s - self.process.elapsed_s
        limit = TimeLimit(self.timeouts_s[self._commands_ended], max_elapsed_s)
        times = ProcessTimes(self.process, is_supervised=self._is_supervised, is_new=True)
        self._timer = loop.call_later(limit.first_check_s, self._check_time, limit, times)

    def _check_time(self, limit: TimeLimit, times: ProcessTimes) -> None:
        loop = asyncio.get_running_loop()
        sample, is_running = times.sample()
        self._verdict = limit.check(sample)
        if self.process.has_ended() or (self._verdict is TimeVerdict.TIMEOUT and not is_running):
            # The event that reports the end is on its way, unless the zygote hangs.
            self._verdict = TimeVerdict.WITHIN_LIMIT
            self._timer = loop.call_later(FETCH_TIMEOUT_S, self.process.kill)
        elif self._verdict is TimeVerdict.WITHIN_LIMIT:
            self._timer = loop.call_later(limit.until_next_check(sample), self._check_time, limit, times)
        else:
            self.process.interrupt()
            self._timer = loop.call_later(KILL_DELAY_S, self.process.kill)

    def _result(self, outputs: list[OutputReader], report: OutputReader) -> RunCodeResponse:
        process = self.process
        if process.wait_status is None:
            raise JobFailed(process.failure)
        if self._verdict is TimeVerdict.STARVED:
            raise JobFailed(STARVED.format(seconds=process.run_time_s))
        messages = list(report_messages(report.close()))
        if error := next((message["error"] for message in messages if "error" in message), ""):
            raise_setup_error(error)
        ends = [message for message in messages if "status" in message]
        if not self._is_supervised:
            ends = [{"status": process.wait_status, "seconds": process.run_time_s, "cpu": process.cpu_time_s}]
        elif len(ends) < len(self.timeouts_s) and not any(end["status"] for end in ends):
            # The command was killed together with its supervisor.
            ends.append({"status": signal.SIGKILL, "seconds": process.run_time_s, "cpu": None})
        commands = [
            command_result(
                *outputs[2 * number : 2 * number + 2],
                status=CommandStatus.FINISHED,
                execution_time=end["seconds"],
                cpu_time=end["cpu"],
                return_code=os.waitstatus_to_exitcode(end["status"]),
            )
            for number, end in enumerate(ends)
        ]
        last, oom_killed = commands[-1], process.take_oom_kills() > 0
        last.memory_exceeded = oom_killed or ends_with_memory_error(last)
        if self._verdict is TimeVerdict.TIMEOUT:
            last.status, last.return_code = CommandStatus.TIME_LIMIT_EXCEEDED, None
        response = program_response(commands, has_compiler=len(self.timeouts_s) > 1)
        response.files, too_large = fetched_files(messages)
        response.message = " ".join(filter(None, [too_large, response.message]))
        return response


def command_result(stdout: OutputReader, stderr: OutputReader, **fields: Any) -> CommandRunResult:
    """Return the result of a command, with the output since the last call.

    Args:
        stdout: Reader of the command's stdout.
        stderr: Reader of the command's stderr.
        **fields: Other fields of the result.
    """
    for name, reader in (("stdout", stdout), ("stderr", stderr)):
        output, fields[f"{name}_truncated"] = reader.take()
        fields[name] = output.decode(errors="replace")
    return CommandRunResult(**fields)


def ends_with_memory_error(command: CommandRunResult) -> bool:
    """Return True if a command has failed and its last line is a MemoryError of Python."""
    return command.return_code != 0 and "MemoryError" in (command.stderr or "").rstrip().rpartition("\n")[2]


def program_response(commands: Sequence[CommandRunResult], *, has_compiler: bool = False) -> RunCodeResponse:
    """Return the response for a program. Its message repeats the flags of the commands, for people.

    Args:
        commands: Result of each command that ran: the compiler, the program.
        has_compiler: Whether the first command is the compiler.
    """
    notes = []
    for command in commands:
        for name, truncated in (("stdout", command.stdout_truncated), ("stderr", command.stderr_truncated)):
            notes += [f"{name} was truncated."] if truncated else []
        notes += ["The memory limit was exceeded."] if command.memory_exceeded else []
    failed = any(command.status is not CommandStatus.FINISHED or command.return_code != 0 for command in commands)
    return RunCodeResponse(
        status=RunStatus.FAILED if failed else RunStatus.SUCCESS,
        message=" ".join(notes),
        compile_result=commands[0] if has_compiler else None,
        run_result=next(iter(commands[int(has_compiler) :]), None),
    )


def raise_setup_error(error: str) -> NoReturn:
    """Raise the exception for an error that occurred in the child before the program started."""
    if error.startswith(_INVALID_FILE):
        raise InvalidProgram(error.removeprefix(_INVALID_FILE))
    raise JobFailed(f"the jail could not be set up: {error}")


def report_limit_bytes(spec: JobSpec) -> int:
    """Return the maximum size of a supervisor's report."""
    return spec["fetch_limit"] + _REPORT_OVERHEAD_BYTES


def report_messages(report: bytes) -> Iterator[dict[str, Any]]:
    """Yield the messages of a supervisor's report. The bytes that follow a message are its `content`.

    The last message may be incomplete, if the supervisor was killed while it sent it.
    """
    at = 0
    while (end := report.find(b"\n", at)) >= 0:
        message = json.loads(report[at:end])
        size = message.get("bytes", 0)
        message["content"] = report[end + 1 : end + 1 + size]
        yield message
        at = end + 1 + size


def fetched_files(messages: Iterable[dict[str, Any]]) -> tuple[dict[str, str], str]:
    """Return the files of a report in base64, and a note about files that are too large to send."""
    files, chunks, notes = {}, [], []
    for message in messages:
        if "too_large" in message:
            notes.append(f"The file {message['too_large']!r} is too large to be fetched.")
        elif "file" in message and message["bytes"]:
            chunks.append(message["content"])
        elif "file" in message:
            files[message["file"]] = base64.b64encode(b"".join(chunks)).decode()
            chunks = []
    return files, " ".join(notes)
