"""Cells: code that comes piece by piece and shares one namespace, run in this process by IPython, as a Jupyter kernel.

Each cell is answered once, after its output was flushed: whether it came out well, what it displayed by type of
content, its error, its exit status. Only the process itself ends a session: an exception, `exit()` or SIGINT end the
cell, and the state stays. What a cell displays may be of any size or kind; the answer is well formed and bounded. A
cell that breaks the interpreter under itself ends the process, and with it the channel.

Messages both ways are a length of four bytes, the highest first, then JSON in UTF-8. In come `code` and `mode`,
out goes `Answer`. In mode "notebook" an error is in the answer alone; in mode "script" it is also written to stderr, as
Python would.

Only the standard library is imported, and IPython once it is needed: `prepare` does all that can be done before the
process is cloned, and starts no thread.
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
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypedDict

from toolroll.sandbox.server import program, reserve
from toolroll.sandbox.server.shell import new_shell

if TYPE_CHECKING:
    import asyncio

Mode = Literal["script", "notebook"]
LENGTH = struct.Struct(">I")
MOST_DISPLAYED = 16 << 20
"""Characters of JSON that one cell may display. What is over it is left out, and counted."""
MOST_SAID = 1 << 16
"""Characters of an error's message, and of each part of its traceback."""
DEEPEST = 50
"""How far displayed JSON may nest, since readers have a limit too; how many frames IPython explains, which is slow."""
FIGURES = "module://matplotlib_inline.backend_inline"
NO_IPYTHON = "sessions need IPython in the interpreter that runs programs: pip install ipython"


class Error(TypedDict):
    """What ended a cell. No colours."""

    ename: str
    evalue: str
    traceback: list[str]


class Answer(TypedDict):
    """How a cell came out."""

    ok: bool
    """Neither an error nor an exit status but 0."""
    display: list[dict[str, Any]]
    """One for each display and for the value of the last expression: type of content → content, images in base64."""
    error: Error | None
    out_of_memory: bool
    exit: int | None
    """The status, where the cell called exit()."""
    seconds: float
    cpu: float
    """Seconds of this process and of those that it waited for."""


class Cells:
    """The shell that runs the cells, and what the one that runs has shown so far."""

    def __init__(self) -> None:
        self.displayed: list[str] = []
        self.room = MOST_DISPLAYED
        self.left_out = 0
        self.shown: BaseException | None = None
        self.awaiting: asyncio.Task[Any] | None = None
        self.interrupted = False
        self.out_of_memory = False
        self.pid = os.getpid()
        self.streams = (sys.stdout, sys.stderr)
        self.shell = new_shell(self)
        self.interruptible = {
            method.__code__ for method in (type(self.shell).run_code, type(self.shell.events).trigger, Cells._finish)
        }
        for code in ("display(1)\n1", "1 / 0", "1 +"):  # all that is imported or cached at first use, errors above all
            self._run(code, "notebook")
        self.shell.reset(new_session=True)
        self.displayed.clear()
        del sys.last_type, sys.last_value, sys.last_traceback
        if "matplotlib" in sys.modules:
            self.shell.enable_matplotlib("inline")

    def begin(self, path: str) -> None:
        """Be the process of a program at `path`. To be called in the clone."""
        program.new_randomness()
        self.pid = os.getpid()
        self.streams = (sys.stdout, sys.stderr)
        sys.modules["__main__"] = self.shell.user_module
        sys.argv = [path]
        sys.path.insert(0, str(Path(path).parent))
        self.shell.history_manager.dir_hist[:] = [Path.cwd()]
        os.environ["MPLBACKEND"] = FIGURES  # read once matplotlib is imported
        signal.signal(signal.SIGINT, self._on_interrupt)
        reserve.prepare()
        reserve.use()

    def answer(self, code: str, mode: Mode) -> bytes:
        """Run a cell. The answer, as JSON."""
        began, cpu_before = perf_counter(), _cpu_seconds()
        error: Error | None = None
        status: int | None = None
        self.out_of_memory = False
        try:
            error, status = self._run(code, mode)
        except BaseException as failure:  # interrupted at the very end, or IPython itself is broken
            reserve.use()
            error = self._error(failure, mode)
        seconds, cpu = perf_counter() - began, _cpu_seconds() - cpu_before
        _flush(self.streams)  # if the cell has replaced them, there may still be something in these
        signal.signal(signal.SIGINT, self._on_interrupt)  # whatever handler the cell has set
        ok = error is None and not status
        if os.getpid() != self.pid:  # a fork that ran out of the cell
            os._exit(0 if ok else status or 1)
        displayed = self._take_displayed()
        rest = {"ok": ok, "error": error, "exit": status, "seconds": seconds, "cpu": cpu}
        rest["out_of_memory"] = self.out_of_memory
        text = f'{{"display": [{", ".join(displayed)}], {json.dumps(rest, ensure_ascii=False)[1:]}'
        return text.encode("utf-8", "replace")

    def display(self, data: object) -> None:
        """Take what is displayed. From any thread; what comes between two cells belongs to the second."""
        if not (bundle := _bundle(data)):
            return
        text = json.dumps(bundle, ensure_ascii=False)
        if len(text) > self.room:
            self.left_out += 1
        else:
            self.room -= len(text) + 2
            self.displayed.append(text)

    def show(self, error: BaseException | None) -> None:
        """Take an exception that IPython would show. Only later it turns out whether this is what ended the cell."""
        self._tell_shown()
        self.shown = error

    def run_coroutine(self, cell: Coroutine[Any, Any, Any]) -> Any:
        """Run a cell that awaits."""
        from IPython.core.async_helpers import get_asyncio_loop

        self.awaiting = get_asyncio_loop().create_task(cell)  # type: ignore[no-untyped-call]
        try:
            return self.awaiting.get_loop().run_until_complete(self.awaiting)
        finally:
            self.awaiting = None

    def _run(self, code: str, mode: Mode) -> tuple[Error | None, int | None]:
        """Run a cell: its error and exit status."""
        self.shown, self.interrupted = None, False
        result = self.shell.run_cell(code, store_history=True)
        failure = result.error_in_exec if result.error_before_exec is None else result.error_before_exec
        return self._finish(failure, mode)

    def _finish(self, failure: BaseException | None, mode: Mode) -> tuple[Error | None, int | None]:
        from asyncio import CancelledError

        if self.interrupted and isinstance(failure, CancelledError):
            failure = KeyboardInterrupt().with_traceback(failure.__traceback__)
        if failure is None and isinstance(self.shown, KeyboardInterrupt):  # while a figure was drawn
            failure = self.shown
        if self.shown is not failure:  # a `_repr_html_` that failed, a callback, the magic %tb: the cell went on
            self._tell_shown()
        error = status = None
        if isinstance(failure, SystemExit):
            status = _status(failure)
        elif failure is not None:
            error = self._error(failure, mode)
        streams = [getattr(sys, name, None) for name in ("stdout", "stderr")]
        _flush(streams)
        if any(stream is None or getattr(stream, "closed", False) for stream in streams):
            program.open_streams()  # for the next cell
        return error, status

    def _on_interrupt(self, _signal: int, frame: FrameType | None) -> None:
        """On SIGINT: KeyboardInterrupt in the cell's own code, at once or when it goes on. Between cells, nothing.

        Where IPython or asyncio keep their books an exception would leave these in disorder, with locks held. Which
        of the two it is shows in the stack, at every moment.
        """
        while frame is not None and frame.f_code is not Cells._run.__code__:
            if frame.f_code in self.interruptible:
                raise KeyboardInterrupt
            frame = frame.f_back
        self.interrupted = frame is not None
        if self.awaiting is not None:
            self.awaiting.cancel()
            self.awaiting.get_loop().call_soon_threadsafe(lambda: None)  # wakes the loop

    def _error(self, failure: BaseException, mode: Mode) -> Error:
        self.out_of_memory = isinstance(failure, MemoryError)
        program.shorten(failure)
        lines = self._lines(failure, mode)
        if mode == "script":
            _complain("".join(lines))
        if self.out_of_memory:  # what functions had in hand isn't kept for a debugger
            traceback.clear_frames(failure.__traceback__)
        return _described(failure, lines)

    def _lines(self, failure: BaseException, mode: Mode) -> list[str]:
        from IPython.core.error import UsageError

        kind, trace = type(failure), _of_user(failure.__traceback__)
        if isinstance(failure, UsageError):
            return [f"UsageError: {failure}\n"]
        if mode == "notebook":
            with contextlib.suppress(Exception):  # it looks at values and sources, and may fail over them
                if isinstance(failure, SyntaxError) and trace is None:
                    return list(self.shell.SyntaxTB.structured_traceback(kind, failure, []))
                if 0 < _depth(trace) <= DEEPEST and not isinstance(failure, BaseExceptionGroup):
                    return list(self.shell.InteractiveTB.structured_traceback(kind, failure, trace, tb_offset=0))
        return traceback.format_exception(kind, failure, trace)

    def _tell_shown(self) -> None:
        if self.shown is not None:
            _complain("".join(self._lines(self.shown, "script")))
            self.shown = None

    def _take_displayed(self) -> list[str]:
        displayed, self.displayed = self.displayed, []
        if self.left_out:
            note = f"({self.left_out} left out: a cell may display {MOST_DISPLAYED >> 20} MiB)"
            displayed.append(json.dumps({"text/plain": note}))
        self.room, self.left_out = MOST_DISPLAYED, 0
        return displayed


_prepared: Cells | None = None


def prepare() -> None:
    """Make the shell, unless it is there already. Without IPython, nothing. The interpreter is one for cells then."""
    global _prepared
    if _prepared is None:
        with contextlib.suppress(ImportError):
            _prepared = Cells()


def serve(channel: int, path: str) -> NoReturn:
    """Be the process of a program at `path` whose cells come over this socket, until the other side closes it."""
    try:
        os.set_inheritable(channel, False)
        # The other side shall see the end of this process, whatever a cell leaves running.
        os.register_at_fork(after_in_child=lambda: os.close(channel))
        prepare()
        if _prepared:
            _prepared.begin(path)
        while request := _receive(channel):
            answer = _prepared.answer(request["code"], request["mode"]) if _prepared else _refusal()
            _send(channel, answer)
    except BaseException:  # a cell took something away that is needed here
        os._exit(1)
    os._exit(0)


def _receive(channel: int) -> dict[str, Any] | None:
    head = _read(channel, LENGTH.size)
    body = head and _read(channel, *LENGTH.unpack(head))
    return json.loads(body) if body else None


def _read(channel: int, size: int) -> bytes:
    """So many bytes, or none if the other side has gone."""
    parts = bytearray()
    while len(parts) < size:
        if not (part := os.read(channel, size - len(parts))):
            return b""
        parts += part
    return bytes(parts)


def _send(channel: int, body: bytes) -> None:
    rest = memoryview(LENGTH.pack(len(body)) + body)
    while rest:
        rest = rest[os.write(channel, rest) :]


def _refusal() -> bytes:
    error = Error(ename="SandboxError", evalue=NO_IPYTHON, traceback=[f"SandboxError: {NO_IPYTHON}"])
    answer = Answer(ok=False, display=[], error=error, out_of_memory=False, exit=None, seconds=0.0, cpu=0.0)
    return json.dumps(answer).encode()


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _flush(streams: Iterable[Any]) -> None:
    for stream in streams:
        with contextlib.suppress(Exception):  # closed, broken or replaced by the cell
            stream.flush()


def _complain(text: str) -> None:
    with contextlib.suppress(Exception):  # as above
        sys.stderr.write(text)


def _status(end: SystemExit) -> int:
    match end.code:
        case None:
            return 0
        case int(code):
            return code & 0xFF
        case text:
            _complain(f"{text}\n")
            return 1


def _described(failure: BaseException, lines: list[str]) -> Error:
    try:
        said = str(failure)
    except Exception:
        said = "<exception str() failed>"
    ename, evalue, *parts = (_cut(text) for text in (type(failure).__name__, said, *lines))
    return Error(ename=ename, evalue=evalue, traceback=parts)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_SAID else f"{text[:MOST_SAID]} …"


def _of_user(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from where the cell begins."""
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell "):
        trace = trace.tb_next
    return trace


def _depth(trace: TracebackType | None) -> int:
    return sum(1 for _ in traceback.walk_tb(trace))


def _bundle(data: object) -> dict[str, object]:
    """What of displayed data can be sent, by type of content."""
    kept: dict[str, object] = {}
    for mime, value in dict.items(data) if isinstance(data, dict) else ():
        if isinstance(mime, str):
            with contextlib.suppress(ValueError):
                kept[mime] = _plain(value)
    return kept


def _plain(value: object, depth: int = 0) -> object:
    """A value as JSON has it, bytes in base64. ValueError if there is no such thing."""
    match value:
        case None | bool() | str():
            return value
        case int() if -(2**63) <= value < 2**64:
            return value
        case float():
            return value if math.isfinite(value) else None
        case bytes() | bytearray():
            return base64.b64encode(value).decode()
        case list() | tuple() if depth < DEEPEST:
            return [_plain(item, depth + 1) for item in value]
        case dict() if depth < DEEPEST:
            return {key: _plain(item, depth + 1) for key, item in dict.items(value) if isinstance(key, str)}
    raise ValueError(f"JSON has no {type(value).__name__}")
