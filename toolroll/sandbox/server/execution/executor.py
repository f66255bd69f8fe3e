"""Run the programs of requests.

The executor keeps a pool of zygotes for each of three profiles (plain, scientific, notebook). It assigns a cgroup and a
scratch directory to each program, and releases them when no process of the program is left. It takes requests and
returns responses of the wire protocol. `JobFailed` is raised for failures of the server, `InvalidProgram` for requests
that cannot be run.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import time
from collections.abc import Coroutine
from typing import Any

from toolroll.sandbox import protocol
from toolroll.sandbox.protocol import CommandStatus, RunCodeRequest, RunCodeResponse, RunRequest, RunStatus
from toolroll.sandbox.server.execution import languages
from toolroll.sandbox.server.execution.compile_cache import CompileCache, CompiledProgram
from toolroll.sandbox.server.execution.isolation_tiers import IsolationTier
from toolroll.sandbox.server.execution.job import STARVED, InvalidProgram, Job, JobFailed, program_response
from toolroll.sandbox.server.execution.sessions import CellResult, Session, SessionTable
from toolroll.sandbox.server.interpreter import zygote_handle
from toolroll.sandbox.server.interpreter.zygote_handle import SandboxProcess, ZygoteHandle, ZygotePool
from toolroll.sandbox.server.isolation.cgroup import Cgroup
from toolroll.sandbox.server.isolation.scratch import ScratchDirectories
from toolroll.sandbox.server.job_spec import JobKind, JobSpec, ProgramSpec
from toolroll.sandbox.server.settings import MEGABYTE, ServerSettings

SCIENTIFIC_MODULES = ("numpy", "sympy", "pandas")
PREPARE_KERNEL = "toolroll.sandbox.server.interpreter.notebook_kernel:prepare"
NOTEBOOK_MODULES = (*SCIENTIFIC_MODULES, "matplotlib.pyplot", "IPython", PREPARE_KERNEL)
COPY_ON_WRITE_BYTES = 32 * MEGABYTE
"""Memory of a Python program's cgroup in addition to the program's limit, for pages of the zygote that are copied on
write. The program reaches its own limit first, which raises MemoryError, and is killed only if it evades that limit."""
PROGRAMS_PER_ZYGOTE = 8
"""Number of concurrent programs for each zygote, which can fork some hundred times per second."""
MAX_FETCH_NAME_CHARS = 1 << 14
"""Maximum length of all names of `fetch_files` together."""
IDLE_CHECK_INTERVAL_S = 1.0
RESUMED_CHECK_INTERVAL_S = 5.0
"""Interval at which the suspended sessions are checked, which reads the times of all their processes."""
_MENTIONS_SCIENTIFIC_MODULE = re.compile(rf"\b({'|'.join(SCIENTIFIC_MODULES)})\b")


class Executor:
    """Runs programs, notebooks and sessions.

    Args:
        settings: Settings of the server.
        isolation: Isolation of the programs.
        toolchains: Toolchain of each language.
    """

    def __init__(self, settings: ServerSettings, isolation: IsolationTier, toolchains: languages.Toolchains) -> None:
        self.settings = settings
        self.isolation = isolation
        self.toolchains = toolchains
        self.sessions = SessionTable(settings.session_ttl)
        plan, size = isolation.plan, max(1, settings.capacity // settings.front_count // PROGRAMS_PER_ZYGOTE)
        self._plain = ZygotePool(plan, settings.python, (), size)
        self._scientific = ZygotePool(plan, settings.python, SCIENTIFIC_MODULES, size)
        self._notebook = ZygotePool(plan, settings.python, NOTEBOOK_MODULES, 1)
        self._pools = (self._plain, self._scientific, self._notebook)
        self._scratch = None if plan["namespaces"] else ScratchDirectories()
        self._compiled = CompileCache()
        self._output_limit_bytes = settings.output_kb * 1024
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start all zygotes and wait for a plain one. Scientific programs use plain zygotes until theirs are ready."""
        for pool in self._pools:
            pool.start()
        self._spawn(self._end_idle_sessions())
        self._spawn(self._end_resumed_sessions())
        await self._plain.get_zygote()

    async def close(self) -> None:
        """Kill all programs and zygotes and release their resources."""
        self.sessions.close()
        for task in self._tasks:
            task.cancel()
        for pool in self._pools:
            await pool.close()
        if self._scratch:
            await asyncio.to_thread(self._scratch.close)
        if self.isolation.cgroups:
            self.isolation.cgroups.close()

    @property
    def restarts(self) -> int:
        """Number of zygotes that were replaced."""
        return sum(pool.restarts for pool in self._pools)

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        """Run a program, in its session if the request names one.

        Raises:
            InvalidProgram: If the request cannot be run.
            JobFailed: If the server failed.
        """
        if request.session_id is not None:
            return await self._run_in_session(request, request.session_id)
        if request.language == "python":
            program: ProgramSpec = {"filename": "main.py", "code": request.code, "files": {}, "stages": []}
            program["show_value"] = request.show_value
            return await self._run_program(request, program, request.wall_timeout)
        toolchain = self._toolchain(request)
        program = self._prepare(request, toolchain)
        if toolchain.recipe.compiled:
            return await self._run_compiled(request, program, toolchain.recipe.compiled)
        return await self._run_program(request, program, request.wall_timeout)

    async def _run_program(
        self, request: RunCodeRequest, program: ProgramSpec, wall_timeout_s: float | None
    ) -> RunCodeResponse:
        """Run all commands of a program in one jail."""
        kind: JobKind
        if program["stages"]:
            kind, pool, timeouts_s = "commands", self._plain, [stage["timeout"] for stage in program["stages"]]
        else:
            kind, pool, timeouts_s = "script", self._pool_for(request.code), [request.run_timeout]
        zygote = await _zygote_of(pool)
        process = self._create_process(request, kind, program)
        stdin = (request.stdin or "").encode()
        job = Job(process, self.isolation.plan, stdin, timeouts_s, self._output_limit_bytes, wall_timeout_s)
        return await job.run(zygote)

    async def _run_compiled(self, request: RunCodeRequest, program: ProgramSpec, compiled_file: str) -> RunCodeResponse:
        """Compile a program, unless it is in the cache, and run it in another jail."""
        started = time.monotonic()
        compiler, run = program["stages"]
        only_compiler: ProgramSpec = {**program, "stages": [compiler]}

        def remaining_s() -> float | None:
            """Return the time that is left of the request's, if it is limited."""
            if request.wall_timeout is None:
                return None
            if (left_s := request.wall_timeout - (time.monotonic() - started)) <= 0:
                raise JobFailed(STARVED.format(seconds=request.wall_timeout))
            return left_s

        async def compile_program() -> CompiledProgram:
            inputs = {"stdin": None, "fetch_files": [compiled_file]}
            response = await self._run_program(request.model_copy(update=inputs), only_compiler, remaining_s())
            assert response.run_result is not None
            content = response.files.get(compiled_file)
            return CompiledProgram(response.run_result, None if content is None else base64.b64decode(content))

        compiled = await self._compiled.get(_compile_key(request, program), compile_program)
        if not compiled.succeeded:
            return program_response([compiled.result], has_compiler=True)
        if compiled.program is None:  # too large to be fetched
            return await self._run_program(request, program, remaining_s())
        only_program: ProgramSpec = {**program, "stages": [run], "executable": (compiled_file, compiled.program)}
        response = await self._run_program(request, only_program, remaining_s())
        warnings = program_response([compiled.result], has_compiler=True).message
        response.compile_result = compiled.result
        response.message = " ".join(filter(None, [warnings, response.message]))
        return response

    async def run_jupyter(self, request: protocol.RunJupyterRequest) -> protocol.RunJupyterResponse:
        """Run the cells of a notebook in a new interpreter, until one exceeds its timeout or ends the interpreter.

        Raises:
            InvalidProgram: If the request cannot be run.
            JobFailed: If the server failed.
        """
        zygote = await self._notebook_zygote()
        started = time.monotonic()
        session = self._start_session(request, zygote)
        response = protocol.RunJupyterResponse(status=RunStatus.SUCCESS)
        driver = protocol.CommandRunResult(status=CommandStatus.FINISHED, return_code=0, stdout="", stderr="")
        max_elapsed_s = request.wall_timeout or protocol.max_wall_time(request.total_timeout)
        remaining_s, full_own_s = request.total_timeout, protocol.FULL_TIME_FRACTION * request.total_timeout
        try:
            for code in request.cells:
                timeout_s = min(remaining_s, request.cell_timeout or remaining_s)
                max_cell_s = max_elapsed_s - (time.monotonic() - started)
                cell = await session.run(code, "notebook", timeout_s, max_cell_s, full_own_s - session.own_time_s)
                remaining_s -= cell.result.cpu_time or 0.0
                response.cells.append(_cell_response(cell))
                driver.memory_exceeded |= cell.result.memory_exceeded
                if cell.result.status is CommandStatus.TIME_LIMIT_EXCEEDED or session.has_ended:
                    driver = cell.result.model_copy(update={"stdout": "", "stderr": ""})
                    response.status = RunStatus.FAILED
                    response.message = "A cell ended the kernel." if session.has_ended else "A cell timed out."
                    break
            response.files, note = await session.finish()
            response.message = " ".join(filter(None, [response.message, note]))
        finally:
            session.end()
            await session.process.wait()
        response.driver = driver.model_copy(update={"execution_time": time.monotonic() - started})
        return response

    def check_session_request(self, request: RunCodeRequest) -> None:
        """Raise InvalidProgram if a request cannot be run in a session."""
        if request.language != "python":
            raise InvalidProgram(f"Sessions only support Python. Expected language 'python', got {request.language!r}.")
        if request.stdin or request.files or request.fetch_files:
            raise InvalidProgram(
                "A session does not support stdin, files or fetch_files. Read and write files in the code of its cells."
            )
        self._memory_bytes(request.memory_limit_MB)

    async def _run_in_session(self, request: RunCodeRequest, session_id: str) -> RunCodeResponse:
        with self.sessions.starting(session_id):
            zygote = await self._notebook_zygote()
            session, is_new = self.sessions.get_or_create(session_id, lambda: self._start_session(request, zygote))
        cell = await session.run(request.code, "script", request.run_timeout, request.wall_timeout)
        self._append_display(cell)
        response = program_response([cell.result])
        response.session_is_new, response.session_is_over = is_new, session.has_ended
        return response

    def _append_display(self, cell: CellResult) -> None:
        """Append the displayed values of a cell to its stdout, each on a separate line."""
        stdout, values = cell.result.stdout or "", [value.get("text/plain") for value in cell.display]
        displayed = "".join(f"{text}\n" for text in values if isinstance(text, str))
        if displayed and stdout and not stdout.endswith("\n"):
            displayed = f"\n{displayed}"
        room = max(0, self._output_limit_bytes - len(stdout))
        cell.result.stdout = stdout + displayed[:room]
        cell.result.stdout_truncated |= len(displayed) > room

    async def _notebook_zygote(self) -> ZygoteHandle:
        zygote = await _zygote_of(self._notebook)
        if "IPython" not in zygote.preloaded:
            install = f"{self.settings.python} -m pip install ipython"
            raise InvalidProgram(f"Sessions and notebooks need IPython. Install it: {install}")
        return zygote

    def _toolchain(self, request: RunCodeRequest) -> languages.Toolchain:
        toolchain = self.toolchains[request.language]
        if isinstance(toolchain, languages.MissingToolchain):
            raise InvalidProgram(f"Language {request.language!r} is not available on this server: {toolchain.install}.")
        return toolchain

    def _prepare(self, request: RunCodeRequest, toolchain: languages.Toolchain) -> ProgramSpec:
        memory, timeouts_s = self._memory_bytes(request.memory_limit_MB), (request.compile_timeout, request.run_timeout)
        return languages.prepare(toolchain, request.code, request.files, memory_bytes=memory, timeouts_s=timeouts_s)

    def _start_session(self, request: RunRequest, zygote: ZygoteHandle) -> Session:
        program: ProgramSpec = {"filename": "", "code": "", "files": {}, "stages": []}
        return Session(self._create_process(request, "cells", program), self._output_limit_bytes, zygote)

    def _create_process(self, request: RunRequest, kind: JobKind, program: ProgramSpec) -> SandboxProcess:
        """Return the process of a program, with resources that are released when it has exited."""
        if sum(map(len, request.fetch_files)) > MAX_FETCH_NAME_CHARS:
            raise InvalidProgram(f"The names of fetch_files together exceed {MAX_FETCH_NAME_CHARS} characters.")
        files = {path: content for path, content in request.files.items() if content is not None}
        spec: JobSpec = {
            **program,  # type: ignore[typeddict-item]  # optional keys are assigned below
            "kind": kind,
            "files": files | program["files"],
            "fetch": request.fetch_files,
            "fetch_limit": self.settings.request_mb * MEGABYTE if request.fetch_files else 0,
            "memory": self._memory_bytes(request.memory_limit_MB),
            "memory_by_rlimit": self.isolation.cgroups is None,
        }
        copied_bytes = 0 if kind == "commands" else COPY_ON_WRITE_BYTES
        process = SandboxProcess(spec, self._acquire_resources(spec, spec["memory"] + copied_bytes))
        # If a process was lost, some of its descendants may still run in its cgroup and as its user.
        process.exited.add_done_callback(
            lambda _: self._release_resources(spec, process.cgroup, reusable=not process.is_lost)
        )
        return process

    def _acquire_resources(self, spec: JobSpec, memory_bytes: int) -> Cgroup | None:
        """Assign a user and a scratch directory to a program, and return its cgroup, if the isolation has them."""
        try:
            if self.isolation.users:
                spec["user"] = self.isolation.users.acquire()
            if self._scratch:
                self._scratch.assign(spec)
            return self.isolation.cgroups.acquire(memory_bytes) if self.isolation.cgroups else None
        except OSError as error:
            self._release_resources(spec, None, reusable=True)
            raise JobFailed(f"the program did not get its resources: {error}") from error

    def _release_resources(self, spec: JobSpec, cgroup: Cgroup | None, *, reusable: bool) -> None:
        if cgroup and self.isolation.cgroups:
            self.isolation.cgroups.release(cgroup, reusable=reusable)
        if self.isolation.users and "user" in spec:
            self.isolation.users.release(spec["user"], reusable=reusable)
        if self._scratch and "directory" in spec:
            self._spawn(self._scratch.release(spec["directory"]))

    def _memory_bytes(self, limit_mb: int) -> int:
        if limit_mb > self.settings.memory_mb:
            maximum = f"{self.settings.memory_mb} (server option --memory-mb)"
            raise InvalidProgram(f"memory_limit_MB={limit_mb} exceeds the maximum of {maximum}.")
        return (limit_mb if limit_mb > 0 else self.settings.memory_mb) * MEGABYTE

    def _pool_for(self, code: str) -> ZygotePool:
        """Return the pool whose zygotes have the modules that the code mentions. A wrong guess only costs time."""
        is_scientific = self._scientific.is_up and _MENTIONS_SCIENTIFIC_MODULE.search(code)
        return self._scientific if is_scientific else self._plain

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_idle_sessions(self) -> None:
        while True:
            await asyncio.sleep(min(IDLE_CHECK_INTERVAL_S, self.settings.session_ttl / 4))
            self.sessions.end_idle()

    async def _end_resumed_sessions(self) -> None:
        while True:
            await asyncio.sleep(RESUMED_CHECK_INTERVAL_S)
            await self.sessions.end_resumed()


def _compile_key(request: RunCodeRequest, program: ProgramSpec) -> str:
    """Return a hash of everything that the compiler of a program depends on."""
    read = [program["filename"], program["code"], program["files"], program.get("environment"), request.files]
    command = [program["stages"][0]["argv"], request.memory_limit_MB]
    return hashlib.sha256(json.dumps([read, command], sort_keys=True).encode()).hexdigest()


async def _zygote_of(pool: ZygotePool) -> ZygoteHandle:
    """Return a zygote of the pool. After a start or a crash, it takes a second or two until one is ready."""
    if pool.is_up:
        return await pool.get_zygote()
    try:
        async with asyncio.timeout(zygote_handle.ZYGOTE_START_TIMEOUT_S):
            return await pool.get_zygote()
    except TimeoutError:
        raise JobFailed(f"no zygote was ready within {zygote_handle.ZYGOTE_START_TIMEOUT_S:g} s") from None


def _cell_response(cell: CellResult) -> protocol.CellRunResult:
    result, errors = cell.result, [cell.error] if cell.error else []
    if cell.error is None and result.return_code != 0:
        ename = "TimeoutError" if result.status is CommandStatus.TIME_LIMIT_EXCEEDED else "KernelDied"
        errors = [{"ename": ename, "evalue": f"return code {result.return_code}", "traceback": []}]
    stdout, stderr = result.stdout or "", result.stderr or ""
    return protocol.CellRunResult(stdout=stdout, stderr=stderr, display=cell.display, error=errors)
