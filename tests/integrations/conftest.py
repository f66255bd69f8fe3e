"""Fixtures for the tests with real verl."""

from typing import Any

import pytest

from integrations import verl_stage


@pytest.fixture(scope="session", params=verl_stage.VERSIONS)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of all scenarios with one version of verl. Versions run in sequence, because each needs 4 GB."""
    engine = request.getfixturevalue("sglang")
    url = engine.url if request.param == verl_stage.VERSIONS[0] else None
    directory = tmp_path_factory.mktemp(f"verl-{request.param}-")
    return verl_stage.play(request.param, directory, engine.model_dir, url)
