"""Programs and requests with excessive files, output, input or memory.

They are bounded or rejected without an effect on the host, and the server serves the next program.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import sys
import time
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import aiohttp
import psutil
import pytest

from sandbox.serving import Serving, serving, wait_until
from toolroll.errors import SandboxRefused
from toolroll.sandbox.client import SandboxClient
from toolroll.sandbox.execution import ExecutionOutcome

pytestmark = pytest.mark.sandbox

MEGABYTE = 1 << 20


@pytest.fixture(autouse=True)
async def _next_program_is_served(client: SandboxClient) -> AsyncIterator[None]:
    yield
    done = await client.run("import os\nprint(os.listdir('.'), os.listdir('/tmp/work'))")
    assert (done.outcome, done.stdout) == (ExecutionOutcome.OK, "['main.py'] ['main.py']\n")


async def post(url: str, body: bytes) -> tuple[int, dict[str, Any]]:
    """Post a body that the client would never send."""
    async with aiohttp.ClientSession() as session, session.post(f"{url}/run_code", data=body) as response:
        return response.status, json.loads(await response.read())


# Output and input


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("size", [300_000, MEGABYTE - 1, MEGABYTE, MEGABYTE + 1, 2_000_000, 300 * MEGABYTE])
async def test_output_is_truncated_at_the_limit(stream: str, size: int, client: SandboxClient) -> None:
    piece = 1000 if size < 10 * MEGABYTE else MEGABYTE
    code = f"""
import sys
for _ in range({size} // {piece}): sys.{stream}.write("x" * {piece})
sys.{stream}.write("y" * ({size} % {piece}))
"""
    done = await client.run(code, run_timeout=60)
    kept = ("x" * (size // piece * piece) + "y" * (size % piece))[:MEGABYTE]
    assert done.outcome is ExecutionOutcome.OK
    assert getattr(done, stream) == kept
    assert getattr(done, f"{stream}_truncated") == (size > MEGABYTE)


async def test_many_small_writes_are_complete(client: SandboxClient) -> None:
    done = await client.run("import os\nfor _ in range(1_000_000): os.write(1, b'x')", run_timeout=20)
    assert (done.outcome, done.stdout) == (ExecutionOutcome.OK, "x" * 1_000_000)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"b'caf\xc3\xa9 \xff\xfe end'", "café \ufffd\ufffd end"),
        (r"b'\xed\xa0\x80'", "\ufffd\ufffd\ufffd"),
        (r"b'\xc3' * 3", "\ufffd\ufffd\ufffd"),
        (r"b'\0' * 100_000", "\0" * 100_000),
        (r"b'\x1b]0;owned\x07\r\n'", "\x1b]0;owned\x07\r\n"),
    ],
)
async def test_invalid_utf8_output_is_replaced(written: str, read: str, client: SandboxClient) -> None:
    done = await client.run(f"import sys\nsys.stdout.buffer.write({written})\nsys.stderr.buffer.write({written})")
    assert (done.outcome, done.stdout, done.stderr) == (ExecutionOutcome.OK, read, read)


@pytest.mark.parametrize("field", ["code", "stdin"])
async def test_lone_surrogate_is_replaced(field: str, server: str, client: SandboxClient) -> None:
    fields = {"code": '"import sys; print(ascii(sys.stdin.read()))"', "stdin": '"in"'}
    fields[field] = r'"print(ascii(\"\ud800\"))"' if field == "code" else r'"\ud800"'
    body = f'{{"language": "python", "code": {fields["code"]}, "stdin": {fields["stdin"]}}}'
    status, answer = await post(server, body.encode())
    assert (status, answer["status"]) == (200, "Success")
    assert answer["run_result"]["stdout"] == "'\\ufffd'\n"
    by_client = {"code": "print(1)", "stdin": "", field: "print('\ud800')" if field == "code" else "\ud800"}
    assert (await client.run(**by_client)).outcome is ExecutionOutcome.OK


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"{", b"\xff", b'"x"', b"[" * 100_000, b'{"code": 1, "language": "python"}',
        b'{"code": "1"}',
        b'{"code": "1", "language": "python", "run_timeout": 1e999}',
        b'{"code": "1", "language": "python", "run_timeout": NaN}',
        b'{"code": "1", "language": "python", "run_timeout": -1}',
        b'{"code": "1", "language": "python", "memory_limit_MB": 1e300}',
        b'{"code": "1", "language": "python", "memory_limit_MB": 99999999}',
        b'{"code": "1", "language": "python", "files": {"a": "no base64!"}}',
        b'{"code": "1", "language": "python", "files": {"a": "\xc3\xa9"}}',
        b'{"code": "1", "language": "../../bin/sh"}',
    ],
)  # fmt: skip
async def test_invalid_request_is_rejected(body: bytes, server: str) -> None:
    status, answer = await post(server, body)
    assert status in (400, 422), answer
    assert answer["detail"]


async def test_large_code_and_input_are_accepted(client: SandboxClient) -> None:
    done = await client.run("import sys\nprint(len(sys.stdin.read()))", stdin="x" * (40 * MEGABYTE))
    assert done.stdout == f"{40 * MEGABYTE}\n"
    done = await client.run("x = '" + "y" * (10 * MEGABYTE) + "'\nprint(len(x))")
    assert done.stdout == f"{10 * MEGABYTE}\n"


async def test_oversized_input_is_rejected(client: SandboxClient) -> None:
    with pytest.raises(SandboxRefused, match="413"):
        await client.run("print(1)", stdin="x" * (100 * MEGABYTE))


# Files


REJECTED_PATHS = [
    "/etc/passwd", "/etc/new", "/usr/bin/new", "/new", "/root/new", "/home/new/new", "../../etc/new", "../../../new",
    "/proc/self/environ", "/proc/self/fd/4", "/proc/self/fd/1", "/proc/self/fd/0", "/proc/1/mem", "/proc/sysrq-trigger",
    "/proc/self/oom_score_adj", "/sys/new", "/dev/new", "/dev/stdout", "/dev/stderr", "/dev/tty", "/dev/full",
    "/proc/self/root/etc/new", "/proc/self/cwd/../../etc/new", "", ".", "..", "/", "a/", "main.py/a", "a\0b", "x" * 300,
    "a/" * 3000 + "a", f"{sys.prefix}/new", os.__file__,
]  # fmt: skip


@pytest.mark.parametrize("path", REJECTED_PATHS, ids=lambda path: repr(path[:40]))
async def test_file_is_written_only_where_program_can_write(path: str, client: SandboxClient) -> None:
    with pytest.raises(SandboxRefused, match="422"):
        await client.run("print('ran')", files={path: b'{"error": "forged"}\n'})
    assert not any(Path(parent, "new").exists() for parent in ("/", "/etc", "/usr/bin", "/root", "/home", sys.prefix))


async def test_files_can_be_anywhere_in_private_tmp(client: SandboxClient) -> None:
    files = {"a/b/c": b"1", "/tmp/elsewhere": b"2", "../beside": b"3", "a/../d": b"4", "./e": b"5", "é\n": b"6"}
    code = "import os\nprint(*(open(p).read() for p in ('a/b/c', '/tmp/elsewhere', '/tmp/beside', 'd', 'e', 'é\\n')))"
    assert (await client.run(code, files=files)).stdout == "1 2 3 4 5 6\n"
    assert not Path("/tmp/elsewhere").exists()
    assert not Path("/tmp/beside").exists()


# Path → how the program creates it. None of these is a regular file that the program can read.
NOT_FETCHED = {
    "to shadow": "os.symlink('/etc/shadow', path)",
    "to home": f"os.symlink({str(Path.home() / '.bashrc')!r}, path)",
    "to the checkout": f"os.symlink({__file__!r}, path)",
    "to itself": "os.symlink(path, path)",
    "to nothing": "os.symlink('/nothing', path)",
    "directory": "os.mkdir(path)",
    "fifo": "os.mkfifo(path)",
    "socket": "socket.socket(socket.AF_UNIX).bind(path)",
    "to zero": "os.symlink('/dev/zero', path)",
    "to random": "os.symlink('/dev/urandom', path)",
    "to a process": "os.symlink('/proc/self/mem', path)",
    "to the kernel's messages": "os.symlink('/proc/kmsg', path)",
    "to the first process": "os.symlink('/proc/1/environ', path)",
    "unreadable": "open(path, 'w').write('x'); os.chmod(path, 0)",
    "removed": "open(path, 'w').write('x'); os.unlink(path)",
}


@pytest.mark.parametrize("name", NOT_FETCHED)
async def test_only_regular_files_are_fetched(name: str, client: SandboxClient) -> None:
    code = f"import os, socket\npath = {name!r}\n{NOT_FETCHED[name]}\nopen('mine', 'w').write('kept')"
    done = await client.run(code, fetch_files=[name, "mine"])
    assert done.outcome is ExecutionOutcome.OK, done.stderr
    assert done.files == {"mine": b"kept"}


@pytest.mark.parametrize(
    "path",
    ["/etc/shadow", "../../../../etc/shadow", "/root/.bashrc", str(Path.home() / ".bashrc"), __file__, "/dev/zero",
     "/dev/stdin", "/proc/self/mem", "/proc/kcore", "/proc/1/environ", "/proc/1/root/etc/shadow", "/tmp", ".", "",
     "a\0b", "x" * 5000],
    ids=lambda path: repr(path[:40]),
)  # fmt: skip
async def test_files_of_the_host_are_not_fetched(path: str, client: SandboxClient) -> None:
    done = await client.run("print(1)", fetch_files=[path])
    assert (done.outcome, done.files) == (ExecutionOutcome.OK, {})


async def test_fetched_files_contain_no_secret(client: SandboxClient) -> None:
    paths = [f"/proc/{of}/{name}" for of in ("self", "1", "2", "3") for name in ("environ", "cmdline", "maps", "fd/3")]
    with serving(environment={"SECRET": "correct-horse"}) as server:
        async with SandboxClient(server.url) as other:
            done = await other.run("print(1)", fetch_files=paths)
    assert done.outcome is ExecutionOutcome.OK
    assert not [path for path, content in done.files.items() if b"correct-horse" in content]


async def test_fetch_after_work_directory_was_replaced(client: SandboxClient) -> None:
    code = "import os\nopen('a', 'w').write('mine')\nos.rename('/tmp/work', '/tmp/x')\nos.symlink('/etc', '/tmp/work')"
    done = await client.run(code, fetch_files=["a", "shadow", "passwd", "/tmp/work/shadow"])
    assert (done.outcome, done.files) == (ExecutionOutcome.OK, {"a": b"mine"})


async def test_oversized_fetch_is_reported_in_message(server: str, sandbox: Serving) -> None:
    code = "f = open('large', 'wb')\nfor _ in range(300): f.write(bytes(1 << 20))\nopen('small', 'w').write('x')"
    body = {"language": "python", "code": code, "fetch_files": ["large", "small"]}
    server_process = sandbox.processes()[0]
    before = server_process.memory_info().rss
    status, answer = await post(server, json.dumps(body).encode())
    assert (status, answer["status"]) == (200, "Success")
    assert answer["files"] == {"small": b64encode(b"x").decode()}
    assert "large" in answer["message"]
    assert server_process.memory_info().rss - before < 300 * MEGABYTE


async def test_fetch_uses_no_memory_of_the_program(client: SandboxClient) -> None:
    code = "f = open('file', 'wb')\nfor _ in range(60): f.write(bytes(1 << 20))"
    done = await client.run(code, memory_limit_mb=128, fetch_files=["file"])
    assert (done.outcome, done.return_code) == (ExecutionOutcome.OK, 0)
    assert len(done.files["file"]) == 60 * MEGABYTE


async def test_fetched_files_do_not_grow_after_exit(client: SandboxClient) -> None:
    """A child that keeps writing can neither delay the response nor make it larger than allowed."""
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    with open("log", "wb") as log:
        while True: log.write(b"x" * 4096)
time.sleep(0.2)
"""
    began = time.monotonic()
    done = await client.run(code, fetch_files=["log"], run_timeout=60)
    assert done.outcome is ExecutionOutcome.OK
    assert time.monotonic() - began < 30, "the response waited for the child"


# Disk and memory


@pytest.mark.parametrize("megabytes", [100, 1024])
@pytest.mark.parametrize("piece", ["b'x' * 10_000_000", "str(len(kept))"])
async def test_out_of_memory_prints_memory_error(piece: str, megabytes: int, client: SandboxClient) -> None:
    done = await client.run(f"kept = []\nwhile True: kept.append({piece})", memory_limit_mb=megabytes, run_timeout=20)
    assert (done.outcome, done.return_code) == (ExecutionOutcome.OUT_OF_MEMORY, 1)
    assert done.stderr.splitlines()[-1] == "MemoryError"
    assert "During handling" not in done.stderr
    assert "sandbox/server" not in done.stderr, "traceback contains frames of the server"


async def test_full_disk_affects_only_the_program(client: SandboxClient) -> None:
    before = shutil.disk_usage("/tmp").used
    code = """
import os
try:
    for n in range(10):
        with open(f"/tmp/{n}", "wb") as f:
            for _ in range(100): f.write(bytes(1 << 20))
except OSError as error:
    print(error.errno, sum(os.stat(f"/tmp/{n}").st_size for n in range(10) if os.path.exists(f"/tmp/{n}")) >> 20)
"""
    done = await client.run(code, run_timeout=20)
    number, megabytes = map(int, done.stdout.split())
    assert number == errno.ENOSPC
    assert 400 < megabytes <= 512
    assert shutil.disk_usage("/tmp").used - before < 50 * MEGABYTE


async def test_number_of_files_is_limited(client: SandboxClient) -> None:
    code = """
n = 0
try:
    while True: open(f"/tmp/{n}", "w").close(); n += 1
except OSError as error:
    print(error.errno, n)
"""
    done = await client.run(code, run_timeout=30)
    number, made = map(int, done.stdout.split())
    assert number == errno.ENOSPC
    assert made <= 64 * 1024


async def test_file_size_is_limited(client: SandboxClient) -> None:
    code = "import os, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nopen('x', 'w')\nos.truncate('x', 1 << 40)"
    done = await client.run(code)
    assert done.outcome is ExecutionOutcome.FAILED
    assert "File too large" in done.stderr


HOARDS = {
    "children": """
        for _ in range(8):
            if os.fork() == 0:
                x = b"x" * (300 << 20)
                time.sleep(9)
        while os.wait()[1] == 0: pass
        """,
    "files in memory": """
        kept = []
        while True:
            kept.append(os.memfd_create("x"))
            os.write(kept[-1], b"x" * (64 << 20))
        """,
    "shared memory": """
        libc.shmat.restype = ctypes.c_void_p
        for n in range(40):
            at = libc.shmat(libc.shmget(n + 1, 64 << 20, 0o1600), None, 0)
            if at: ctypes.memset(at, 1, 64 << 20)
        """,
    "pipes": """
        kept = []
        for _ in range(500):
            kept.append(os.pipe())
            os.set_blocking(kept[-1][1], False)
            try: fcntl.fcntl(kept[-1][1], 1031, 1 << 20)  # F_SETPIPE_SZ
            except OSError: pass
            try:
                while True: os.write(kept[-1][1], b"x" * 65536)
            except BlockingIOError: pass
        """,
    "TCP": """
        server, kept = socket.create_server(("127.0.0.1", 0)), []
        for _ in range(480):
            kept.append((socket.create_connection(server.getsockname()), server.accept()[0]))
            kept[-1][0].setblocking(False)
            kept[-1][1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30)
        for _ in range(20):
            for one, _ in kept:
                try: one.send(b"x" * (1 << 20))
                except BlockingIOError: pass
        """,
}


@pytest.mark.timing  # measures the free memory of the machine
@pytest.mark.parametrize("name", HOARDS)
async def test_memory_limit_covers_all_processes(name: str, client: SandboxClient, sandbox: Serving) -> None:
    if sandbox.tier != "A":
        pytest.skip("without a cgroup, the limit is per process")
    code = f"import ctypes, fcntl, os, socket, time\nlibc = ctypes.CDLL(None)\n{dedent(HOARDS[name])}"
    peak, before = 0, psutil.virtual_memory().available
    running = asyncio.create_task(client.run(code, memory_limit_mb=1024, run_timeout=60))
    while not running.done():
        peak = max(peak, before - psutil.virtual_memory().available)
        await asyncio.sleep(0.02)
    done = running.result()
    assert peak < 1500 * MEGABYTE
    if name in ("children", "files in memory"):
        assert done.outcome is ExecutionOutcome.OUT_OF_MEMORY


async def test_memory_of_one_program_is_not_charged_to_next(client: SandboxClient) -> None:
    for _ in range(2):
        full = await client.run("open('/tmp/x', 'wb').write(bytes(400 << 20))\nx = b'x' * (300 << 20)")
        small, other = await asyncio.gather(*(client.run("print(1)", memory_limit_mb=64) for _ in range(2)))
        assert (full.outcome, small.outcome, other.outcome) == (ExecutionOutcome.OK,) * 3


async def test_no_core_dump_is_written(client: SandboxClient) -> None:
    done = await client.run("import os\nos.fork() or os.abort()\nos.wait()\nprint(os.listdir('.'))")
    assert done.stdout == "['main.py']\n"


async def test_failed_setup_leaves_no_resources(client: SandboxClient, sandbox: Serving) -> None:
    def resources() -> tuple[int, int, int]:
        mounts = len(Path("/proc/self/mountinfo").read_text().splitlines())
        return mounts, len(sandbox.processes()), sandbox.processes()[0].num_fds()

    await asyncio.gather(*(client.run("print(1)") for _ in range(4)))
    before = resources()
    for _ in range(100):
        with pytest.raises(SandboxRefused, match="can't be written"):
            await client.run("print(1)", files={"/usr/new": b""})
    assert wait_until(lambda: all(now <= then for now, then in zip(resources(), before, strict=True)))
