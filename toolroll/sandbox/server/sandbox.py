"""Runs programs: everything behind the front.

It knows the isolation that was found, keeps warm interpreters of three profiles, gives each program its cgroup or
directory and takes it back when nothing of the program is left. Requests come in as they are on the wire, and answers
go out so. What a program does is its answer; `JobFailed` is raised for what isn't its doing, `BadRequest` for what
can't be asked.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from toolroll.sandbox.protocol import (
    CellRunResult,
    CommandRunResult,
    CommandStatus,
    Language,
    RunCodeRequest,
    RunCodeResponse,
    RunJupyterRequest,
    RunJupyterResponse,
    RunStatus,
)
from toolroll.sandbox.server import languages
from toolroll.sandbox.server.cgroup import Cgroup
from toolroll.sandbox.server.interpreter import START_WITHIN, Interpreter
from toolroll.sandbox.server.job import BadRequest, Finished, Job, JobFailed
from toolroll.sandbox.server.pool import Pool
from toolroll.sandbox.server.process import Process
from toolroll.sandbox.server.scratch import Scratch
from toolroll.sandbox.server.session import Cell, Session, Sessions
from toolroll.sandbox.server.settings import MEGABYTE, ServerSettings
from toolroll.sandbox.server.spec import Spec
from toolroll.sandbox.server.tier import Isolation

logger = logging.getLogger(__name__)

SCIENTIFIC = ("numpy", "sympy", "pandas")
NOTEBOOK = (*SCIENTIFIC, "matplotlib.pyplot", "IPython", "toolroll.sandbox.server.cells:prepare")
COPIED = 32 * MEGABYTE
"""Bytes that a Python program's cgroup has beyond its limit: what it copies of a warm interpreter's memory by using it.
So it meets its own limit first, as a MemoryError, and is killed only where it evades that."""
_SCIENTIFIC_CODE = re.compile(rf"\b({'|'.join(SCIENTIFIC)})\b")
PROGRAMS_PER_INTERPRETER = 8
"""An interpreter clones itself some hundred times a second; that is enough for so many programs at once."""
MOST_NAMES = 1 << 14


Toolchains = Mapping[Language, languages.Toolchain | languages.Missing]


class Sandbox:
    """Programs, and what they run in."""

    def __init__(self, settings: ServerSettings, isolation: Isolation, toolchains: Toolchains) -> None:
        self.settings = settings
        self.isolation = isolation
        self.plan = isolation.plan
        self.toolchains = toolchains
        size = max(1, settings.capacity // PROGRAMS_PER_INTERPRETER)
        self.plain = Pool(self.plan, settings.python, (), size)
        self.scientific = Pool(self.plan, settings.python, SCIENTIFIC, size)
        self.notebook = Pool(self.plan, settings.python, NOTEBOOK, 1)
        self.sessions = Sessions(settings.sessions, settings.session_ttl, self._new_session_of)
        self._scratch = Scratch() if not self.plan["namespaces"] else None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Be ready for programs. Other interpreters take longer than the plain ones, which do for them till then."""
        for pool in (self.plain, self.scientific, self.notebook):
            pool.start()
        self._spawn(self._end_idle_sessions())
        await self.plain.interpreter()

    async def close(self) -> None:
        """End everything."""
        self.sessions.close()
        for task in self._tasks:
            task.cancel()
        for pool in (self.plain, self.scientific, self.notebook):
            await pool.close()
        if self._scratch:
            await asyncio.to_thread(self._scratch.close)
        if self.isolation.cgroups:
            self.isolation.cgroups.close()

    @property
    def restarts(self) -> int:
        """How often a warm interpreter had to be replaced."""
        return sum(pool.restarts for pool in (self.plain, self.scientific, self.notebook))

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        """Run a program."""
        if request.session_id is not None:
            return await self._run_in_session(request)
        if request.language == "python":
            spec = self._spec(request, kind="script", filename="main.py", code=request.code)
            spec["show_value"] = request.show_value
            timeouts = [request.run_timeout]
            pool = self._pool_for(request.code)
        else:
            prepared = self._prepare(request)
            spec = self._spec(request, kind="commands", filename=prepared.filename, code=prepared.code)
            spec["stages"], spec["environment"] = prepared.stages, prepared.environment
            spec["files"] |= prepared.files
            timeouts = [stage["timeout"] for stage in prepared.stages]
            pool = self.plain
        interpreter = await _interpreter_of(pool)
        stdin = (request.stdin or "").encode()
        job = Job(self.plan, spec, stdin, timeouts, self.settings.output_kb * 1024, self._place(spec))
        self._release_when_gone(job.process, job.cgroup, spec)
        return _answer(await job.run(interpreter), compiled=len(timeouts) > 1)

    async def run_jupyter(self, request: RunJupyterRequest) -> RunJupyterResponse:
        """Run cells one after the other in an interpreter of their own."""
        await self._check_notebook()
        began = time.monotonic()
        session = self._new_session(request)
        response = RunJupyterResponse(status=RunStatus.SUCCESS)
        driver = CommandRunResult(status=CommandStatus.FINISHED, return_code=0, stdout="", stderr="")
        try:
            for code in request.cells:
                left = request.total_timeout - (time.monotonic() - began)
                cell = await session.run(code, "notebook", min(left, request.cell_timeout or left))
                response.cells.append(_cell_result(cell))
                driver.memory_exceeded |= cell.result.memory_exceeded
                if cell.result.status is CommandStatus.TIME_LIMIT_EXCEEDED or session.is_over:
                    driver = cell.result.model_copy(update={"stdout": "", "stderr": ""})
                    response.status = RunStatus.FAILED
                    response.message = "A cell ended the kernel." if session.is_over else "A cell ran out of time."
                    break
            response.files, too_large = await session.finish()
            response.message += _notes(too_large, [])
        finally:
            session.end()
        response.driver = driver.model_copy(update={"execution_time": time.monotonic() - began})
        return response

    async def _run_in_session(self, request: RunCodeRequest) -> RunCodeResponse:
        if request.language != "python":
            raise BadRequest("A session is Python's: language must be 'python'.")
        if request.stdin or request.files or request.fetch_files:
            raise BadRequest(
                "A session takes no stdin, files or fetch_files: its cells read and write files themselves."
            )
        assert request.session_id is not None
        await self._check_notebook()
        died = self.sessions.had_died(request.session_id)
        session, is_new = self.sessions.get(request.session_id, request.memory_limit_MB)
        cell = await session.run(request.code, "script", request.run_timeout)
        shown = "".join(f"{one['text/plain']}\n" for one in cell.display if isinstance(one.get("text/plain"), str))
        if shown and not (cell.result.stdout or "\n").endswith("\n"):
            shown = f"\n{shown}"
        room = max(0, self.settings.output_kb * 1024 - len(cell.result.stdout or ""))
        cell.result.stdout = (cell.result.stdout or "") + shown[:room]
        cell.result.stdout_truncated |= len(shown) > room
        answer = _answer(Finished([cell.result]), compiled=False)
        answer.session_is_new, answer.session_died, answer.session_is_over = is_new, died, session.is_over
        return answer

    async def _check_notebook(self) -> None:
        interpreter = await _interpreter_of(self.notebook)
        if "IPython" not in interpreter.preloaded:
            raise BadRequest(f"Sessions and notebooks need IPython: {self.settings.python} -m pip install ipython")

    def _prepare(self, request: RunCodeRequest) -> languages.Prepared:
        toolchain = self.toolchains[request.language]
        if isinstance(toolchain, languages.Missing):
            raise BadRequest(f"This server has no {request.language}: {toolchain.install}.")
        memory = self._memory(request.memory_limit_MB)
        return languages.prepare(
            toolchain,
            request.code,
            memory=memory,
            compile_timeout=request.compile_timeout,
            run_timeout=request.run_timeout,
            files=request.files,
        )

    def _spec(self, request: RunCodeRequest | RunJupyterRequest, *, kind: str, filename: str, code: str) -> Spec:
        if sum(map(len, request.fetch_files)) > MOST_NAMES:
            raise BadRequest(f"The names of fetch_files are longer than {MOST_NAMES} characters together.")
        return {
            "kind": kind,  # type: ignore[typeddict-item]
            "filename": filename,
            "code": code,
            "files": {path: content for path, content in request.files.items() if content is not None},
            "fetch": request.fetch_files,
            "fetch_limit": self.settings.request_mb * MEGABYTE if request.fetch_files else 0,
            "memory": self._memory(request.memory_limit_MB),
            "memory_by_rlimit": self.isolation.cgroups is None,
            "stages": [],
        }

    def _memory(self, megabytes: int) -> int:
        if megabytes > self.settings.memory_mb:
            raise BadRequest(
                f"memory_limit_MB is {megabytes}, but this server gives a program {self.settings.memory_mb} at most "
                "(its option --memory-mb)."
            )
        return (megabytes if megabytes > 0 else self.settings.memory_mb) * MEGABYTE

    def _pool_for(self, code: str) -> Pool:
        """The interpreters that have what the code mentions. Wrong guesses cost time, nothing else."""
        return self.scientific if self.scientific.is_up and _SCIENTIFIC_CODE.search(code) else self.plain

    def _new_session(self, request: RunJupyterRequest) -> Session:
        spec = self._spec(request, kind="cells", filename="", code="")
        if not self.notebook.is_up:
            raise JobFailed("the interpreter for sessions is not ready yet")
        session = Session(self.plan, spec, self.settings.output_kb * 1024, self._place(spec))
        self._release_when_gone(session.process, session.cgroup, spec)
        session.begin(self.notebook.least_busy())
        return session

    def _new_session_of(self, memory: int) -> Session:
        return self._new_session(RunJupyterRequest(cells=[], memory_limit_MB=memory))

    def _place(self, spec: Spec) -> Cgroup | None:
        """Give a program what it has of its own besides namespaces."""
        if self._scratch:
            spec["directory"], user = self._scratch.take()
            if user is not None:
                spec["user"] = user
        copied = 0 if spec["kind"] == "commands" else COPIED
        return self.isolation.cgroups.take(spec["memory"] + copied) if self.isolation.cgroups else None

    def _release_when_gone(self, process: Process, cgroup: Cgroup | None, spec: Spec) -> None:
        def release(_: object) -> None:
            # Of one whose end isn't known something may still run, in that cgroup and as that user.
            use_again = process.status is not None
            if cgroup and self.isolation.cgroups:
                if use_again:
                    self.isolation.cgroups.give_back(cgroup)
                else:
                    cgroup.remove()
            if self._scratch:
                self._spawn(self._scratch.give_back(spec["directory"], use_again=use_again))

        process.gone.add_done_callback(release)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_idle_sessions(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.settings.session_ttl / 4))
            self.sessions.end_idle()


async def _interpreter_of(pool: Pool) -> Interpreter:
    """One that is ready. They take a second or two to be, after the server's start and after a death."""
    try:
        async with asyncio.timeout(START_WITHIN):
            return await pool.interpreter()
    except TimeoutError:
        raise JobFailed(f"no interpreter was ready within {START_WITHIN:g} s") from None


def _answer(done: Finished, *, compiled: bool) -> RunCodeResponse:
    """What a program did, on the wire."""
    failed = any(one.status is not CommandStatus.FINISHED or one.return_code != 0 for one in done.commands)
    return RunCodeResponse(
        status=RunStatus.FAILED if failed else RunStatus.SUCCESS,
        message=_notes(done.too_large, done.commands),
        compile_result=done.commands[0] if compiled else None,
        run_result=done.commands[1] if len(done.commands) > 1 else None if compiled else done.commands[0],
        files=done.files,
    )


def _notes(too_large: list[str], commands: list[CommandRunResult]) -> str:
    """What else a caller should know, in words: not everyone looks at the marks."""
    notes = [f"The file {path!r} is too large to be fetched." for path in too_large]
    for one in commands:
        cut = [name for name, is_cut in (("stdout", one.stdout_truncated), ("stderr", one.stderr_truncated)) if is_cut]
        notes += [f"More was written to {name} than is kept." for name in cut]
        if one.memory_exceeded:
            notes.append("The memory limit was reached.")
    return " ".join(notes)


def _cell_result(cell: Cell) -> CellRunResult:
    error = cell.error
    if error is None and cell.result.return_code != 0:
        ename = "TimeoutError" if cell.result.status is CommandStatus.TIME_LIMIT_EXCEEDED else "KernelDied"
        error = {"ename": ename, "evalue": f"return code {cell.result.return_code}", "traceback": []}
    return CellRunResult(
        stdout=cell.result.stdout or "",
        stderr=cell.result.stderr or "",
        display=cell.display,
        error=[error] if error else [],
    )
