"""The slots of a killed process are available again when the sandbox runs none of its programs."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from ray.exceptions import RayError
from sandbox.serving import serving

from toolroll.limiter.token_bucket import limiter_status
from toolroll.sandbox.client import SandboxClient
from toolroll.sandbox.limited import LimitedSandbox, LimitedSandboxSettings

pytestmark = pytest.mark.timing
LIMIT = 4

HOLDER = """
import asyncio, sys
import ray
from toolroll.sandbox.limited import LimitedSandbox, LimitedSandboxSettings

url, limit, seconds, in_sessions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"

async def main():
    sandbox = LimitedSandbox(LimitedSandboxSettings(sandbox_fusion_url=(url,), rate_limit=limit))
    sessions = [sandbox.new_session() if in_sessions else None for _ in range(limit)]
    code = f"import time; time.sleep({seconds})"
    await asyncio.gather(*(sandbox.run(code, run_timeout=60, session_id=session) for session in sessions))

ray.init(log_to_driver=False, logging_level="warning")
asyncio.run(main())
"""


@pytest.mark.parametrize("in_sessions", [False, True], ids=["programs", "sessions"])
async def test_killed_process_and_its_programs(
    cluster: str, in_sessions: bool, report_figure: Callable[[str], None]
) -> None:
    """The server kills programs whose connection is closed, but completes those of sessions: their slots stay used."""
    seconds = 10 if in_sessions else 60
    with serving("--capacity", "16") as server:
        sandbox = LimitedSandbox(LimitedSandboxSettings(sandbox_fusion_url=(server.url,), rate_limit=LIMIT))
        async with SandboxClient(server.url) as client:
            # Else the programs of the holder would wait until the interpreters of sessions are ready.
            await client.run("1", session_id="warm", run_timeout=60)
            with holder_process(server.url, seconds, in_sessions) as holder:
                while (await client.ping(deadline=time.monotonic() + 60)).running < LIMIT:
                    assert holder.poll() is None
                    await asyncio.sleep(0.05)
                await wait_for_slots(sandbox.resource, in_use=LIMIT)
                holder.kill()
                killed = time.monotonic()
            programs = [
                asyncio.create_task(sandbox.run("import time; time.sleep(1)", run_timeout=10)) for _ in range(LIMIT)
            ]
            most_running = 0
            while not all(program.done() for program in programs):
                most_running = max(most_running, (await client.ping(deadline=time.monotonic() + 60)).running)
                await asyncio.sleep(0.02)
            elapsed = time.monotonic() - killed
        waited = max(program.result().waited for program in programs)
        await sandbox._client.close()
    report_figure(f"all slots granted {waited:.2f} s after the kill, {most_running} programs at most")
    assert most_running <= LIMIT
    assert elapsed < (seconds if in_sessions else 0) + 5.0
    assert limiter_status(sandbox.resource).quarantined == 0


@contextlib.contextmanager
def holder_process(url: str, seconds: int, in_sessions: bool) -> "Iterator[subprocess.Popen[bytes]]":
    process = subprocess.Popen([sys.executable, "-c", HOLDER, url, str(LIMIT), str(seconds), str(in_sessions)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def wait_for_slots(resource: str, *, in_use: int) -> None:
    """Wait until the limiter knows how many slots are in use."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if limiter_status(resource).in_use == in_use:
                return
        except (RayError, ValueError):
            pass
        await asyncio.sleep(0.05)
    raise AssertionError(f"{limiter_status(resource)} instead of in_use={in_use}")
