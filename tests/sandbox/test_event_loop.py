"""A server that shares its user with programs works after they have used up the epoll watches of the user."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import pytest

from sandbox.machines import MACHINES, USER
from sandbox.serving import serving
from toolroll.sandbox.client import SandboxClient


@pytest.mark.sandbox
async def test_server_of_unprivileged_user_has_no_epoll() -> None:
    with serving(wrapper=MACHINES["a user"] if os.geteuid() == 0 else ()) as running:
        async with SandboxClient(running.url) as client:
            assert (await client.run("print(1)")).stdout == "1\n"
        descriptors = list[str]()
        for link in Path(f"/proc/{running.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                descriptors.append(os.readlink(link))
        assert "anon_inode:[eventpoll]" not in descriptors


SERVE_WITHOUT_EPOLL = f"""
    import asyncio, errno, os
    import aiohttp, pyseccomp
    from sandbox.http_front import http_front
    from toolroll.sandbox.server.event_loop import new_event_loop

    async def ping():
        async with http_front() as server, aiohttp.ClientSession() as session:
            async with session.get(server.url + "/v1/ping") as response:
                return response.status

    def serve():
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(ping())

    serve()  # imports all modules, which the user may not be able to read
    if os.geteuid() == 0:
        os.setresuid({USER}, {USER}, {USER})
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for call in ("epoll_create", "epoll_create1", "epoll_ctl"):
        rules.add_rule(pyseccomp.ERRNO(errno.ENOSPC), call)
    rules.load()
    print(serve())
    """


@pytest.mark.process
def test_requests_are_served_without_epoll() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", dedent(SERVE_WITHOUT_EPOLL)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "200\n", done.stderr
