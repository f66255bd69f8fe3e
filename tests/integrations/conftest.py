"""What was seen in verl's environments, for all tests that look at it."""

from typing import Any

import pytest

from integrations import verl_stage


@pytest.fixture(scope="session", params=verl_stage.VERSIONS)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All scenes, played with one version of verl: one after the other, as each takes 4 GB of memory."""
    engine = request.getfixturevalue("sglang")
    url = engine.url if request.param == verl_stage.VERSIONS[0] else None
    folder = tmp_path_factory.mktemp(f"verl-{request.param}-")
    return verl_stage.play(request.param, folder, engine.model_dir, url)
