"""Runs to look at, written once for all tests that only look."""

import asyncio
import time
from pathlib import Path

import pytest

from viewer.dumps import ours, verls

NAP = 0.004
"""Seconds."""


@pytest.fixture(scope="session")
def our_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of ours: 1, 2, 10, of 16 samples each."""
    return ours(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="session")
def verl_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of verl's, of 4 samples each."""
    return verls(tmp_path_factory.mktemp("verls"))


@pytest.fixture(params=["ours", "verls"])
def run(request: pytest.FixtureRequest, our_run: Path, verl_run: Path) -> Path:
    """Either of them."""
    return our_run if request.param == "ours" else verl_run


@pytest.fixture(autouse=True)
def _quick_pilot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pilot waits after each key until the process is idle. Here it looks more often, and closer."""
    monkeypatch.setattr("textual.pilot.wait_for_idle", _idle)
    monkeypatch.setattr("textual.app.wait_for_idle", _idle)


async def _idle(min_sleep: float = 0.0, max_sleep: float = 1.0) -> None:
    """Wait for a nap without work, from which the process woke in time.

    One that overslept had no processor: that it did nothing meanwhile doesn't mean that it had nothing to do.
    """
    ends = time.monotonic() + max_sleep
    while time.monotonic() < ends:
        began, worked = time.monotonic(), time.process_time()
        await asyncio.sleep(max(NAP, min_sleep))
        if time.process_time() - worked < NAP / 2 and time.monotonic() - began < max(NAP, min_sleep) + 2 * NAP:
            return
