"""`toolroll sandbox serve --unsafe` on other systems than Linux, with real programs."""

import asyncio
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import other_system
import pytest

from toolroll.errors import SandboxRefused
from toolroll.sandbox.client import SandboxClient
from toolroll.sandbox.execution import ExecutionOutcome

pytestmark = pytest.mark.sandbox

OUTPUT_KB = 16


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Start a server. Return its output up to its address, and its temporary directory."""
    directory = tmp_path_factory.mktemp("tmp")
    arguments = ("sandbox", "serve", "--unsafe", "--port", "0", "--capacity", "4", "--output-kb", str(OUTPUT_KB))
    environment = {**other_system.environment(), "TMPDIR": str(directory), "SECRET": "secret"}
    process = subprocess.Popen(other_system.command(*arguments), stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout
    try:
        text = ""
        while "serving on" not in text and (line := process.stdout.readline()):
            text += line
        yield text, directory
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        process.stdout.close()
    assert not list(directory.glob("toolroll-*")), "no files are left"


@pytest.fixture
async def client(started: tuple[str, Path]) -> AsyncIterator[SandboxClient]:
    async with SandboxClient(started[0].split()[-1]) as client:
        yield client


async def test_server_states_that_programs_are_not_isolated(started: tuple[str, Path], client: SandboxClient) -> None:
    output, _ = started
    assert "none: programs are not isolated, and their memory is not limited" in output
    assert "gap: programs are not isolated" in output
    assert "capacity   4 programs, 1000 waiting requests" in output
    ping = await client.ping()
    assert ping.tier == "none"
    assert len(ping.gaps) == 3


async def test_program_runs_in_its_own_directory(started: tuple[str, Path], client: SandboxClient) -> None:
    code = "import os, sys\nprint(os.getcwd() == os.environ['HOME'], os.listdir(), 'SECRET' in os.environ)\n"
    done = await client.run(code + "print('é', file=sys.stderr)")
    assert (done.outcome, done.stdout, done.stderr) == (ExecutionOutcome.OK, "True ['main.py'] False\n", "é\n")
    assert done.execution_time > 0
    scratch = next(started[1].glob("toolroll-*"))
    assert not list(scratch.iterdir()), "the directory of a program is removed"


async def test_failing_program_returns_status_and_traceback(client: SandboxClient) -> None:
    done = await client.run("print('before', flush=True)\n1 / 0")
    assert (done.outcome, done.return_code, done.stdout) == (ExecutionOutcome.FAILED, 1, "before\n")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert (await client.run("import os; os.kill(os.getpid(), 9)")).return_code == -9
    assert (await client.run("raise MemoryError")).outcome is ExecutionOutcome.OUT_OF_MEMORY


async def test_value_of_last_expression_is_shown(client: SandboxClient) -> None:
    assert (await client.run("x = 20\nx + 1", show_value=True)).stdout == "21\n"
    assert (await client.run("x = 20\nx + 1")).stdout == ""
    failed = await client.run("import sys\nprint(sys.argv, sys.path[0] == sys.path[1])\n1 / 0", show_value=True)
    assert failed.stdout.endswith("main.py'] False\n")
    assert "script_runner" not in failed.stderr


async def test_stdin_and_files_are_passed(client: SandboxClient) -> None:
    code = "open('out/b.txt', 'w').write(input() + open('in/a.txt').read())"
    files = {"in/a.txt": b" file", "out/.keep": b""}
    done = await client.run(code, stdin="typed\n", files=files, fetch_files=["out/b.txt", "missing"])
    assert done.outcome is ExecutionOutcome.OK, done.stderr
    assert done.files == {"out/b.txt": b"typed file"}


CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print(child.pid)
"""


async def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the process still runs"
        await asyncio.sleep(0.05)


async def test_timeout_kills_program_and_its_children(client: SandboxClient) -> None:
    started = time.monotonic()
    done = await client.run(CHILD + "time.sleep(1000)", run_timeout=1)
    assert time.monotonic() - started < 10
    assert (done.outcome, done.return_code) == (ExecutionOutcome.TIMEOUT, None)
    assert "KeyboardInterrupt" in done.stderr
    await wait_for_end(int(done.stdout))
    stubborn = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    assert (await client.run(stubborn, run_timeout=0.5)).outcome is ExecutionOutcome.TIMEOUT


async def test_end_of_program_kills_its_children(client: SandboxClient) -> None:
    done = await client.run(CHILD)
    assert done.outcome is ExecutionOutcome.OK
    await wait_for_end(int(done.stdout))


async def test_cancelled_request_kills_program(client: SandboxClient, tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    code = f"import os, time\nopen({str(marker)!r}, 'w').write(str(os.getpid()))\ntime.sleep(1000)"
    task = asyncio.create_task(client.run(code, run_timeout=100))
    while not (marker.exists() and marker.read_text()):
        await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await wait_for_end(int(marker.read_text()))


async def test_large_output_is_truncated(client: SandboxClient) -> None:
    done = await client.run("import sys\nfor _ in range(1000): print('x' * 9999)\nsys.stderr.write('end')")
    assert (done.outcome, len(done.stdout), done.stdout_truncated) == (ExecutionOutcome.OK, OUTPUT_KB * 1024, True)
    assert (done.stderr, done.stderr_truncated) == ("end", False)


async def test_interpreters_of_other_languages_run(client: SandboxClient) -> None:
    assert (await client.run("echo $((6 * 7)); exit 3", language="bash")).stdout == "42\n"
    assert (await client.run("select 6 * 7;", language="sql")).stdout == "42\n"


async def test_programs_run_concurrently(client: SandboxClient) -> None:
    runs = await asyncio.gather(*(client.run(f"print({number})") for number in range(20)))
    assert [int(run.stdout) for run in runs] == list(range(20))


async def test_unsupported_requests_name_the_remedy(client: SandboxClient) -> None:
    with pytest.raises(SandboxRefused, match="'cpp' is not available on this server: start a sandbox server on Linux"):
        await client.run("int main() {}", language="cpp")
    with pytest.raises(SandboxRefused, match="Sessions need a sandbox server on Linux"):
        await client.run("1", session_id="a")
    with pytest.raises(SandboxRefused, match="Notebooks need a sandbox server on Linux"):
        await client.run_jupyter(["1"])
    with pytest.raises(SandboxRefused, match="can't be written"):
        await client.run("1", files={"/dev/null/x": b""})


def test_run_command_runs_one_program(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print(6 * 7)\nraise SystemExit(7)")
    done = subprocess.run(
        other_system.command("sandbox", "run", "a.py", "--unsafe"),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=other_system.environment(),
    )
    assert (done.returncode, done.stdout) == (7, "42\n")


def test_missing_python_is_reported() -> None:
    done = subprocess.run(
        other_system.command("sandbox", "serve", "--unsafe", "--port", "0", "--python", "/no/python"),
        capture_output=True,
        text=True,
        timeout=60,
        env=other_system.environment(),
    )
    assert done.returncode == 2
    assert "The Python interpreter for programs cannot be run: /no/python" in done.stderr
