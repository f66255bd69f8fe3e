"""Fixtures and settings for all tests: hypothesis, lanes, the toolroll under test, real servers."""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from virtual_time import VirtualTimeLoop

import toolroll

if TYPE_CHECKING:
    from ray_nodes import NetnsNodes
    from real_engine import RealEngine
    from tmux_terminal import Terminal

ROOT = Path(__file__).parent.parent
FIGURE_PROPERTY = "figure"
LANES = ("unit", "process", "viewer", "sandbox", "ray", "sglang", "trl", "verl", "e2e", "timing")
PROCESS_STARTS = {"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn"}
_unit_test: str | None = None
"""The running test, if it is in the lane `unit`."""

# Test machines are shared and noisy, so slow examples do not fail.
settings.register_profile("default", deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", settings.get_profile("default"), max_examples=3000)
settings.load_profile("default")


def pytest_report_header() -> str:
    return f"toolroll {toolroll.__version__} from {Path(toolroll.__file__).parent}"


def pytest_addoption(parser: pytest.Parser) -> None:
    lanes = "run only the tests of a lane, or of several (see `markers` in pyproject.toml)"
    parser.addoption("--lane", choices=LANES, action="append", help=lanes)
    parser.addoption("--soak-seconds", type=float, default=10, help="length of the soak test and of the storm of stops")
    parser.addoption("--simulation-seeds", type=int, default=2000, help="seeds of all simulations (tests/simulation)")


def lane_of(item: pytest.Item) -> str:
    """Return the lane of a test: the closest marker that is a lane, or `unit`."""
    return next((marker.name for marker in item.iter_markers() if marker.name in LANES), "unit")


@cache
def has_marker(file: Path, lane: str) -> bool:
    """Return True if the text of a file has the marker of a lane."""
    return f"mark.{lane}" in file.read_text(encoding="utf-8")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import only files with a marker of the lanes: importing all files takes longer than the tests of some lanes."""
    lanes = config.getoption("lane")
    if not lanes or "unit" in lanes or not collection_path.name.startswith("test_") or collection_path.is_dir():
        return None
    return None if any(has_marker(collection_path, lane) for lane in lanes) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep only the tests of the lanes. A marker that a lane would not find by the text of the file is an error."""
    for item in items:
        if (lane := lane_of(item)) != "unit" and not has_marker(item.path, lane):
            raise pytest.UsageError(f"{item.nodeid}: write its marker as `pytest.mark.{lane}` in the file.")
    if lanes := config.getoption("lane"):
        config.hook.pytest_deselected(items=[item for item in items if lane_of(item) not in lanes])
        items[:] = [item for item in items if lane_of(item) in lanes]


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run unit tests that are marked with `virtual_time` in an event loop with a virtual clock."""
    if item.get_closest_marker("virtual_time") and lane_of(item) == "unit":
        return {"virtual time": VirtualTimeLoop}
    return {"real time": asyncio.new_event_loop}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Forbid tests of the lane `unit`, with their fixtures, to start processes."""
    global _unit_test
    _unit_test = item.nodeid if lane_of(item) == "unit" else None
    try:
        return (yield)
    finally:
        _unit_test = None


def _forbid_processes(event: str, arguments: tuple[object, ...]) -> None:
    if _unit_test and event in PROCESS_STARTS:
        raise RuntimeError(f"{_unit_test} starts a process ({event}). Mark it with its lane, for example `sandbox`.")


sys.addaudithook(_forbid_processes)


@pytest.fixture
def report_figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Add a figure to the report, from any test process."""
    return lambda text: record_property(FIGURE_PROPERTY, text)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    figures = [
        (report.nodeid, text)
        for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
        for name, text in report.user_properties
        if name == FIGURE_PROPERTY and report.when == "call"
    ]
    if figures:
        terminalreporter.section("figures")
        for test, text in figures:
            terminalreporter.line(f"{test.rpartition('::')[2]}: {text}")


@pytest.fixture
def root() -> Path:
    """Return the checkout, which has the examples, docs and benchmarks."""
    return ROOT


@pytest.fixture
def terminal(request: pytest.FixtureRequest) -> Iterator["Terminal"]:
    """Open a terminal of 80 × 24."""
    from tmux_terminal import open_terminal

    with open_terminal(request.node.nodeid) as opened:
        yield opened


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """Start Ray with this process as a driver, and yield its address."""
    import ray

    from toolroll._internal.ray_cluster import start_local

    # Ray workers and other drivers import shared test modules and benchmark peers.
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests"), str(ROOT / "benchmarks")]), prepend=os.pathsep)
    patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # other processes on the machine must not get workers killed
    context = start_local(num_cpus=4, object_store_memory=80_000_000)
    patch.setenv("RAY_ADDRESS", context.address_info["gcs_address"])
    yield os.environ["RAY_ADDRESS"]
    ray.shutdown()
    patch.undo()


@pytest.fixture(scope="session")
def nodes() -> Iterator["NetnsNodes"]:
    """Start a Ray cluster of three nodes, each in a network namespace."""
    from ray_nodes import NetnsNodes, can_make_namespaces

    if reason := can_make_namespaces():
        pytest.skip(f"NOT TESTED: killing nodes needs network namespaces, which are not available: {reason}")
    with NetnsNodes(workers=2) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def sglang() -> Iterator["RealEngine"]:
    """Start one SGLang server with a real model for all tests. If it cannot be built, they fail."""
    from real_engine import real_engine

    with real_engine() as engine:
        yield engine


@pytest.fixture(scope="session")
def sandbox_url() -> Iterator[str]:
    """Start a sandbox server in a separate process."""
    from sandbox.serving import serving

    with serving() as running:
        yield running.url
