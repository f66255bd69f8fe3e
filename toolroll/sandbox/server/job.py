"""One program, from its spec to what it did.

A job always comes to an end: a program that is over its time is first interrupted, so that it can write what it has not
yet written and say where it was, and then killed with all that it has started. Whatever the program does is its own
result (a return code, a signal, out of time, out of memory); `JobFailed` is raised for what is not its doing.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import marshal
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolroll.sandbox.protocol import CommandRunResult, CommandStatus
from toolroll.sandbox.server.cgroup import Cgroup
from toolroll.sandbox.server.interpreter import Interpreter
from toolroll.sandbox.server.output import Output
from toolroll.sandbox.server.process import Process, file_of
from toolroll.sandbox.server.spec import SPEC_FORMAT, Plan, Spec, is_supervised

FETCHED_WITHIN = 30.0
"""Seconds for a program's files to be sent."""
GRACE = 0.25
"""Seconds between the interrupt and the end."""
_REPORT_MARGIN = 8 << 20


class JobFailed(Exception):
    """The server failed, not the program."""


class BadRequest(Exception):
    """The program was never begun, because of what the request asks for."""


@dataclass
class Finished:
    """What a program did."""

    commands: list[CommandRunResult]
    """One for each command that ran: the compiler, the program."""
    files: dict[str, str] = field(default_factory=dict)
    too_large: list[str] = field(default_factory=list)
    """Files that were asked for, and are too large to send."""


class Job:
    """One program that is run."""

    def __init__(
        self, plan: Plan, spec: Spec, stdin: bytes, timeouts: Sequence[float], output: int, cgroup: Cgroup | None
    ) -> None:
        self.spec = spec
        self.timeouts = timeouts
        self.cgroup = cgroup
        self.process = Process(begun=self._begun)
        self._supervised = is_supervised(plan, spec)
        self._stdin = stdin
        self._output = output
        self._timed_out = False
        self._commands_ended = 0
        self._timer: asyncio.TimerHandle | None = None
        self._memory_kills = cgroup.memory_kills() if cgroup else 0
        self._killed_for_memory = False
        # As soon as it is gone: a moment later the cgroup may be another's.
        self.process.gone.add_done_callback(lambda _: self._look_at_memory())

    async def run(self, interpreter: Interpreter) -> Finished:
        """Run it. Cancelling this ends the program."""
        streams: list[Output] = []
        try:
            for _ in range(2 * len(self.timeouts)):
                streams.append(Output(self._output))  # noqa: PERF401 (those made before one that fails are closed)
            report = Output(report_size(self.spec), self._heard, watched=self._supervised)
            streams.append(report)
            with self._descriptors(streams[:-1], report) as descriptors:
                interpreter.give(self.process, descriptors, self.cgroup.descriptors if self.cgroup else [])
            for stream in streams:
                stream.give_away()
            await asyncio.shield(self.process.gone)
            return self._result(streams[:-1], report)
        except OSError as error:
            self.process.failed(f"it could not be given to an interpreter: {error}")
            raise JobFailed(self.process.failure) from error
        finally:
            if self._timer:
                self._timer.cancel()
            self.process.kill()
            for stream in streams:
                stream.close()

    def _begun(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.timeouts[0], self._time_out)

    def _heard(self, piece: bytes) -> None:
        """The supervisor reports: after the compiler the program's own time begins, after the program ours."""
        self._commands_ended += piece.count(b"\n")
        if not self._timer or self._timed_out:
            return
        self._timer.cancel()
        loop = asyncio.get_running_loop()
        if self._commands_ended < len(self.timeouts):
            self._timer = loop.call_later(self.timeouts[self._commands_ended], self._time_out)
        else:
            self._timer = loop.call_later(FETCHED_WITHIN, self.process.kill)

    def _time_out(self) -> None:
        self._timed_out = True
        self.process.interrupt()
        self._timer = asyncio.get_running_loop().call_later(GRACE, self.process.kill)

    @contextlib.contextmanager
    def _descriptors(self, streams: list[Output], report: Output) -> Iterator[list[int]]:
        """What the program is given, in the order of `clone`: 0 to 2, the spec, the report, a compiler's 1 and 2."""
        stdin, spec = file_of(self._stdin), file_of(marshal.dumps(dict(self.spec), SPEC_FORMAT))
        writing = [stream.writing for stream in streams]
        try:
            yield [stdin, *writing[-2:], spec, report.writing, *writing[:-2]]
        finally:
            os.close(stdin)
            os.close(spec)

    def _result(self, streams: list[Output], report: Output) -> Finished:
        if self.process.status is None:
            raise JobFailed(self.process.failure)
        reports = list(report_lines(report.close()))
        if error := next((one["error"] for one in reports if "error" in one), ""):
            if error.startswith("BadFile: "):
                raise BadRequest(error.removeprefix("BadFile: "))
            raise JobFailed(f"the jail could not be made: {error}")
        statuses = [one for one in reports if "status" in one]
        if not self._supervised:
            statuses = [{"status": self.process.status, "seconds": self.process.seconds, "cpu": self.process.cpu}]
        elif len(statuses) < len(self.timeouts) and not any(one["status"] for one in statuses):
            # It was killed together with its supervisor.
            statuses.append({"status": signal.SIGKILL, "seconds": self.process.seconds, "cpu": None})
        return Finished(
            [self._command(one, streams[2 * i : 2 * i + 2], i + 1 == len(statuses)) for i, one in enumerate(statuses)],
            *fetched(reports),
        )

    def _command(self, report: dict[str, Any], streams: list[Output], last: bool) -> CommandRunResult:
        stdout, stderr = (stream.close().decode(errors="replace") for stream in streams)
        timed_out = last and self._timed_out
        return_code = os.waitstatus_to_exitcode(report["status"])
        return CommandRunResult(
            status=CommandStatus.TIME_LIMIT_EXCEEDED if timed_out else CommandStatus.FINISHED,
            execution_time=report["seconds"],
            return_code=None if timed_out else return_code,
            stdout=stdout,
            stderr=stderr,
            cpu_time=report["cpu"],
            stdout_truncated=streams[0].truncated,
            stderr_truncated=streams[1].truncated,
            memory_exceeded=last and (self._killed_for_memory or (return_code != 0 and ends_for_memory(stderr))),
        )

    def _look_at_memory(self) -> None:
        with contextlib.suppress(OSError):  # somebody has cleared it away
            self._killed_for_memory = self.cgroup is not None and self.cgroup.memory_kills() > self._memory_kills


def ends_for_memory(stderr: str) -> bool:
    """Whether a traceback says that there was no memory."""
    return "MemoryError" in stderr[stderr.rstrip().rfind("\n") + 1 :]


def report_size(spec: Spec) -> int:
    """The most bytes that a supervisor may report."""
    return spec["fetch_limit"] + _REPORT_MARGIN


def report_lines(report: bytes) -> Iterator[dict[str, Any]]:
    """The messages of a report, with the bytes that follow one in it as `content`.

    The last one may be cut off, where the supervisor was ended while it sent it.
    """
    at = 0
    while (end := report.find(b"\n", at)) >= 0:
        message = json.loads(report[at:end])
        size = message.get("bytes", 0)
        message["content"] = report[end + 1 : end + 1 + size]
        yield message
        at = end + 1 + size


def fetched(reports: Iterable[dict[str, Any]]) -> tuple[dict[str, str], list[str]]:
    """The files of a report in base64, and the names of those too large to send."""
    whole, pieces, too_large = {}, [], []
    for message in reports:
        if "too_large" in message:
            too_large.append(message["too_large"])
        elif "file" in message and message["bytes"]:
            pieces.append(message["content"])
        elif "file" in message:
            whole[message["file"]] = base64.b64encode(b"".join(pieces)).decode()
            pieces = []
    return whole, too_large
