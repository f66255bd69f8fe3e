"""Run a Python program in this process as `python main.py` would run it.

The process is a clone of the zygote, so libraries are already imported. The program must not notice that: it has its
own `__main__`, `sys.argv`, `sys.path`, standard streams and random seeds. An uncaught exception prints the usual
traceback, without frames of this package. SystemExit, KeyboardInterrupt, atexit functions, running threads and unclosed
files are handled as in a normal exit. The one difference, for speed, is that the interpreter is not finalized after
that: the process exits at once. Imports only the standard library.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import threading
import types
from typing import NoReturn

from toolroll.sandbox.server.isolation import memory_headroom


def open_streams() -> None:
    """Create sys.stdin, sys.stdout and sys.stderr for descriptors 0, 1 and 2.

    Called once, in the zygote. At that time the descriptors must be neither terminals nor files; clones replace them.
    """
    stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", "replace")
    stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8", "backslashreplace")
    stderr_buffer = io.BufferedWriter(io.FileIO(2, "w", closefd=False))
    stderr = io.TextIOWrapper(stderr_buffer, "utf-8", "backslashreplace", line_buffering=True)
    for name, stream in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


_main = types.ModuleType("__main__")
_main.__dict__.update(__file__="", __builtins__=__builtins__, __annotations__={}, __cached__=None, __spec__=None)


def install_main_module(path: str) -> None:
    """Make `__main__` and sys.argv those of a program at `path`.

    Called in the zygote, for the path that most programs have: a clone would copy many pages of memory to do it.
    """
    _main.__file__ = path
    sys.modules["__main__"] = _main
    sys.argv = [path]


def handle_interrupts() -> None:
    """Raise KeyboardInterrupt on SIGINT, as Python does unless SIGINT was ignored when it started."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def reseed_random() -> None:
    """Reseed the random number generators that were seeded before the clone."""
    if random := sys.modules.get("random"):
        random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if sympy := sys.modules.get("sympy.core.random"):
        sympy.rng.seed()


def run(source: str, path: str, *, show_value: bool = False) -> NoReturn:
    """Run the program and exit as it exits. `handle_interrupts` must have been called, possibly before the clone.

    Args:
        source: Source code.
        path: Path of the program, for `__file__` and tracebacks.
        show_value: Print the value of the last statement if it is an expression.
    """
    reseed_random()
    if _main.__file__ != path:
        install_main_module(path)
    sys.path.insert(0, path.rpartition("/")[0])
    status = 0
    memory_headroom.capture_limits()
    try:
        for code in _compile(source.encode(), path, show_value=show_value):
            exec(code, _main.__dict__)  # noqa: S102 (runs the program on purpose)
    except BaseException as error:  # any exception ends the program
        memory_headroom.release()
        status = _handle_exception(error, path)
    _exit(status)


def is_write_call(statement: ast.stmt) -> bool:
    """Return True if a statement is a call of a method `write`. Its value, a length, is not worth printing."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "write"


def exit_status(error: SystemExit) -> int:
    """Return the exit status of a SystemExit. If it carries a message, write that to stderr as Python does."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    with contextlib.suppress(Exception):  # the program may have closed or replaced the streams
        sys.stdout.flush()
    with contextlib.suppress(Exception):
        sys.stderr.write(f"{error.code}\n")
    return 1


def trace_from(filename: str, trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the part of a traceback that starts in a file whose name starts with `filename`."""
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith(filename):
        trace = trace.tb_next  # a frame of this package or of IPython
    return trace


def unchain_memory_error(error: BaseException) -> None:
    """Keep only the last of several MemoryErrors, if memory for a traceback ran out too."""
    if isinstance(error, MemoryError) and isinstance(error.__context__, MemoryError):
        error.__context__ = None


def _compile(source: bytes, path: str, *, show_value: bool) -> list[types.CodeType]:
    """Compile the program. With `show_value`, a last expression is compiled separately, as at Python's prompt."""
    if show_value:
        with contextlib.suppress(RecursionError, MemoryError):  # the syntax tree needs more than the program itself
            tree = ast.parse(source, path)
            last = tree.body[-1] if tree.body else None
            if isinstance(last, ast.Expr) and not _is_silent(last, source):
                expression = compile(ast.Interactive([tree.body.pop()]), path, "single", dont_inherit=True)
                return [compile(tree, path, "exec", dont_inherit=True), expression]
    return [compile(source, path, "exec", dont_inherit=True)]


def _is_silent(last: ast.Expr, source: bytes) -> bool:
    """Return True if the value of a last expression is not printed: a semicolon follows it, or it is a write call."""
    line = source.splitlines()[(last.end_lineno or 0) - 1]
    return line[last.end_col_offset :].lstrip().startswith(b";") or is_write_call(last)


def _exit(status: int) -> NoReturn:
    """Do what an interpreter does at exit, then exit. A negative status is the number of a signal."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _main.__dict__.clear()  # closes files that the program left open, and so flushes them
        gc.collect()
    except BaseException as error:  # raised by code of the program
        sys.excepthook(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException:  # the pipe is closed, or the program has replaced the stream
            status = status or 120
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def _handle_exception(error: BaseException, path: str) -> int:
    """Print the exception that ended the program. Return the exit status; negative for a signal."""
    if isinstance(error, SystemExit):
        return exit_status(error)
    error.__traceback__ = trace = trace_from(path, error.__traceback__)
    unchain_memory_error(error)
    try:
        sys.excepthook(type(error), error, trace)
    except BaseException:  # raised by the program's excepthook
        sys.__excepthook__(type(error), error, trace)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
