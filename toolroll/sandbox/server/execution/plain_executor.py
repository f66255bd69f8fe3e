"""Run trusted programs as plain child processes, on systems where programs cannot be isolated.

It takes the place of `Executor` on systems other than Linux, with the option `--unsafe`. It uses no function that only
Linux has. Differences:

- Programs are not isolated, and their memory is not limited.
- A timeout limits the elapsed time, because the CPU time of a running process group cannot be read portably.
- There are no sessions, no notebooks and no compiled languages.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toolroll.errors import ConfigError
from toolroll.sandbox.protocol import (
    FULL_TIME_FRACTION,
    CommandRunResult,
    CommandStatus,
    Language,
    RunCodeRequest,
    RunCodeResponse,
    RunJupyterRequest,
    RunJupyterResponse,
)
from toolroll.sandbox.server.execution import languages
from toolroll.sandbox.server.execution.job import (
    KILL_DELAY_S,
    STARVED,
    InvalidProgram,
    JobFailed,
    command_result,
    ends_with_memory_error,
    program_response,
)
from toolroll.sandbox.server.execution.languages import MissingToolchain, Toolchain
from toolroll.sandbox.server.execution.output import OutputReader
from toolroll.sandbox.server.execution.sessions import SessionTable
from toolroll.sandbox.server.isolation.scratch import ScratchDirectories
from toolroll.sandbox.server.job_spec import ProgramSpec
from toolroll.sandbox.server.settings import MEGABYTE, ServerSettings

_IMPORT_ROOT = str(Path(__file__).parents[4])
"""Directory that contains the package `toolroll`."""
_SHOW_VALUE = (
    "import os, sys; sys.path[0] = sys.argv[1]; "
    "from toolroll.sandbox.server.interpreter import script_runner; "
    "del sys.path[0]; path = os.path.abspath(sys.argv[2]); "
    "script_runner.handle_interrupts(); "
    "script_runner.run(open(path, encoding='utf-8').read(), path, show_value=True)"
)
"""Python code that runs a program and prints the value of its last expression."""
_NEEDS_LINUX = "{} need a sandbox server on Linux. This server runs each program as a plain process (--unsafe)."


@dataclass(frozen=True)
class NoIsolation:
    """The isolation of a `PlainExecutor`."""

    tier: str = "none"
    gaps: list[str] = field(
        default_factory=lambda: [
            "programs are not isolated: they can read and change everything that the server's user can",
            "the memory, the files and the number of processes of a program are not limited",
            "a process that leaves its program's process group is not killed at the end of the program",
        ]
    )
    """Ways in which a program can affect others."""
    notes: list[str] = field(default_factory=list)


class PlainExecutor:
    """Runs programs without isolation.

    Args:
        settings: Settings of the server.
        toolchains: Toolchain of each language.
        search_path: PATH of the programs.

    Raises:
        ConfigError: If the Python interpreter of the programs cannot be run.
    """

    def __init__(
        self,
        settings: ServerSettings,
        toolchains: Mapping[Language, Toolchain | MissingToolchain],
        search_path: str,
    ) -> None:
        if isinstance(python := toolchains["python"], MissingToolchain):
            raise ConfigError(
                f"The Python interpreter for programs cannot be run: {settings.python}: {python.install}."
            )
        self.settings = settings
        self.isolation = NoIsolation()
        self.toolchains = toolchains
        self.sessions = SessionTable(settings.session_ttl)  # stays empty
        self.restarts = 0
        self._search_path = search_path
        self._scratch = ScratchDirectories()
        self._running: set[Process] = set()

    async def start(self) -> None:
        """Do nothing: each program starts its own interpreter."""

    async def close(self) -> None:
        """Kill all programs and remove their files."""
        for process in self._running:
            _signal_group(process, signal.SIGKILL)
        await asyncio.to_thread(self._scratch.close)

    def check_session_request(self, request: RunCodeRequest) -> None:
        """Reject a request with a session."""
        raise InvalidProgram(_NEEDS_LINUX.format("Sessions"))

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        """Run a program. Cancellation kills it.

        Raises:
            InvalidProgram: If the request cannot be run.
            JobFailed: If the server failed.
        """
        program = self._prepare(request)
        directory = await asyncio.to_thread(self._scratch.create)
        try:
            await asyncio.to_thread(_write_files, directory, program, request.files)
            result = await self._run(program, request, directory)
            response = program_response([result])
            limit_bytes = self.settings.request_mb * MEGABYTE
            fetched = await asyncio.to_thread(_fetch_files, directory, request.fetch_files, limit_bytes)
            response.files, too_large = fetched
            response.message = " ".join(filter(None, [too_large, response.message]))
            return response
        finally:
            await self._scratch.release(str(directory))

    async def run_jupyter(self, _: RunJupyterRequest) -> RunJupyterResponse:
        """Reject a notebook.

        Raises:
            InvalidProgram: Always.
        """
        raise InvalidProgram(_NEEDS_LINUX.format("Notebooks"))

    def _prepare(self, request: RunCodeRequest) -> ProgramSpec:
        toolchain = self.toolchains[request.language]
        if isinstance(toolchain, MissingToolchain):
            raise InvalidProgram(f"Language {request.language!r} is not available on this server: {toolchain.install}.")
        memory_bytes = self.settings.memory_mb * MEGABYTE  # for runtimes that manage their own heap
        timeouts_s = request.compile_timeout, request.run_timeout
        program = languages.prepare(
            toolchain, request.code, request.files, memory_bytes=memory_bytes, timeouts_s=timeouts_s
        )
        if request.language == "python" and request.show_value:
            argv = [self.settings.python, "-c", _SHOW_VALUE, _IMPORT_ROOT, program["filename"]]
            program["stages"] = [{"argv": argv, "timeout": request.run_timeout}]
        return program

    async def _run(self, program: ProgramSpec, request: RunCodeRequest, directory: Path) -> CommandRunResult:
        (stage,) = program["stages"]
        environment = self._environment(directory) | program.get("environment", {})
        timeout_s = min(stage["timeout"], request.wall_timeout or stage["timeout"])
        readers: list[OutputReader] = []
        try:
            for _ in range(2):
                readers.append(OutputReader(self.settings.output_kb * 1024))  # noqa: PERF401 (both are closed)
            stdout, stderr = readers
            started = time.monotonic()
            with tempfile.TemporaryFile() as stdin:
                stdin.write((request.stdin or "").encode())
                stdin.seek(0)
                process = await asyncio.create_subprocess_exec(
                    *stage["argv"],
                    stdin=stdin,
                    stdout=stdout.write_fd,
                    stderr=stderr.write_fd,
                    cwd=directory,
                    env=environment,
                    start_new_session=True,  # also a new process group, by which all its processes are killed
                )
            for reader in readers:
                reader.close_write_end()
            timed_out = await self._wait(process, timeout_s)
            if timed_out and timeout_s < FULL_TIME_FRACTION * stage["timeout"]:
                raise JobFailed(STARVED.format(seconds=timeout_s))
            result = command_result(
                stdout,
                stderr,
                status=CommandStatus.TIME_LIMIT_EXCEEDED if timed_out else CommandStatus.FINISHED,
                execution_time=time.monotonic() - started,
                return_code=None if timed_out else process.returncode,
            )
            result.memory_exceeded = ends_with_memory_error(result)
            return result
        except OSError as error:
            raise JobFailed(f"the program could not be started: {error}") from error
        finally:
            for reader in readers:
                reader.close()

    async def _wait(self, process: Process, timeout_s: float) -> bool:
        """Wait until a program has ended, then kill the processes that it left. Return True if it timed out."""
        self._running.add(process)
        try:
            if await _ends_within(timeout_s, process):
                return False
            _signal_group(process, signal.SIGINT)  # so that it can flush its output and print a traceback
            await _ends_within(KILL_DELAY_S, process)
            return True
        finally:
            _signal_group(process, signal.SIGKILL)
            await process.wait()
            self._running.discard(process)

    def _environment(self, directory: Path) -> dict[str, str]:
        """Return the environment of a program. It contains no variables of the server, which may be secrets."""
        return {
            "PATH": self._search_path,
            "HOME": str(directory),
            "TMPDIR": str(directory),
            "LANG": "en_US.UTF-8",  # macOS has no C.UTF-8
            "USER": "sandbox",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }


async def _ends_within(seconds: float, process: Process) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await process.wait()
    return process.returncode is not None


def _signal_group(process: Process, number: int) -> None:
    # macOS reports PermissionError for a group whose processes have all ended.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _write_files(directory: Path, program: ProgramSpec, request_files: Mapping[str, str | None]) -> None:
    files = {program["filename"]: program["code"].encode()} if program["filename"] else {}
    for path, content in {**request_files, **program["files"]}.items():
        try:
            if content is not None:
                files[path] = base64.b64decode(content, validate=True)
        except ValueError as error:
            raise InvalidProgram(f"The content of {path!r} is not valid base64: {error}") from error
    for path, data in files.items():
        try:
            file = directory / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidProgram(f"The file {path[:200]!r} can't be written: {reason}") from error


def _fetch_files(directory: Path, paths: Iterable[str], limit_bytes: int) -> tuple[dict[str, str], str]:
    """Return files in base64, without those that do not exist, and a note about files that are too large to send."""
    files, notes = {}, []
    for path in paths:
        file = directory / path
        with contextlib.suppress(OSError):
            if not file.is_file():
                continue
            if file.stat().st_size > limit_bytes:
                notes.append(f"The file {path!r} is too large to be fetched.")
                continue
            content = file.read_bytes()
            limit_bytes -= len(content)
            files[path] = base64.b64encode(content).decode()
    return files, " ".join(notes)
