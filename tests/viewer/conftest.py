"""Dumps that the tests share and do not modify."""

import asyncio
import time
from pathlib import Path

import pytest

from viewer.dumps import write_toolroll_run, write_verl_run

NAP_S = 0.004


@pytest.fixture(scope="session")
def our_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toolroll run with the steps 1, 2 and 10, each with 16 samples."""
    return write_toolroll_run(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="session")
def verl_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verl run with two steps, each with 4 samples."""
    return write_verl_run(tmp_path_factory.mktemp("verls"))


@pytest.fixture(params=["ours", "verls"])
def run(request: pytest.FixtureRequest, our_run: Path, verl_run: Path) -> Path:
    """The toolroll run and the verl run."""
    return our_run if request.param == "ours" else verl_run


@pytest.fixture(autouse=True)
def _quick_pilot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pilot, which waits after each key until the process is idle, poll more often."""
    monkeypatch.setattr("textual.pilot.wait_for_idle", _idle)
    monkeypatch.setattr("textual.app.wait_for_idle", _idle)


async def _idle(min_sleep: float = 0.0, max_sleep: float = 1.0) -> None:
    """Wait for a short sleep during which the process did no work.

    A sleep that took too long is repeated: the process had no CPU time then, but may have had work to do.
    """
    ends = time.monotonic() + max_sleep
    while time.monotonic() < ends:
        began, worked = time.monotonic(), time.process_time()
        await asyncio.sleep(max(NAP_S, min_sleep))
        if time.process_time() - worked < NAP_S / 2 and time.monotonic() - began < max(NAP_S, min_sleep) + 2 * NAP_S:
            return
