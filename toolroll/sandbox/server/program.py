"""A Python program, run in this process as `python main.py` would run it.

The process was forked from a warm interpreter, so the program begins with libraries already imported. It must not be
able to tell: it finds its own `__main__`, `sys.argv`, `sys.path`, standard streams and random numbers; an uncaught
exception prints the traceback that Python prints, without our frames; SystemExit, KeyboardInterrupt, atexit, threads
that still run and files that were never closed end as they always do. What differs, for speed, is that the interpreter
isn't taken down object by object at the end: it exits once all of that is done. Only the standard library is imported.
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

from toolroll.sandbox.server import reserve


def open_streams() -> None:
    """Make sys.stdin, sys.stdout and sys.stderr over descriptors 0, 1 and 2, whatever these will be.

    Done once, in the warm interpreter, where no descriptor of these three may be a terminal or a file.
    """
    stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8", "replace")
    stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8", "backslashreplace")
    stderr = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(2, "w", closefd=False)), "utf-8", "backslashreplace", line_buffering=True
    )
    for name, stream in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def new_main(path: str) -> types.ModuleType:
    """A fresh `__main__` for the program at `path`."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__, __annotations__={}, __cached__=None, __spec__=None)
    sys.modules["__main__"] = main
    sys.argv = [path]
    sys.path.insert(0, os.path.dirname(path))
    return main


def new_randomness() -> None:
    """Seed what was seeded before the fork."""
    if random := sys.modules.get("random"):
        random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if sympy := sys.modules.get("sympy.core.random"):
        sympy.rng.seed()


def run(source: str, path: str, *, show_value: bool = False) -> NoReturn:
    """Run the program, and end the process as it ends. `show_value`: a last expression's value is written to stdout."""
    new_randomness()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main = new_main(path)
    status = 0
    reserve.prepare()
    try:
        for code in _compiled(source.encode(), path, show_value=show_value):
            exec(code, main.__dict__)  # noqa: S102 (what this is for)
    except BaseException as error:  # whatever it is, it ends the program
        reserve.use()
        status = _end_of(error, path)
    end(status, main)


def _compiled(source: bytes, path: str, *, show_value: bool) -> list[types.CodeType]:
    """The program and, where that is to be shown, the expression that it ends in, as Python's prompt would run it."""
    if show_value:
        with contextlib.suppress(RecursionError, MemoryError):  # a tree needs more than the program itself
            tree = ast.parse(source, path)
            last = tree.body[-1] if tree.body else None
            if isinstance(last, ast.Expr) and not _is_silent(last, source):
                shown = compile(ast.Interactive([tree.body.pop()]), path, "single", dont_inherit=True)
                return [compile(tree, path, "exec", dont_inherit=True), shown]
    return [compile(source, path, "exec", dont_inherit=True)]


def _is_silent(last: ast.Expr, source: bytes) -> bool:
    """Whether a last expression isn't shown: behind it stands a semicolon, or it writes, and its value is a length."""
    line = source.splitlines()[(last.end_lineno or 0) - 1]
    return line[last.end_col_offset :].lstrip().startswith(b";") or writes(last)


def writes(last: ast.stmt) -> bool:
    """Whether a statement is a call of some `write`. Its value is a length, which nobody wants to see."""
    call = last.value if isinstance(last, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "write"


def end(status: int, main: types.ModuleType) -> NoReturn:
    """What an interpreter does before it ends, then the end."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        main.__dict__.clear()  # a file that was never closed is closed now, and its last lines written
        gc.collect()
    except BaseException as error:  # of the program's own, at its end
        sys.excepthook(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException:  # nobody reads any more, or the program has put something else in its place
            status = status or 120
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def shorten(error: BaseException) -> None:
    """Of MemoryErrors that came one upon the other, as there was no memory for a traceback either, leave the last."""
    if isinstance(error, MemoryError) and isinstance(error.__context__, MemoryError):
        error.__context__ = None


def _end_of(error: BaseException, path: str) -> int:
    """Say what has to be said of the exception that ended the program. The exit status; negative for a signal."""
    if isinstance(error, SystemExit):
        match error.code:
            case None:
                return 0
            case int(code):
                return code & 0xFF
            case text:
                with contextlib.suppress(Exception):  # a program may have closed or replaced either
                    sys.stdout.flush()
                with contextlib.suppress(Exception):
                    sys.stderr.write(f"{text}\n")
                return 1
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next  # our own frames
    error.__traceback__ = trace
    shorten(error)
    try:
        sys.excepthook(type(error), error, trace)
    except BaseException:  # the program's own hook failed
        sys.__excepthook__(type(error), error, trace)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
