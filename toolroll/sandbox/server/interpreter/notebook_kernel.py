"""Run notebook cells, which share one namespace, in this process with IPython.

Invariants:

- Each cell gets exactly one answer, after its output was flushed: whether it succeeded, its outputs by MIME type, its
  error, its exit status.
- An exception, `exit()` or SIGINT ends the cell, and the namespace is kept. The session ends only with the process.
- The answer is well-formed and bounded even if the displayed data is not. A cell that breaks the interpreter ends the
  process, which closes the channel.

A message in either direction is its length as four bytes, big-endian, followed by UTF-8 JSON. A request has `code` and
`mode`; the response is a `CellAnswer`. In mode "notebook", an error is only part of the answer; in mode "script", it is
also written to stderr as Python would.

Only the standard library is imported, and IPython when it is needed. `prepare` does all the work that can be done in
the zygote, and starts no threads.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Coroutine, Iterable
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypedDict

from toolroll.sandbox.server.interpreter import script_runner
from toolroll.sandbox.server.interpreter.ipython_shell import create_shell
from toolroll.sandbox.server.isolation import memory_headroom

if TYPE_CHECKING:
    import asyncio

CellMode = Literal["script", "notebook"]
LENGTH = struct.Struct(">I")
MAX_DISPLAY_CHARS = 16 << 20
"""Maximum size of the outputs of one cell, as JSON. Further outputs are omitted and counted."""
MAX_TRACEBACK_CHARS = 1 << 16
"""Maximum size of an error's message, and of each part of its traceback."""
MAX_DISPLAY_DEPTH = 50
"""Maximum nesting of displayed JSON, since JSON parsers have a limit too."""
MAX_EXPLAINED_FRAMES = 50
"""Maximum number of frames of a traceback that IPython formats, which is slow."""
INLINE_BACKEND = "module://matplotlib_inline.backend_inline"
NO_IPYTHON = "Sessions need IPython in the interpreter that runs programs. Install it with: pip install ipython"


class CellError(TypedDict):
    """The exception that ended a cell. The traceback has no colours."""

    ename: str
    evalue: str
    traceback: list[str]


class CellAnswer(TypedDict):
    """The result of a cell."""

    ok: bool
    """True if the cell has neither an error nor an exit status other than 0."""
    display: list[dict[str, Any]]
    """Outputs in order, including the value of the last expression: MIME type → content. Images are base64."""
    error: CellError | None
    out_of_memory: bool
    exit: int | None
    """Exit status, if the cell called exit()."""
    seconds: float
    cpu: float
    """CPU time of this process and of the children that it waited for, in seconds."""


class NotebookKernel:
    """The IPython shell that runs the cells, and the output of the current cell."""

    def __init__(self) -> None:
        self.displayed: list[str] = []
        self.display_chars_left = MAX_DISPLAY_CHARS
        self.omitted_displays = 0
        self.pending_error: BaseException | None = None
        """Exception that IPython would print. Whether it ended the cell is known only when the cell has finished."""
        self.cell_task: asyncio.Task[Any] | None = None
        """Task of the current cell, if it awaits."""
        self.interrupted = False
        self.out_of_memory = False
        self.pid = os.getpid()
        self.streams = (sys.stdout, sys.stderr)
        self.shell = create_shell(self)
        interruptible = (type(self.shell).run_code, type(self.shell.events).trigger, NotebookKernel._finish)
        self.interruptible = {method.__code__ for method in interruptible}
        for code in ("display(1)\n1", "1 / 0", "1 +"):  # triggers imports and caches, above all those for errors
            self._run(code, "notebook")
        self.shell.reset(new_session=True)
        self.displayed.clear()
        del sys.last_type, sys.last_value, sys.last_traceback
        if "matplotlib" in sys.modules:
            self.shell.enable_matplotlib("inline")

    def start_session(self, path: str) -> None:
        """Adopt the current process, a clone of the zygote, as that of a program at `path`."""
        script_runner.reseed_random()
        self.pid = os.getpid()
        self.streams = (sys.stdout, sys.stderr)
        sys.modules["__main__"] = self.shell.user_module
        sys.argv = [path]
        sys.path.insert(0, os.path.dirname(path))
        self.shell.history_manager.dir_hist[:] = [Path.cwd()]
        os.environ["MPLBACKEND"] = INLINE_BACKEND  # for a cell that imports matplotlib
        signal.signal(signal.SIGINT, self._on_interrupt)
        memory_headroom.capture_limits()
        memory_headroom.release()

    def run_cell(self, code: str, mode: CellMode) -> bytes:
        """Run a cell and return its `CellAnswer` as JSON."""
        started_at, cpu_before = perf_counter(), _cpu_seconds()
        self.out_of_memory = False
        try:
            error, status = self._run(code, mode)
        except BaseException as failure:  # an interrupt at the very end, or IPython itself is broken
            memory_headroom.release()
            error, status = self._report_error(failure, mode), None
        seconds, cpu = perf_counter() - started_at, _cpu_seconds() - cpu_before
        _flush(self.streams)  # the cell may have replaced sys.stdout and sys.stderr after writing to these
        signal.signal(signal.SIGINT, self._on_interrupt)  # the cell may have changed the handler
        ok = error is None and not status
        if os.getpid() != self.pid:  # a forked child that has reached the end of the cell
            os._exit(0 if ok else status or 1)
        rest = {"ok": ok, "error": error, "exit": status, "seconds": seconds, "cpu": cpu}
        rest["out_of_memory"] = self.out_of_memory
        text = f'{{"display": [{", ".join(self._take_displayed())}], {json.dumps(rest, ensure_ascii=False)[1:]}'
        return text.encode("utf-8", "replace")

    def display(self, data: object) -> None:
        """Add an output. May be called from any thread; output between two cells belongs to the second one."""
        if not (bundle := _json_bundle(data)):
            return
        text = json.dumps(bundle, ensure_ascii=False)
        if len(text) > self.display_chars_left:
            self.omitted_displays += 1
        else:
            self.display_chars_left -= len(text) + 2
            self.displayed.append(text)

    def show_exception(self, error: BaseException | None) -> None:
        """Handle an exception that IPython would print."""
        self._print_pending_error()
        self.pending_error = error

    def run_coroutine(self, cell: Coroutine[Any, Any, Any]) -> Any:
        """Run a cell that awaits."""
        from IPython.core.async_helpers import get_asyncio_loop

        self.cell_task = get_asyncio_loop().create_task(cell)  # type: ignore[no-untyped-call]
        try:
            return self.cell_task.get_loop().run_until_complete(self.cell_task)
        finally:
            self.cell_task = None

    def _run(self, code: str, mode: CellMode) -> tuple[CellError | None, int | None]:
        """Run a cell. Return its error and its exit status."""
        self.pending_error, self.interrupted = None, False
        result = self.shell.run_cell(code, store_history=True)
        failure = result.error_in_exec if result.error_before_exec is None else result.error_before_exec
        return self._finish(failure, mode)

    def _finish(self, failure: BaseException | None, mode: CellMode) -> tuple[CellError | None, int | None]:
        from asyncio import CancelledError

        if self.interrupted and isinstance(failure, CancelledError):
            failure = KeyboardInterrupt().with_traceback(failure.__traceback__)
        if failure is None and isinstance(self.pending_error, KeyboardInterrupt):  # raised while a figure was drawn
            failure = self.pending_error
        if self.pending_error is not failure:  # it did not end the cell: a failed `_repr_html_`, a callback, %tb
            self._print_pending_error()
        error = status = None
        if isinstance(failure, SystemExit):
            status = script_runner.exit_status(failure)
        elif failure is not None:
            error = self._report_error(failure, mode)
        streams = [getattr(sys, name, None) for name in ("stdout", "stderr")]
        _flush(streams)
        if any(stream is None or getattr(stream, "closed", False) for stream in streams):
            script_runner.open_streams()  # for the next cell
        return error, status

    def _on_interrupt(self, _signal: int, frame: FrameType | None) -> None:
        """Handle SIGINT: raise KeyboardInterrupt in the cell's code, now or when it continues. Ignored between cells.

        An exception in the internals of IPython or asyncio would leave them inconsistent, with locks held. The stack
        shows whether the cell's code or one of these is running.
        """
        while frame is not None and frame.f_code is not NotebookKernel._run.__code__:
            if frame.f_code in self.interruptible:
                raise KeyboardInterrupt
            frame = frame.f_back
        self.interrupted = frame is not None
        if self.cell_task is not None:
            self.cell_task.cancel()
            self.cell_task.get_loop().call_soon_threadsafe(lambda: None)  # wakes the loop

    def _report_error(self, failure: BaseException, mode: CellMode) -> CellError:
        self.out_of_memory = isinstance(failure, MemoryError)
        script_runner.unchain_memory_error(failure)
        lines = self._format_error(failure, mode)
        if mode == "script":
            _write_stderr("".join(lines))
        if self.out_of_memory:  # frees the local variables, which would be kept for a debugger
            traceback.clear_frames(failure.__traceback__)
        return _cell_error(failure, lines)

    def _format_error(self, failure: BaseException, mode: CellMode) -> list[str]:
        from IPython.core.error import UsageError

        kind, trace = type(failure), script_runner.trace_from("<cell ", failure.__traceback__)
        if isinstance(failure, UsageError):
            return [f"UsageError: {failure}\n"]
        if mode == "notebook":
            with contextlib.suppress(Exception):  # IPython reads values and sources, which may fail
                if isinstance(failure, SyntaxError) and trace is None:
                    return list(self.shell.SyntaxTB.structured_traceback(kind, failure, []))
                depth = sum(1 for _ in traceback.walk_tb(trace))
                if 0 < depth <= MAX_EXPLAINED_FRAMES and not isinstance(failure, BaseExceptionGroup):
                    return list(self.shell.InteractiveTB.structured_traceback(kind, failure, trace, tb_offset=0))
        return traceback.format_exception(kind, failure, trace)

    def _print_pending_error(self) -> None:
        if self.pending_error is not None:
            _write_stderr("".join(self._format_error(self.pending_error, "script")))
            self.pending_error = None

    def _take_displayed(self) -> list[str]:
        displayed, self.displayed = self.displayed, []
        if self.omitted_displays:
            limit = f"a cell can display at most {MAX_DISPLAY_CHARS >> 20} MiB"
            displayed.append(json.dumps({"text/plain": f"({self.omitted_displays} outputs omitted: {limit})"}))
        self.display_chars_left, self.omitted_displays = MAX_DISPLAY_CHARS, 0
        return displayed


_kernel: NotebookKernel | None = None


def prepare() -> None:
    """Create the kernel of this process, unless it exists or IPython is not installed. Called in the zygote."""
    global _kernel
    if _kernel is None:
        with contextlib.suppress(ImportError):
            _kernel = NotebookKernel()


def serve(channel: int, path: str) -> NoReturn:
    """Run the cells that arrive over a socket, as the process of a program at `path`, until the socket is closed."""
    try:
        os.set_inheritable(channel, False)
        # The server must see the end of this process even if a cell leaves children running.
        os.register_at_fork(after_in_child=lambda: os.close(channel))
        prepare()
        if _kernel:
            _kernel.start_session(path)
        with open(channel, "rb", closefd=False) as requests, open(channel, "wb", closefd=False) as answers:
            while head := requests.read(LENGTH.size):
                request = json.loads(requests.read(*LENGTH.unpack(head)))
                answer = _kernel.run_cell(request["code"], request["mode"]) if _kernel else _no_ipython_answer()
                answers.write(LENGTH.pack(len(answer)) + answer)
                answers.flush()
    except BaseException:  # a cell has broken something that is needed here
        os._exit(1)
    os._exit(0)


def _no_ipython_answer() -> bytes:
    error = CellError(ename="SandboxError", evalue=NO_IPYTHON, traceback=[f"SandboxError: {NO_IPYTHON}"])
    answer = CellAnswer(ok=False, display=[], error=error, out_of_memory=False, exit=None, seconds=0.0, cpu=0.0)
    return json.dumps(answer).encode()


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _flush(streams: Iterable[Any]) -> None:
    for stream in streams:
        with contextlib.suppress(Exception):  # the cell may have closed, broken or replaced it
            stream.flush()


def _write_stderr(text: str) -> None:
    with contextlib.suppress(Exception):  # the cell may have closed, broken or replaced it
        sys.stderr.write(text)


def _cell_error(failure: BaseException, lines: list[str]) -> CellError:
    try:
        message = str(failure)
    except Exception:
        message = "<exception str() failed>"
    ename, evalue, *parts = (_truncate(text) for text in (type(failure).__name__, message, *lines))
    return CellError(ename=ename, evalue=evalue, traceback=parts)


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_TRACEBACK_CHARS else f"{text[:MAX_TRACEBACK_CHARS]} …"


def _json_bundle(data: object) -> dict[str, object]:
    """Return the entries of displayed data, MIME type → content, that can be represented as JSON."""
    bundle: dict[str, object] = {}
    for mime, value in dict.items(data) if isinstance(data, dict) else ():
        if isinstance(mime, str):
            with contextlib.suppress(ValueError):
                bundle[mime] = _json_value(value)
    return bundle


def _json_value(value: object, depth: int = 0) -> object:
    """Return a value as JSON represents it, bytes as base64. Raise ValueError if that is impossible."""
    match value:
        case None | bool() | str():
            return value
        case int() if -(2**63) <= value < 2**64:
            return value
        case float():
            return value if math.isfinite(value) else None
        case bytes() | bytearray():
            return base64.b64encode(value).decode()
        case list() | tuple() if depth < MAX_DISPLAY_DEPTH:
            return [_json_value(item, depth + 1) for item in value]
        case dict() if depth < MAX_DISPLAY_DEPTH:
            return {key: _json_value(item, depth + 1) for key, item in dict.items(value) if isinstance(key, str)}
    raise ValueError(f"JSON cannot represent {type(value).__name__}")
