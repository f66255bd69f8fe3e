"""Sessions: interpreters that keep their variables between requests."""

import asyncio
import base64
import time

import pytest

from sandbox.serving import name_process, serving, wait_until
from toolroll.errors import SandboxRefused, SandboxUnavailable
from toolroll.sandbox.client import SandboxClient
from toolroll.sandbox.execution import Execution
from toolroll.sandbox.server.execution.executor import RESUMED_CHECK_INTERVAL_S

pytestmark = pytest.mark.sandbox


async def test_variables_files_and_imports_are_kept(client: SandboxClient) -> None:
    first = await client.run("import math\nx = 41\nopen('f', 'w').write('kept')", session_id="kept")
    assert (first.outcome, first.session_is_new) == ("ok", True)
    second = await client.run("x += 1\nprint(math.floor(x + 0.5), open('f').read())\nx", session_id="kept")
    assert (second.stdout, second.session_is_new) == ("42 kept\n42\n", False)
    other = await client.run("x", session_id="other")
    assert (other.outcome, other.session_is_new) == ("failed", True)
    assert other.stderr.endswith("NameError: name 'x' is not defined\n")


async def test_failed_cell_keeps_session(client: SandboxClient) -> None:
    await client.run("x = 1", session_id="failing")
    failed = await client.run("def f():\n    return 1 / 0\nf()", session_id="failing")
    assert (failed.outcome, failed.return_code) == ("failed", 1)
    assert "line 2, in f" in failed.stderr
    assert "toolroll/sandbox" not in failed.stderr
    assert (await client.run("x", session_id="failing")).stdout == "1\n"


async def test_timed_out_cell_is_interrupted_and_session_kept(client: SandboxClient) -> None:
    await client.run("x = 1", session_id="slow")
    slow = await client.run("print('started')\nwhile True: x += 1", session_id="slow", run_timeout=1)
    assert (slow.outcome, slow.stdout) == ("timeout", "started\n")
    after = await client.run("x > 1", session_id="slow")
    assert (after.stdout, after.session_is_new) == ("True\n", False)


async def test_cell_that_ignores_interrupt_ends_session(client: SandboxClient) -> None:
    code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('started', flush=True)\nwhile True: pass"
    stuck = await client.run(code, session_id="stuck", run_timeout=1)
    assert (stuck.outcome, stuck.stdout) == ("timeout", "started\n")
    assert (await client.run("1", session_id="stuck")).session_is_new


@pytest.mark.parametrize(
    ("code", "return_code"),
    [
        ("import os; os._exit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import ctypes; ctypes.string_at(0)", -11),
        ("import os; os.closerange(0, 1000)", 1),
        ("import os, struct; os.write(3, struct.pack('>I', 4) + b'oops')", -9),
        ("import os, struct; os.write(3, struct.pack('>I', 2**31))", -9),
        ("import os, struct; os.write(3, 2 * (struct.pack('>I', 2) + b'{}'))", -9),
    ],
)
async def test_cell_that_breaks_interpreter_ends_session(client: SandboxClient, code: str, return_code: int) -> None:
    name = f"broken-{abs(hash(code))}"
    await client.run("x = 1", session_id=name)
    broken = await client.run(code, session_id=name, run_timeout=3)
    assert (broken.outcome, broken.return_code) == ("failed", return_code)
    after = await client.run("print('again')", session_id=name)
    assert (after.stdout, after.session_is_new) == ("again\n", True)


async def test_cell_larger_than_buffers_is_run(client: SandboxClient) -> None:
    large = await client.run(f"# {'x' * 2_000_000}\nprint('y' * 500_000)", session_id="large")
    assert (large.outcome, large.stdout) == ("ok", "y" * 500_000 + "\n")


GREEDY = {
    "at once": "kept = bytearray(1 << 30)",
    "large pieces": "while True: kept.append(b'x' * 10_000_000)",
    "small pieces": "while True: kept.append(str(len(kept)))",
    "arrays": "import numpy\nwhile True: kept.append(numpy.ones(100_000))",
    "local variable": "def fill():\n    local = []\n    while True: local.append(str(len(local)))\nfill()",
}


@pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, code in GREEDY.items()])
@pytest.mark.parametrize("megabytes", [100, 512])
async def test_out_of_memory_cell_keeps_session(client: SandboxClient, code: str, megabytes: int) -> None:
    name = f"greedy-{megabytes}-{abs(hash(code))}"

    async def run(code: str) -> Execution:
        return await client.run(code, session_id=name, memory_limit_mb=megabytes, show_value=True, run_timeout=60)

    await run("x, kept = 1, []")
    done = await run(code)
    assert (done.outcome, done.return_code, done.session_is_over) == ("out_of_memory", 1, False)
    assert "MemoryError" in done.stderr.splitlines()[-1]
    assert "During handling" not in done.stderr
    assert "sandbox/server" not in done.stderr, "frames of the server are hidden"
    if "local" not in code:  # freed when the function returns
        await run("del kept")
    assert (await run("x, len(bytearray(50_000_000))")).stdout == "(1, 50000000)\n"


async def test_memory_limit_applies_to_whole_session(client: SandboxClient) -> None:
    done = [
        await client.run(f"part{number} = bytearray(60_000_000)", session_id="adding", memory_limit_mb=100)
        for number in range(2)
    ]
    assert [one.outcome for one in done] == ["ok", "out_of_memory"]


async def test_out_of_memory_notebook_continues(client: SandboxClient) -> None:
    fill = "kept = []\nwhile True: kept.append(str(len(kept)))"
    done = await client.run_jupyter([fill, "del kept\n1 + 1"], memory_limit_mb=100)
    assert done.outcome == "out_of_memory"
    assert [one["ename"] for one in done.cells[0].error] == ["MemoryError"]
    assert done.cells[1].display[0]["text/plain"] == "2"


async def test_rlimits_set_by_program_are_kept(client: SandboxClient) -> None:
    """The harnesses of HumanEval and APPS set such limits."""
    lower = "import resource, sys\nfor what in (resource.RLIMIT_AS, resource.RLIMIT_DATA):\n    {}\n"
    hard = lower.format("resource.setrlimit(what, (900 << 20, 900 << 20))")
    for _ in range(2):
        done = await client.run(hard + "print('still here')", session_id="lowers")
        assert (done.outcome, done.stdout) == ("ok", "still here\n")
    script = await client.run(hard + "print('over')\nsys.exit(3)")
    assert (script.return_code, script.stdout, script.stderr) == (3, "over\n", "")
    soft = lower.format("resource.setrlimit(what, (700 << 20, resource.getrlimit(what)[1]))")
    await client.run(soft, session_id="softly")
    seen = "[resource.getrlimit(what)[0] >> 20 for what in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]"
    kept = await client.run(seen, session_id="softly", show_value=True)
    assert kept.stdout == "[700, 700]\n"


async def test_nested_cell_keeps_memory_headroom(client: SandboxClient) -> None:
    code = "kept = []\nget_ipython().run_cell('1')\nwhile True: kept.append(str(len(kept)))"
    done = await client.run(code, session_id="nested", memory_limit_mb=100)
    assert (done.outcome, done.session_is_over) == ("out_of_memory", False)
    assert done.stderr.splitlines()[-1] == "MemoryError"


async def test_programs_succeed_while_many_sessions_end(client: SandboxClient) -> None:
    """The sessions use more cgroups than the server keeps, so that cgroups are removed meanwhile."""
    names = [f"many-{number}" for number in range(8)]
    await asyncio.gather(*(client.run("1", session_id=name) for name in names))
    programs = [asyncio.create_task(client.run("import time; time.sleep(2); print(1)")) for _ in range(3)]
    await asyncio.sleep(0.5)
    await asyncio.gather(*map(client.end_session, names))
    for done in await asyncio.gather(*programs):
        assert (done.stdout, done.attempts) == ("1\n", 1)


async def test_memory_limit_can_be_set_per_session(client: SandboxClient) -> None:
    done = await client.run("x = bytearray(400_000_000)\nlen(x)", session_id="small", memory_limit_mb=100)
    assert done.outcome == "out_of_memory"
    assert (await client.run("len(bytearray(400_000_000))", session_id="large")).stdout == "400000000\n"


async def test_deleted_session_kills_running_cell(server: str, client: SandboxClient) -> None:
    await client.run("import time", session_id="ended")
    running = asyncio.create_task(client.run("time.sleep(60)", session_id="ended", run_timeout=60))
    waiting = asyncio.create_task(client.run("print('never')", session_id="ended"))
    await asyncio.sleep(0.3)
    began = time.monotonic()
    assert await client.end_session("ended")
    killed = await running
    assert (killed.return_code, killed.session_is_over) == (-9, True)
    for late in (waiting, client.run("1", session_id="ended")):
        with pytest.raises(SandboxRefused, match="was deleted"):
            await late
    assert time.monotonic() - began < 30, "the cell ran to its end"
    assert not await client.end_session("ended")
    assert not await client.end_session("there-was-none")


async def test_session_deleted_before_its_start_does_not_run() -> None:
    with serving() as server:  # its interpreters for sessions start in a second or two
        async with SandboxClient(server.url) as client:
            cell = f"{name_process('late')}\nimport time; time.sleep(60)"
            waiting = asyncio.create_task(client.run(cell, session_id="early", run_timeout=60))
            async with asyncio.timeout(30):
                while not (await client.ping()).running:
                    await asyncio.sleep(0.01)
                assert await client.end_session("early")
                with pytest.raises(SandboxRefused, match="was deleted"):
                    await waiting
            assert not server.processes_named("late")


async def test_starved_cell_ends_session(client: SandboxClient) -> None:
    """Else, a retry would run the cell again on the variables that it has changed."""
    await client.run("x = 1", session_id="starved")
    cell, limits = "import time; time.sleep(60)", {"run_timeout": 30, "wall_timeout": 0.5}
    with pytest.raises(SandboxUnavailable, match="too busy"):
        await client.run(cell, session_id="starved", deadline=time.monotonic() + 3, **limits)
    assert (await client.run("1", session_id="starved")).session_is_new


async def test_end_of_session_is_reported_once(client: SandboxClient) -> None:
    await client.run("x = 1", session_id="once-over")
    assert (await client.run("import os; os._exit(0)", session_id="once-over")).session_is_over
    after = await client.run("1", session_id="once-over")
    assert (after.session_is_new, after.session_died) == (True, False)


async def test_session_is_over_is_reported(client: SandboxClient) -> None:
    assert (await client.run("1 / 0", session_id="over")).session_is_over is False
    assert (await client.run("exit()", session_id="over")).session_is_over is False
    assert (await client.run("import os; os._exit(0)", session_id="over")).session_is_over is True
    assert (await client.run("1")).session_is_over is None


async def test_displayed_value_is_on_a_separate_line(client: SandboxClient) -> None:
    assert (await client.run("print('4', end='')\n2", session_id="lines")).stdout == "4\n2\n"


async def test_cells_of_a_session_run_sequentially(client: SandboxClient) -> None:
    await client.run("order = []", session_id="turns")
    cells = [f"import time; order.append({i}); time.sleep(0.02); order.append({i})" for i in range(6)]
    await asyncio.gather(*(client.run(cell, session_id="turns") for cell in cells))
    order = eval((await client.run("order", session_id="turns")).stdout)
    assert all(order[i] == order[i + 1] for i in range(0, 12, 2))


async def test_output_is_attributed_to_its_cell(client: SandboxClient) -> None:
    for number in range(30):
        done = await client.run(f"print({number}, end='')", session_id="output")
        assert done.stdout == str(number)


async def test_long_output_is_truncated(client: SandboxClient) -> None:
    done = await client.run("print('x' * 3_000_000)", session_id="much")
    assert (len(done.stdout), done.stdout_truncated) == (1 << 20, True)
    assert (await client.run("print('y')", session_id="much")).stdout == "y\n"


async def test_unsupported_session_request_is_rejected(client: SandboxClient) -> None:
    with pytest.raises(SandboxRefused, match="stdin"):
        await client.run("1", session_id="a", stdin="x")
    with pytest.raises(SandboxRefused, match="Python"):
        await client.run("1", "bash", session_id="a")


async def test_longest_idle_session_is_evicted() -> None:
    with serving("--sessions", "2", "--capacity", "4") as running:
        async with SandboxClient(running.url) as client:
            for name in ("a", "b", "c"):
                assert (await client.run("x = 1", session_id=name)).session_is_new
            assert not (await client.run("x", session_id="c")).session_is_new
            assert not (await client.run("x", session_id="b")).session_is_new
            assert (await client.run("1", session_id="a")).session_is_new  # evicts c, which was idle longest
            assert (await client.run("1", session_id="c")).session_is_new


async def test_sessions_in_use_are_not_evicted() -> None:
    with serving("--sessions", "2", "--capacity", "4") as running:
        async with SandboxClient(running.url) as client:
            for name in "ab":
                await client.run("import time", session_id=name)
            busy = [asyncio.create_task(client.run("time.sleep(8)", session_id=name)) for name in "ab"]
            await asyncio.sleep(1)
            with pytest.raises(SandboxUnavailable, match="in use"):
                await client.run("1", session_id="c", deadline=time.monotonic() + 2)
            answers = await asyncio.gather(*busy)
            assert not any(done.session_is_new for done in answers)


async def test_idle_sessions_expire() -> None:
    with serving("--session-ttl", "1") as running:
        async with SandboxClient(running.url) as client:
            assert (await client.run(name_process("idle"), session_id="a")).session_is_new
            assert running.processes_named("idle")
            assert await asyncio.to_thread(wait_until, lambda: not running.processes_named("idle"))
            assert (await client.run("x", session_id="a")).session_is_new


RESUMES_ITSELF = """
import ctypes, signal, struct
signal.signal(signal.SIGCONT, lambda *_: None)
libc, timer = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p()
event = struct.pack("qii48x", 0, signal.SIGCONT, 0)
assert libc.timer_create(1, event, ctypes.byref(timer)) == 0
assert libc.timer_settime(timer, 0, struct.pack("qqqq", 0, 20_000_000, 0, 20_000_000), None) == 0
import threading
def spin():
    while True: pass
threading.Thread(target=spin, daemon=True).start()
"""


async def test_session_that_resumes_itself_is_ended(client: SandboxClient) -> None:
    done = await client.run(RESUMES_ITSELF, session_id="resumes")
    assert done.outcome == "ok", done.stderr
    await client.run("x = 1", session_id="suspended")
    await asyncio.sleep(3 * RESUMED_CHECK_INTERVAL_S)
    assert (await client.run("1", session_id="resumes")).session_is_new
    assert not (await client.run("x", session_id="suspended")).session_is_new


async def test_resent_cell_runs_once(server: str) -> None:
    import aiohttp

    body = {"code": "n = globals().get('n', 0) + 1\nprint(n)", "language": "python", "session_id": "once"}
    async with aiohttp.ClientSession() as session:
        for _ in range(3):
            async with session.post(f"{server}/run_code", json={**body, "idempotency_key": "cell-1"}) as response:
                assert (await response.json())["run_result"]["stdout"] == "1\n"


# --- notebooks


async def test_cells_display_values_images_and_errors(client: SandboxClient) -> None:
    notebook = await client.run_jupyter(
        [
            "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\nplt.show()",
            "import pandas; pandas.DataFrame({'a': [1]})",
            "%matplotlib inline\n!echo shell",
            "1 / 0",
        ]
    )
    picture, table, shell, error = notebook.cells
    (image,) = [one["image/png"] for one in picture.display if "image/png" in one]
    assert base64.b64decode(image).startswith(b"\x89PNG")
    assert "<table" in table.display[0]["text/html"]
    assert shell.stdout == "shell\n"
    assert error.error[0]["ename"] == "ZeroDivisionError"
    assert not any("\x1b[" in line for line in error.error[0]["traceback"])


async def test_notebook_reads_and_returns_files(client: SandboxClient) -> None:
    notebook = await client.run_jupyter(
        ["text = open('in.txt').read()", "open('out.txt', 'w').write(text[::-1])"],
        files={"in.txt": b"abc"},
        fetch_files=["out.txt", "missing"],
    )
    assert notebook.files == {"out.txt": b"cba"}


async def test_notebook_is_isolated_and_times_out(client: SandboxClient) -> None:
    await client.run_jupyter(["x = 1"])
    (cell,) = (await client.run_jupyter(["x"])).cells
    assert cell.error[0]["ename"] == "NameError"
    began = time.monotonic()
    slow = await client.run_jupyter(["import time", "time.sleep(60)", "1"], total_timeout=2)
    assert time.monotonic() - began < 40, "the cell ran to its end"
    assert slow.outcome == "timeout"
    assert len(slow.cells) == 2
    limited = await client.run_jupyter(["while True: pass", "1"], cell_timeout=0.3)
    assert limited.outcome == "timeout"


async def test_notebook_of_sleeping_cells_times_out(client: SandboxClient) -> None:
    cells = ["import time; time.sleep(4)", "time.sleep(4)"]
    slow = await client.run_jupyter(cells, total_timeout=2, deadline=time.monotonic() + 60)
    assert (slow.outcome, len(slow.cells)) == ("timeout", 2)
