"""Each cell gets one well-formed answer and the namespace is kept, or the process ends."""

import json
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import scaled

pytestmark = pytest.mark.sandbox

TIMEOUT_S = 20.0
PNG = b"\x89PNG\r\n"
ZERO = {"ename": "ZeroDivisionError", "evalue": "division by zero"}

ZYGOTE = """
import gc, os, signal, socket, sys
from toolroll.sandbox.server.interpreter import notebook_kernel, script_runner

def threads():
    return len(os.listdir("/proc/self/task"))

requests = socket.socket(fileno=int(sys.argv[1]))
script_runner.open_streams()
before = threads()
notebook_kernel.prepare()
notebook_kernel.prepare()
requests.send(b"%d %d" % (before, threads()))
gc.freeze()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    packet, fds, _, _ = socket.recv_fds(requests, 10, 3)
    if not packet:
        break
    if pid := os.fork():
        for fd in fds:
            os.close(fd)
        requests.send(b"%d" % pid)
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    requests.close()
    for number, fd in enumerate(fds[1:], 1):
        os.dup2(fd, number)
        os.close(fd)
    notebook_kernel.serve(fds[0], os.getcwd() + "/main.py")
"""


class KernelZygote:
    """A process with a prepared kernel, which forks itself for each session."""

    def __init__(self, directory: Path, preload: str = "import matplotlib.pyplot, numpy, pandas") -> None:
        (directory / "work").mkdir()
        self.requests, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.requests.settimeout(TIMEOUT_S * 3)
        self.process = subprocess.Popen(
            [sys.executable, "-c", preload + ZYGOTE, str(child_end.fileno())],
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=directory / "work",
            env={"PATH": os.environ["PATH"], "HOME": str(directory), "OPENBLAS_NUM_THREADS": "1"},
        )
        child_end.close()
        self.threads = tuple(map(int, self.requests.recv(100).split()))

    def close(self) -> None:
        self.requests.close()
        self.process.wait(TIMEOUT_S)


class Session:
    """The server's side of a session."""

    def __init__(self, zygote: KernelZygote) -> None:
        self.channel, child_end = socket.socketpair()
        pipes = {name: os.pipe() for name in ("stdout", "stderr")}
        ends = [child_end.fileno(), *(end for _, end in pipes.values())]
        socket.send_fds(zygote.requests, [b"new"], ends)
        child_end.close()
        for _, end in pipes.values():
            os.close(end)
        self.pid = int(zygote.requests.recv(100))
        self.pipes = {read: name for name, (read, _) in pipes.items()}
        self.written = {"stdout": b"", "stderr": b""}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        for fd in self.pipes:
            os.close(fd)

    def send(self, code: str, mode: str = "notebook") -> None:
        body = json.dumps({"code": code, "mode": mode}).encode()
        self.channel.sendall(struct.pack(">I", len(body)) + body)

    def read_answer(self) -> dict[str, Any]:
        """Return the answer, with `stdout` and `stderr` added. Raise EOFError if the process ends instead."""
        message = b""
        until = time.monotonic() + TIMEOUT_S
        while len(message) < 4 or len(message) < 4 + struct.unpack(">I", message[:4])[0]:
            if self.channel in self._drain(until - time.monotonic()):
                part = self.channel.recv(1 << 20)
                if not part:
                    raise EOFError
                message += part
        while any(fd in self.pipes for fd in self._drain(0)):
            pass
        answer: dict[str, Any] = orjson.loads(message[4:])
        assert set(answer) == {"ok", "display", "error", "out_of_memory", "exit", "seconds", "cpu"}
        assert answer["ok"] == (answer["error"] is None and not answer["exit"])
        for name in self.written:
            answer[name] = self.written[name].decode()
            self.written[name] = b""
        return answer

    def run(self, code: str, mode: str = "notebook") -> dict[str, Any]:
        self.send(code, mode)
        return self.read_answer()

    def value(self, code: str) -> str:
        """Return the text of the last expression of a cell that succeeds."""
        answer = self.run(code)
        assert answer["ok"], answer
        return str(answer["display"][-1]["text/plain"])

    def interrupt_after_output(self, word: bytes) -> None:
        until = time.monotonic() + TIMEOUT_S
        while word not in self.written["stdout"]:
            self._drain(until - time.monotonic())
        os.kill(self.pid, signal.SIGINT)
        # Repeated: Python handles a signal that arrives just before a blocking system call only after it.
        while not select.select([self.channel], [], [], 0.5)[0] and time.monotonic() < until:
            os.kill(self.pid, signal.SIGINT)

    def has_ended(self) -> bool:
        """Return True if the process ends within the timeout."""
        until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until:
            if not Path(f"/proc/{self.pid}").exists():
                return True
            time.sleep(0.005)
        return False

    def _drain(self, seconds: float) -> list[Any]:
        assert seconds >= 0, "no answer in time"
        ready, _, _ = select.select([self.channel, *self.pipes], [], [], seconds)
        for fd in set(ready) & set(self.pipes):
            if not (part := os.read(fd, 1 << 20)):
                ready.remove(fd)  # end of file
            self.written[self.pipes[fd]] += part
        return ready


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelZygote]:
    zygote = KernelZygote(tmp_path_factory.mktemp("notebook"))
    yield zygote
    zygote.close()


@pytest.fixture
def session(zygote: KernelZygote) -> Iterator[Session]:
    with Session(zygote) as session:
        yield session


def test_preparing_starts_no_thread(zygote: KernelZygote) -> None:
    before, after = zygote.threads
    assert before == after


def test_session_starts_with_clean_namespace(session: Session) -> None:
    assert session.value("Out, len(In), [name for name in globals() if name[0] != '_']") == (
        "({}, 2, ['In', 'Out', 'get_ipython', 'exit', 'quit', 'open'])"
    )
    assert session.value("import sys, os; hasattr(sys, 'last_value'), os.listdir()") == "(False, [])"
    assert session.value("os.path.exists(os.path.expanduser('~/.ipython'))") == "False"


def test_namespace_is_kept_between_cells(session: Session) -> None:
    first = session.run("x = 41\nprint('one')")
    assert (first["ok"], first["stdout"], first["display"]) == (True, "one\n", [])
    assert session.run("x += 1", "script")["ok"]
    assert session.run("x")["display"] == [{"text/plain": "42"}]
    assert session.value("_ + _3") == "84"
    assert session.run("x;")["display"] == []
    assert session.run("")["ok"]


def test_namespace_is_that_of_main(session: Session) -> None:
    assert session.value("__name__") == "'__main__'"
    assert session.value("import sys, os; sys.argv[0] == os.path.join(os.getcwd(), 'main.py')") == "True"
    session.run("def double(x):\n    return 2 * x\nimport multiprocessing, pickle")
    assert session.value("pickle.loads(pickle.dumps(double)) is double") == "True"
    pool = "with multiprocessing.get_context('fork').Pool(2) as pool:\n    y = pool.map(double, range(3))\ny"
    assert session.value(pool) == "[0, 2, 4]"


def test_sessions_have_different_random_numbers(zygote: KernelZygote) -> None:
    drawn = []
    for _ in range(2):
        with Session(zygote) as session:
            drawn.append(session.value("import random, numpy; random.random(), float(numpy.random.rand())"))
    assert drawn[0] != drawn[1]
    assert drawn[0].split()[0] != drawn[1].split()[0]


def test_displays_are_ordered_and_typed(session: Session) -> None:
    answer = session.run(
        "from IPython.display import HTML, Latex, SVG\n"
        "display(HTML('<b>x</b>'), Latex('$x$'))\nprint('text')\n"
        "display(SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>'))\n'last'"
    )
    assert [set(data) for data in answer["display"]] == [
        {"text/html", "text/plain"}, {"text/latex", "text/plain"}, {"image/svg+xml", "text/plain"}, {"text/plain"},
    ]  # fmt: skip
    assert answer["display"][0]["text/html"] == "<b>x</b>"
    assert answer["stdout"] == "text\n"


def test_dataframe_is_html(session: Session) -> None:
    (data,) = session.run("import pandas\npandas.DataFrame({'a': [1]})")["display"]
    assert "<table" in data["text/html"]
    assert data["text/plain"] == "   a\n0  1"


@pytest.mark.parametrize("mode", ["script", "notebook"])
@pytest.mark.parametrize("end", ["", "plt.show()", "x = 1"])
def test_figures_are_images(session: Session, mode: str, end: str) -> None:
    answer = session.run(f"import matplotlib.pyplot as plt\nplt.plot([1, 2]);\n{end}", mode)
    data = answer["display"][-1]
    assert b64decode(data["image/png"]).startswith(PNG)
    assert data["text/plain"] == "<Figure size 640x480 with 1 Axes>"
    assert answer["stderr"] == ""
    assert session.run("plt.get_fignums()")["display"] == [{"text/plain": "[]"}]  # a figure is shown once
    assert session.run("%matplotlib inline")["ok"]


def test_matplotlib_imported_by_a_cell_works(tmp_path: Path) -> None:
    zygote = KernelZygote(tmp_path, preload="")
    with Session(zygote) as session:
        assert session.value("import sys\n'matplotlib' in sys.modules") == "False"
        (data,) = session.run("import matplotlib.pyplot as plt\nplt.plot([1, 2]);")["display"]
        assert b64decode(data["image/png"]).startswith(PNG)
    zygote.close()


def test_notebook_error_is_in_the_answer(session: Session) -> None:
    session.run("def f():\n    return 1 / 0")
    answer = session.run("x = 1\nf()")
    assert not answer["ok"]
    assert answer["stderr"] == answer["stdout"] == ""
    assert answer["error"].items() >= ZERO.items()
    text = "\n".join(answer["error"]["traceback"])
    assert "Cell In[2], line 2" in text
    assert "----> 2 return 1 / 0" in text.replace("     ", " ")
    assert "\x1b" not in text
    assert "notebook_kernel.py" not in text
    assert "ipython_shell.py" not in text
    assert session.value("x") == "1"


def test_script_error_is_written_to_stderr(session: Session) -> None:
    session.run("def f():\n    return 1 / 0", "script")
    answer = session.run("print('so far')\nf()", "script")
    assert answer["stdout"] == "so far\n"
    assert answer["stderr"].replace("           ~~^~~\n", "").replace("    ~~^~~\n", "") == (
        "Traceback (most recent call last):\n"
        '  File "<cell 2>", line 2, in <module>\n    f()\n'
        '  File "<cell 1>", line 2, in f\n    return 1 / 0\n'
        "ZeroDivisionError: division by zero\n"
    )
    assert answer["error"].items() >= ZERO.items()
    assert "".join(answer["error"]["traceback"]) == answer["stderr"]


@pytest.mark.parametrize("mode", ["script", "notebook"])
@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("x = (1 +", "SyntaxError"),
        ("if 1:\nx", "IndentationError"),
        ("return 1", "SyntaxError"),
        ("x = '\0'", ("SyntaxError", "ValueError")),
        ("'\ud800'", "UnicodeEncodeError"),
    ],
)
def test_invalid_code_is_a_syntax_error(session: Session, code: str, name: str, mode: str) -> None:
    answer = session.run(code, mode)
    assert answer["error"]["ename"] in name
    assert answer["error"]["traceback"]
    assert (answer["stderr"] == "") == (mode == "notebook")
    assert "Traceback" not in answer["stderr"]
    assert "never awaited" not in session.run("import gc; gc.collect()")["stderr"]


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("raise ExceptionGroup('two', [ValueError(1), TypeError(2)])", "ExceptionGroup"),
        ("class E(Exception):\n    def __str__(self): raise self\nraise E", "E"),
        ("class E(Exception):\n    def __len__(self): return 0\nraise E", "E"),
        ("def f(): f()\nf()", "RecursionError"),
        ("%no_such_magic", "UsageError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("raise ValueError('x' * 10**7)", "ValueError"),
        ("raise ValueError('\\ud800')", "ValueError"),
        ("import asyncio\nawait asyncio.sleep(0)\nawait 1", "TypeError"),
    ],
)
@pytest.mark.parametrize("mode", ["script", "notebook"])
def test_unusual_exceptions_are_reported(session: Session, code: str, name: str, mode: str) -> None:
    answer = session.run(code, mode)
    assert answer["error"]["ename"] == name
    assert len(str(answer["error"])) < 1 << 20
    assert name in "".join(answer["error"]["traceback"])
    assert (answer["stderr"] == "") == (mode == "notebook")
    assert session.value("1") == "1"


@pytest.mark.parametrize(
    ("code", "status", "stderr"),
    [
        ("exit(3)", 3, ""),
        ("quit()", 0, ""),
        ("exit", 0, ""),
        ("import sys; sys.exit('so')", 1, "so\n"),
        ("raise SystemExit(-1)", 255, ""),
        ("import sys\nsys.exit(10**30)", 0, ""),
        ("import warnings\nwarnings.simplefilter('error')\nexit(4)", 4, ""),
    ],
)
def test_exit_ends_only_the_cell(session: Session, code: str, status: int, stderr: str) -> None:
    session.run("x = 1")
    answer = session.run(f"{code}\nx = 2" if "\n" in code else code)
    assert (answer["exit"], answer["error"], answer["stderr"]) == (status, None, stderr)
    assert session.value("x") == "1"
    assert session.run("input()")["error"]["ename"] == "EOFError"  # exit() of the site module closes stdin


@pytest.mark.parametrize(
    "code",
    [
        "while True: time.sleep(60)",
        "while True: pass",
        "await asyncio.sleep(60)",
        "asyncio.run(asyncio.sleep(60))",
        "!sleep 60",
        "threading.Event().wait()",
        "class Slow:\n    def __repr__(self):\n        while True: pass\ndisplay(Slow())",
    ],
)
def test_interrupt_ends_only_the_cell(session: Session, code: str) -> None:
    session.run("import asyncio, threading, time")
    for mode in ("script", "notebook"):
        session.send(f"x = '{mode}'; print('go', flush=True)\n{code}\nx = 'continued'", mode)
        session.interrupt_after_output(b"go")
        answer = session.read_answer()
        assert answer["error"]["ename"] == "KeyboardInterrupt"
        assert answer["stderr"].endswith("KeyboardInterrupt\n" if mode == "script" else "")
        assert session.value("x") == repr(mode)
        assert session.value("await asyncio.sleep(0)\nx") == repr(mode)


def test_interrupt_between_cells_is_ignored(session: Session) -> None:
    session.run("import signal\nsignal.signal(signal.SIGINT, signal.SIG_DFL)")
    for _ in range(3):
        os.kill(session.pid, signal.SIGINT)
        assert session.run("x = 1")["error"] in (None, {"ename": "KeyboardInterrupt"})


def test_many_interrupts_keep_one_answer_per_cell(session: Session) -> None:
    session.run("n = 0")
    for _ in range(100):
        session.send("n += 1")
        for _ in range(5):
            os.kill(session.pid, signal.SIGINT)
            time.sleep(0.0002)
        answer = session.read_answer()
        assert answer["ok"] or answer["error"]["ename"] == "KeyboardInterrupt"
    assert 0 <= int(session.value("n")) <= 100


def test_magics_work(session: Session) -> None:
    assert session.run("!echo one; echo two >&2; exit 3")["stdout"] == "one\ntwo\n"
    assert session.value("_exit_code") == "3"
    assert session.value("word = 'w'\nlines = !echo {word}\nlines") == "['w']"
    assert "Wall time" in session.run("%time x = 1")["stdout"]
    assert session.run("%%bash\necho from bash")["stdout"] == "from bash\n"
    assert session.run("%%capture taken\nprint(1)\n!echo 2")["stdout"] == ""
    assert session.value("taken.stdout") == r"'1\n2\n'"
    assert session.run("%cd -q /\n!pwd")["stdout"] == "/\n"
    assert "Docstring" in session.run("len?")["display"][0]["text/plain"]
    assert session.value("def join(*words): return words\n;join one two") == "('one two',)"


def test_cell_can_await(session: Session) -> None:
    assert session.value("import asyncio\nx = await asyncio.sleep(0, 'done')\nx") == "'done'"


@pytest.mark.parametrize(
    "damage",
    [
        "import sys; sys.stdout.close(); sys.stderr.close()",
        "import sys; sys.stdout = None; del sys.stderr",
        "import sys; sys.__stdout__.close(); sys.stdout = sys.__stdout__",
        "import os; os.fork()",
        "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)",
        "%reset -f",
        "del get_ipython, __name__",
    ],
)
def test_session_survives_damage(session: Session, damage: str) -> None:
    session.run(damage)
    answer = session.run("print(1)\n2", "script")
    assert (answer["ok"], answer["stdout"], answer["display"]) == (True, "1\n", [{"text/plain": "2"}])
    assert "ZeroDivisionError" in session.run("1 / 0", "script")["stderr"]


@pytest.mark.parametrize(
    "damage",
    [
        "import os; os._exit(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os; os.closerange(1, 100)",
        "import builtins; vars(builtins).clear()",
        "import ctypes; ctypes.string_at(0)",
    ],
)
def test_fatal_damage_ends_the_process(session: Session, damage: str) -> None:
    with pytest.raises(EOFError):
        session.run(f"{damage}\n1 + 1")
    assert session.has_ended()


def test_process_ends_when_channel_closes(session: Session) -> None:
    session.run("import threading, subprocess\nthreading.Thread(target=threading.Event().wait).start()")
    session.channel.close()
    assert session.has_ended()


def test_leftover_process_does_not_hold_channel(session: Session) -> None:
    session.run(
        "import os, subprocess, time\nsubprocess.Popen(['sleep', '60'], close_fds=False)\n"
        "if os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n    os._exit(0)"
    )
    started_at = time.monotonic()
    with pytest.raises(EOFError):
        session.run("os._exit(0)")
    assert time.monotonic() - started_at < 30, "waited for the leftover processes"


def test_thread_output_is_in_the_next_answer(session: Session) -> None:
    session.run(
        "import threading\ngo, done = threading.Event(), threading.Event()\n"
        "def work():\n    go.wait()\n    print('late')\n    display('late')\n    done.set()\n"
        "threading.Thread(target=work, daemon=True).start()"
    )
    answer = session.run("go.set(); done.wait(10);")
    assert (answer["stdout"], answer["display"]) == ("late\n", [{"text/plain": "'late'"}])


def test_failing_display_does_not_fail_the_cell(session: Session) -> None:
    answer = session.run(
        "class Odd:\n    def _repr_html_(self): raise ValueError('no html')\n"
        "    def _repr_png_(self): return b'png'\n    def _repr_latex_(self): return 7\n"
        "    def __repr__(self): return 'odd \\ud800'\nOdd()"
    )
    assert answer["ok"]
    assert answer["display"] == [{"text/plain": "odd ?", "image/png": "cG5n"}]
    assert "no html" in answer["stderr"]
    assert session.run("class Worse:\n    def __repr__(self): 1 / 0\nWorse()")["display"] == []
    assert session.run("handle = display('x', display_id=True)\nhandle.update('y')")["display"] == [
        {"text/plain": "'x'"}
    ]


def test_oversized_displays_are_omitted_and_counted(session: Session) -> None:
    answer = session.run("for n in (2 * 10**7, 5, 2 * 10**7):\n    display({'text/plain': 'x' * n}, raw=True)")
    assert answer["display"] == [
        {"text/plain": "xxxxx"}, {"text/plain": "(2 outputs omitted: a cell can display at most 16 MiB)"}
    ]  # fmt: skip
    assert session.value("1") == "1"


def test_answer_has_wall_and_cpu_time(session: Session) -> None:
    slept = session.run("import time\ntime.sleep(0.2)")
    assert slept["seconds"] >= 0.2
    assert slept["cpu"] < 0.15
    worked = session.run(
        "import subprocess, sys\nsubprocess.run([sys.executable, '-Sc', 'sum(range(10**7))'])\nsum(range(10**7));"
    )
    assert worked["cpu"] > 0.1


def test_missing_ipython_is_an_error_of_each_cell(tmp_path: Path) -> None:
    ours, child_end = socket.socketpair()
    code = (
        "import sys\nsys.modules['IPython'] = None\nfrom toolroll.sandbox.server.interpreter import notebook_kernel\n"
        f"notebook_kernel.prepare()\nnotebook_kernel.serve({child_end.fileno()}, 'main.py')"
    )
    with ours, subprocess.Popen([sys.executable, "-c", code], pass_fds=[child_end.fileno()], cwd=tmp_path) as process:
        child_end.close()
        ours.settimeout(TIMEOUT_S)
        for _ in range(2):
            body = json.dumps({"code": "1", "mode": "script"}).encode()
            ours.sendall(struct.pack(">I", len(body)) + body)
            (size,) = struct.unpack(">I", ours.recv(4))
            answer = orjson.loads(ours.recv(size))
            assert (answer["ok"], answer["error"]["ename"]) == (False, "SandboxError")
            assert "pip install ipython" in answer["error"]["evalue"]
        ours.close()
        assert process.wait(TIMEOUT_S) == 0


WORDS = st.sampled_from(
    ["x", "1", " = ", "(", ")", "[", "]", "{", "}", "\n", "    ", "'", '"""', "#", ";", ":", ",", "?", "??", "%", "%%",
     "!", "\\", "await ", "async ", "def f():", "class A:", "return ", "yield ", "raise ", "lambda: ", "if 1:", "exit",
     "exit(2)", "display(", "print(", "%time ", "!echo ", "%%time\n", "%%capture\n", "_", "In", "Out", "del x",
     "f'{", "}'", "\t", "\r", "\f", "\0", "\u2028", "é", "\ud800", "import math", "1 / 0"]
)  # fmt: skip
CODE = st.one_of(st.lists(WORDS, max_size=12).map("".join), st.text(st.characters(codec="utf-8"), max_size=40))
QUICK = settings(
    max_examples=scaled(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.filterwarnings("ignore:`make_tokens_by_line`")
@settings(max_examples=scaled(300), deadline=None)
@given(code=CODE)
def test_cells_are_transformed_as_by_ipython(code: str) -> None:
    from IPython.core.inputtransformer2 import TransformerManager

    from toolroll.sandbox.server.interpreter.ipython_shell import _skip_needless_tokenizing

    def transformed(manager: Any) -> str:
        try:
            return str(manager.transform_cell(code))
        except SyntaxError:  # for example, of a continuation line of a magic
            return "SyntaxError"

    new_manager: Any = TransformerManager
    ours = new_manager()
    _skip_needless_tokenizing(ours)
    assert transformed(ours) == transformed(new_manager())


@QUICK
@given(code=CODE, mode=st.sampled_from(["script", "notebook"]))
def test_any_code_is_answered_and_next_cell_works(session: Session, code: str, mode: str) -> None:
    answer = session.run(code, mode)
    if answer["error"]:
        assert answer["error"]["traceback"]
        assert "toolroll/sandbox" not in "".join(answer["error"]["traceback"])
    if mode == "script" and answer["error"]:
        assert answer["stderr"]
    after = session.run("print('still here')", mode)
    assert (after["ok"], after["stdout"], after["stderr"]) == (True, "still here\n", "")


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.binary(), st.text(st.characters()), st.just(1j)),
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner), st.dictionaries(st.one_of(st.text(), st.integers(), st.none()), inner)
    ),
    max_leaves=10,
)  # fmt: skip


@QUICK
@given(data=st.dictionaries(st.one_of(st.sampled_from(["text/plain", "image/png"]), st.integers(), st.text()), VALUES))
def test_any_displayed_data_is_valid_json(session: Session, data: dict[Any, Any]) -> None:
    answer = session.run(f"from math import inf, nan\ndisplay({data!r}, raw=True)")
    assert answer["ok"], answer
    expected = {
        mime: value
        for mime, value in data.items()
        if isinstance(mime, str) and (value is None or isinstance(value, bool | float))
    }
    shown = answer["display"][0] if answer["display"] else {}
    for mime, value in expected.items():
        assert shown[mime] == (None if isinstance(value, float) and not math.isfinite(value) else value)
