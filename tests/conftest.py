"""What every test shares: which toolroll is under test, and how hard hypothesis looks."""

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

import toolroll

if TYPE_CHECKING:
    from real_engine import RealEngine

ROOT = Path(__file__).parent.parent
SAID = "said"

# The machines are shared and noisy: a slow example is no failure.
settings.register_profile("default", deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")


def pytest_report_header() -> str:
    return f"toolroll {toolroll.__version__} from {Path(toolroll.__file__).parent}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Which tests go to one process, where several run them: those of a file; all that share what is dear to make."""
    from xdist.scheduler import LoadScopeScheduling

    class ByWhatTheyShare(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return _dear(ROOT / file) or file

    return ByWhatTheyShare(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes all processors for minutes comes first; what measures time on a cluster, when that should be over."""
    order = ["integrations", "special_e2e", "sglang", "sandbox", "cluster"]

    def place(item: pytest.Item) -> int:
        names = item.path.relative_to(ROOT / "tests").parts[0], _dear(item.path)
        return min((order.index(name) for name in names if name in order), default=len(order))

    items.sort(key=place)


@functools.cache
def _dear(file: Path) -> str | None:
    """What the tests of a file share with those of others."""
    text = file.read_text()
    return next((name for name in ("sglang", "cluster") if f"{name}: " in text or f'"{name}"' in text), None)


@pytest.fixture
def say(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Have a figure stand in the report, whichever process it was measured in."""
    return lambda text: record_property(SAID, text)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    said = [
        (report.nodeid, text)
        for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
        for name, text in report.user_properties
        if name == SAID and report.when == "call"
    ]
    if said:
        terminalreporter.section("figures")
        for test, text in said:
            terminalreporter.line(f"{test.rpartition('::')[2]}: {text}")


@pytest.fixture
def root() -> Path:
    """The checkout: examples, docs and benchmarks are used from there."""
    return ROOT


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """A real Ray, with this process as a driver. Its address."""
    import ray

    # Ray's workers and the other drivers must find what tests share, and the peers that they compare with.
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests"), str(ROOT / "benchmarks")]), prepend=os.pathsep)
    patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # what else runs here is no reason to end workers
    context = ray.init(
        "local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000
    )
    patch.setenv("RAY_ADDRESS", context.address_info["gcs_address"])
    yield os.environ["RAY_ADDRESS"]
    ray.shutdown()
    patch.undo()


@pytest.fixture(scope="session")
def sglang() -> Iterator["RealEngine"]:
    """A real SGLang with a real model: one for all tests. Where it can't be made, they fail."""
    from real_engine import real_engine

    with real_engine() as engine:
        yield engine


@pytest.fixture(scope="session")
def sandbox_url() -> Iterator[str]:
    """A real sandbox server, in a process of its own."""
    from sandbox.serving import serving

    with serving() as running:
        yield running.url
