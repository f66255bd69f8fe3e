"""What was seen in verl's environments, for all tests that look at it."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from integrations import verl_stage

if TYPE_CHECKING:
    from real_engine import RealEngine


@pytest.fixture(scope="session")
def stages(
    sglang: "RealEngine", tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, "Future[dict[str, Any]]"]]:
    """All scenes, played with each version of verl, at the same time: each waits for its processes by turns."""
    with ThreadPoolExecutor() as threads:
        yield {
            version: threads.submit(
                verl_stage.play,
                version,
                tmp_path_factory.mktemp(f"verl-{version}-"),
                sglang.model_dir,
                sglang.url if version == verl_stage.VERSIONS[0] else None,
            )
            for version in verl_stage.VERSIONS
        }


@pytest.fixture(scope="session", params=verl_stage.VERSIONS)
def seen(request: pytest.FixtureRequest, stages: dict[str, "Future[dict[str, Any]]"]) -> dict[str, Any]:
    """All scenes, played with one version of verl."""
    return stages[request.param].result()
