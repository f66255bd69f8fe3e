"""Verdicts do not depend on the load of the machine, on other programs, or on how the server was started."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from textwrap import dedent
from typing import Any

import psutil
import pytest

from sandbox.machines import MACHINES
from sandbox.serving import Serving, name_process, serving, wait_until
from toolroll.errors import SandboxUnavailable
from toolroll.sandbox.client import SandboxClient
from toolroll.sandbox.execution import ExecutionOutcome
from toolroll.sandbox.protocol import max_wall_time

pytestmark = pytest.mark.sandbox

UNUSUAL_ATTRIBUTES = 'umask 077; trap "" HUP USR1 PIPE; ulimit -S -s 4096; exec 9</etc/passwd; exec "$@"'
"""Script that starts a server with process attributes that its programs must not inherit."""
OK, FAILED, TIMEOUT = ExecutionOutcome.OK, ExecutionOutcome.FAILED, ExecutionOutcome.TIMEOUT


@pytest.fixture(scope="module", params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Iterator[Serving]:
    if os.geteuid() != 0 and "--user" in MACHINES[request.param]:
        pytest.skip("NOT TESTED: requires root to become another user")
    with serving(wrapper=[*MACHINES[request.param], "/bin/sh", "-c", UNUSUAL_ATTRIBUTES, "sh"]) as running:
        yield running


@pytest.fixture
async def client(machine: Serving) -> AsyncIterator[SandboxClient]:
    async with SandboxClient(machine.url) as client:
        yield client


ATTRIBUTES = b"grep -E 'Sig(Blk|Ign)' /proc/self/status; umask; ulimit -s; ulimit -t; ls /proc/self/fd; echo $LANG"
SHELL_OF_LANGUAGE = {
    "bash": "sh attributes",
    "python": "import os; os.system('sh attributes')",
    "perl": "system('sh attributes');",
    "ruby": "system('sh attributes')",
    "php": "<?php passthru('sh attributes');",
    "lua": "os.execute('sh attributes')",
    "nodejs": "require('child_process').execSync('sh attributes', {stdio: 'inherit'})",
    "cpp": '#include <cstdlib>\nint main() { return system("sh attributes"); }',
}
IGNORED_BY_RUNTIME = {"python": {signal.SIGPIPE, signal.SIGXFSZ}, "php": {signal.SIGPIPE}}
"""Signals that the runtime of a language ignores, also outside the sandbox."""
OPENED_BY_RUNTIME = {"php": {"4"}}
"""Descriptors that the children of a language inherit, also outside the sandbox."""


@pytest.mark.parametrize("language", SHELL_OF_LANGUAGE)
async def test_process_attributes_are_those_of_a_login_shell(language: str, client: SandboxClient) -> None:
    if not (await client.languages())[language].available:
        pytest.skip(f"NOT TESTED: {language} is not installed")
    done = await client.run(SHELL_OF_LANGUAGE[language], language, files={"attributes": ATTRIBUTES})
    assert (done.outcome, done.stderr) == (OK, "")
    blocked, ignored, umask, stack_kb, cpu, *descriptors, locale = done.stdout.split("\n")[:-1]
    bits = int(ignored.split()[1], 16)
    assert {number for number in range(1, 32) if bits >> (number - 1) & 1} == IGNORED_BY_RUNTIME.get(language, set())
    assert int(blocked.split()[1], 16) == 0
    assert (umask, stack_kb, cpu, locale) == ("0022", "8192", "unlimited", "C.UTF-8")
    assert set(descriptors) == {"0", "1", "2", "3"} | OPENED_BY_RUNTIME.get(language, set()), "ls opens one of them"


@pytest.mark.parametrize("options", [{}, {"fetch_files": ["missing"]}, {"session_id": "descriptors"}], ids=str)
async def test_python_has_only_the_standard_streams(options: dict[str, Any], client: SandboxClient) -> None:
    code = "import os; print([fd for fd in range(100) if os.path.exists(f'/proc/self/fd/{fd}')])"
    done = await client.run(code, **options)
    channel = [3] if "session_id" in options else []  # over which the cells of a session arrive
    assert done.stdout == f"{[0, 1, 2, *channel]}\n"


async def test_pipelines_end(client: SandboxClient) -> None:
    done = await client.run("while true; do echo y; done | head -1", "bash", run_timeout=5)
    assert (done.outcome, done.stdout) == (OK, "y\n")


CRASHES = {
    "import os; os.kill(os.getpid(), 9)": -9,
    "import ctypes; ctypes.string_at(0)": -11,
    "import os; os.abort()": -6,
    "import os; os._exit(3)": 3,
}


@pytest.mark.parametrize("code", CRASHES)
async def test_crash_is_reported_in_programs_sessions_and_notebooks(code: str, client: SandboxClient) -> None:
    session = client.new_session()
    await client.run("x = 1", session_id=session)
    for options in ({}, {"fetch_files": ["missing"]}, {"session_id": session}):
        crashed = await client.run(code, **options)
        assert (crashed.outcome, crashed.return_code) == (FAILED, CRASHES[code])
    assert crashed.session_is_over
    for fetched in ([], ["missing"]):
        notebook = await client.run_jupyter(["1", code, "2"], fetch_files=fetched)
        assert notebook.outcome is FAILED
        assert notebook.driver
        assert notebook.driver.return_code == CRASHES[code]


async def test_sleeping_program_has_more_time_than_a_busy_one(client: SandboxClient) -> None:
    asleep, busy = await asyncio.gather(
        client.run("import time; time.sleep(60)", run_timeout=0.5),
        client.run("while True: pass", run_timeout=0.5),
    )
    assert asleep.outcome is busy.outcome is TIMEOUT
    assert asleep.execution_time > max_wall_time(0.5) - 0.05  # a supervisor starts its clock after the server
    assert busy.run_result
    assert (busy.run_result.cpu_time or 0) < max_wall_time(0.5)


async def test_cpu_time_of_all_processes_counts(client: SandboxClient) -> None:
    code = "import os\nfor _ in range(3):\n    if not os.fork():\n        while True: pass\nos.wait()"
    done = await client.run(code, run_timeout=0.5)
    assert done.outcome is TIMEOUT


@pytest.mark.parametrize("language", ["python", "bash"])
async def test_ended_program_does_not_time_out(language: str, machine: Serving, client: SandboxClient) -> None:
    """All processes of the server but the front are suspended when the program ends, until long after its limit."""
    names = {"python": "ends-soon", "bash": "bash"}
    code = {"python": f"{name_process('ends-soon')}; import time; time.sleep(1); print('done')"}
    code["bash"] = "sleep 1; echo done"
    run = asyncio.create_task(client.run(code[language], language, run_timeout=0.8))
    assert await asyncio.to_thread(wait_until, lambda: machine.processes_named(names[language]))
    suspended = [one for one in machine.processes()[1:] if one.name() not in (*names.values(), "sleep")]
    for process in suspended:
        process.suspend()
    await asyncio.sleep(max_wall_time(0.8) + 1)
    for process in suspended:
        process.resume()
    done = await run
    assert (done.outcome, done.stdout) == (OK, "done\n")


async def test_time_that_the_program_did_not_have_is_a_failure_of_the_sandbox(client: SandboxClient) -> None:
    with pytest.raises(SandboxUnavailable, match="too busy"):
        await client.run("import time; time.sleep(60)", run_timeout=30, wall_timeout=0.5, deadline=time.monotonic() + 3)


async def test_sessions_are_stopped_between_cells(machine: Serving, client: SandboxClient) -> None:
    session = client.new_session()
    spin = f"""
        import os, threading
        {name_process("spins")}
        def spin():
            while True: pass
        threading.Thread(target=spin, daemon=True).start()
        if not os.fork(): spin()
        """
    assert (await client.run(dedent(spin), session_id=session)).outcome is OK
    processes = machine.processes_named("spins")
    assert len(processes) == 2
    assert wait_until(lambda: {process.status() for process in processes} == {psutil.STATUS_STOPPED})
    again = await client.run("import time; time.sleep(0.2); 1 + 1", session_id=session)
    assert (again.outcome, again.stdout) == (OK, "2\n")
    assert wait_until(lambda: {process.status() for process in processes} == {psutil.STATUS_STOPPED})
    assert await client.end_session(session)
    assert wait_until(lambda: not any(process.is_running() for process in processes))


async def test_cells_in_quick_succession_are_all_run(client: SandboxClient) -> None:
    session = client.new_session()
    await client.run("count = 0", session_id=session)
    for number in range(1, 31):
        done = await client.run("count += 1; count", session_id=session)
        assert done.stdout == f"{number}\n"


PTRACE_SEIZE, PTRACE_O_TRACEEXIT, PTRACE_DETACH = 0x4206, 0x40, 17


def ptrace(request: int, pid: int, data: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(ctypes.c_long(request), ctypes.c_int(pid), ctypes.c_void_p(0), ctypes.c_void_p(data)) < 0:
        raise OSError(ctypes.get_errno(), "ptrace")


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: requires root to debug a process of another user")
async def test_teardown_of_a_program_does_not_delay_others(machine: Serving, client: SandboxClient) -> None:
    """A process of a program ends slowly: a debugger holds it while it exits."""
    code = f"import os, time\nif not os.fork():\n    {name_process('dies-slowly')}\n    time.sleep(60)\ntime.sleep(60)"
    run = asyncio.create_task(client.run(code, run_timeout=1))
    assert await asyncio.to_thread(wait_until, lambda: machine.processes_named("dies-slowly"))
    (process,) = machine.processes_named("dies-slowly")
    ptrace(PTRACE_SEIZE, process.pid, PTRACE_O_TRACEEXIT)
    try:
        assert await asyncio.to_thread(wait_until, lambda: process.status() == psutil.STATUS_TRACING_STOP)
        others = await asyncio.gather(*(client.run(f"print({number})") for number in range(20)))
        assert [one.stdout for one in others] == [f"{number}\n" for number in range(20)]
        assert not run.done(), "the program has not ended"
    finally:
        ptrace(PTRACE_DETACH, process.pid, 0)
    assert (await run).outcome is TIMEOUT


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("machine_name", MACHINES)
async def test_no_process_outlives_its_server(machine_name: str, number: int) -> None:
    with serving("--capacity", "4", wrapper=MACHINES[machine_name]) as running:
        async with SandboxClient(running.url) as client:
            for _ in range(2):
                await client.run("x = 1", session_id=client.new_session())
            code = f"import signal, time; signal.signal(15, signal.SIG_IGN); {name_process('stays')}; time.sleep(600)"
            run = asyncio.create_task(client.run(code, run_timeout=300))
            assert await asyncio.to_thread(wait_until, lambda: running.processes_named("stays"))
            processes = running.processes()
            assert await asyncio.to_thread(wait_until, lambda: has_ended_after(running.process, number))
            _, left = await asyncio.to_thread(psutil.wait_procs, processes, 30)
            run.cancel()
    assert not left


def has_ended_after(process: subprocess.Popen[str], number: int) -> bool:
    """Send a signal. After the second one, a server does not wait for programs."""
    if process.poll() is None:
        process.send_signal(number)
    return process.poll() is not None
