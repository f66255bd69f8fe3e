"""Runs to look at, written once for all tests that only look."""

from pathlib import Path

import pytest

from viewer.dumps import ours, verls


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
    """The pilot waits after each key until the process is idle, and looks seldom. Here it looks more often."""
    monkeypatch.setattr("textual._wait.SLEEP_GRANULARITY", 0.004, raising=False)
    monkeypatch.setattr("textual._wait.SLEEP_IDLE", 0.002, raising=False)
