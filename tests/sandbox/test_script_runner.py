"""A Python program behaves as with `python main.py`: both are run and compared."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from toolroll.sandbox.client import SandboxClient

pytestmark = pytest.mark.sandbox

PROGRAMS = {
    "nothing": "",
    "print": "print(1 + 1)",
    "no newline at the end": "import sys; sys.stdout.write('a')",
    "both streams": "import sys; print('out'); print('err', file=sys.stderr)",
    "exception": "def f():\n    return 1 / 0\n\nprint('before')\nf()",
    "exception with a cause": "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('b') from e",
    "exception group": "raise ExceptionGroup('g', [ValueError(1), TypeError(2)])",
    "syntax error": "x = 1\nif x\n  pass\n",
    "syntax error in the first line": "(",
    "exit": "import sys; print('a'); sys.exit(3)",
    "exit with a message": "import sys; print('a'); sys.exit('message')",
    "exit none": "raise SystemExit",
    "exit large": "raise SystemExit(256 + 7)",
    "exit negative": "raise SystemExit(-1)",
    "exit true": "raise SystemExit(True)",
    "quit": "quit(4)",
    "os._exit": "import os; os._exit(5)",
    "killed by itself": "import os; os.kill(os.getpid(), 9)",
    "abort": "import os; os.abort()",
    "segmentation fault": "import ctypes; ctypes.string_at(0)",
    "interrupt": "raise KeyboardInterrupt",
    "recursion": "def f(): f()\ntry:\n    f()\nexcept RecursionError:\n    print('deep')",
    "main": "if __name__ == '__main__': print(__name__, __file__.rsplit('/')[-1], __doc__, __spec__, __package__)",
    "docstring": "'''doc'''\nprint(__doc__)",
    "names": "print(sorted(globals()))",
    "argv": "import sys; print(len(sys.argv), sys.argv[0].rsplit('/')[-1])",
    "path": "import sys, os; print(sys.path[0] == os.getcwd())",
    "main module": "import __main__, sys; x = 5; print(__main__.x, sys.modules['__main__'] is __main__)",
    "annotations": "x: int = 3\nprint(__annotations__)",
    "future": "from __future__ import annotations\ndef f(x: Missing): pass\nprint(f.__annotations__)",
    "no future of the package": "def f(x: int): pass\nprint(f.__annotations__)",
    "atexit": "import atexit\natexit.register(print, 'last')\nprint('first')",
    "atexit that fails": "import atexit\natexit.register(lambda: 1 / 0)\nprint('first')",
    "thread that outlives the main one": "import threading, time\ndef f():\n    time.sleep(0.1)\n    print('thread')\n"
    "threading.Thread(target=f).start()\nprint('main')",
    "daemon thread": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint(1)",
    "thread that fails": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t')\nt.start()\nt.join()",
    "file never closed": "f = open('x', 'w')\nf.write('y')\nimport atexit\n",
    "del at the end": "class A:\n    def __del__(self): print('gone')\na = A()",
    "cycle at the end": "class A:\n    def __del__(self): print('gone')\na = A(); a.a = a",
    "excepthook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\n1 / 0",
    "stdout closed": "import sys\nsys.stdout.close()",
    "stdout replaced": "import io, sys\nprint('a')\nsys.stdout = io.StringIO()\nprint('lost')",
    "surrogates printed": "print('\\udc80' if 0 else 'é')",
    "bytes": "import sys; sys.stdout.buffer.write(b'\\xc3\\xa9'); print()",
    "stdin": "import sys; print(input(), '|', sys.stdin.read(), sys.stdin.isatty())",
    "input at the end": "while True:\n    try: print(input())\n    except EOFError: break",
    "eof": "input(); input(); input()",
    "streams": "import sys; print(sys.stdout.encoding, sys.stdout.line_buffering, "
    "sys.stderr.line_buffering, sys.stdin.encoding)",
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
    "multiprocessing": "import multiprocessing as m\ndef f(x): return x * x\nif __name__ == '__main__':\n"
    "    with m.Pool(2) as p: print(p.map(f, range(5)))",
    "multiprocessing spawned": "import multiprocessing as m\ndef f(x): return x * x\nif __name__ == '__main__':\n"
    "    with m.get_context('spawn').Pool(1) as p: print(p.map(f, range(5)))",
    "subprocess": "import subprocess, sys\n"
    "print(subprocess.run([sys.executable, '-c', 'print(7)'], capture_output=True, text=True))",
    "fork": "import os\nprint('a', flush=True)\npid = os.fork()\nif pid == 0:\n    print('child'); os._exit(0)\n"
    "os.waitpid(pid, 0); print('parent')",
    "asyncio": "import asyncio\nasync def f():\n    await asyncio.sleep(0.01)\n    return 3\nprint(asyncio.run(f()))",
    "loopback": "import socket, threading\ns = socket.create_server(('127.0.0.1', 0))\n"
    "c = socket.create_connection(s.getsockname()); c.sendall(b'hi'); print(s.accept()[0].recv(2))",
    "temporary file": "import tempfile\nwith tempfile.NamedTemporaryFile() as f: f.write(b'a')\nprint('ok')",
    "inspect": "import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f))",
    "warnings": "import warnings\nwarnings.warn('careful')",
    "unraisable": "class A:\n    def __del__(self): 1 / 0\nA()",
    "limits": "import sys; print(sys.getrecursionlimit(), sys.flags.optimize, sys.flags.utf8_mode in (0, 1))",
    "signals": "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, "
    "signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGCHLD))",
}
STDIN = "first\nsecond\n"


def without_addresses(text: str, directory: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", text.replace(directory, ""))


@pytest.mark.parametrize("name", PROGRAMS)
async def test_program_runs_as_in_python(name: str, client: SandboxClient, tmp_path: Path) -> None:
    code = PROGRAMS[name]
    (tmp_path / "main.py").write_text(code)
    expected = subprocess.run(
        [sys.executable, "-X", "utf8", f"{tmp_path}/main.py"],
        input=STDIN,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
    )
    got = await client.run(code, stdin=STDIN)
    assert got.stdout == expected.stdout
    assert without_addresses(got.stderr, "/tmp/work/") == without_addresses(expected.stderr, f"{tmp_path}/")
    assert got.return_code == expected.returncode
    shown = await client.run(code, stdin=STDIN, show_value=True)
    if name not in (
        "unraisable",
        "atexit that fails",
    ):  # the value is kept as `_`, or the traceback is that of the package
        assert without_addresses(shown.stderr, "/tmp/work/") == without_addresses(expected.stderr, f"{tmp_path}/")
    assert shown.return_code == expected.returncode


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("1 + 1", "2\n"),
        ("print('a')\n'b'", "a\n'b'\n"),
        ("x = 1\nx  # the answer", "1\n"),
        ("x = 1\nx; # not this one", ""),
        ("(\n 'two',\n 'lines'\n)", "('two', 'lines')\n"),
        ("None", ""),
        ("x = 3", ""),
        ("for i in range(3): i", ""),
        ("import sys; sys.stdout.write('a\\n')", "a\n"),
        ("# -*- coding: utf-8 -*-\n'é'", "'é'\n"),
        ("'the only words'", "'the only words'\n"),
        ("from __future__ import annotations\n1", "1\n"),
        ("1;2", "2\n"),
        ("def f():\n    'é'; return 5\nf()", "5\n"),
        ("x = " + "+".join("1" * 900) + "\nx", "900\n"),
    ],
)
async def test_value_of_last_expression_is_printed(client: SandboxClient, code: str, shown: str) -> None:
    assert (await client.run(code, show_value=True)).stdout == shown


async def test_error_in_last_expression_has_its_line(client: SandboxClient) -> None:
    done = await client.run("x = 0\n\n1 / x", show_value=True)
    assert (done.stdout, done.return_code) == ("", 1)
    assert "line 3, in <module>\n    1 / x\n    ~~^~~\n" in done.stderr
    exited = await client.run("import sys\nsys.exit(4)", show_value=True)
    assert (exited.return_code, exited.stderr) == (4, "")


async def test_random_numbers_differ_between_runs(client: SandboxClient) -> None:
    code = (
        "import random, uuid, os, numpy\nprint(random.random(), uuid.uuid4(), os.urandom(4).hex(), numpy.random.rand())"
    )
    runs = [(await client.run(code)).stdout.split() for _ in range(4)]
    assert all(len(set(column)) == 4 for column in zip(*runs, strict=True))


async def test_timeout_keeps_output_and_traceback(client: SandboxClient) -> None:
    done = await client.run("print('started')\nwhile True:\n    x = 1", run_timeout=1)
    assert done.outcome == "timeout"
    assert done.return_code is None
    assert done.stdout == "started\n"
    assert re.search(r"main.py\", line [23]", done.stderr)
    assert done.execution_time >= 1


async def test_program_that_ignores_sigint_is_killed(client: SandboxClient) -> None:
    code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('started', flush=True)\nwhile True: pass"
    done = await client.run(code, run_timeout=1)
    assert (done.outcome, done.stdout) == ("timeout", "started\n")
