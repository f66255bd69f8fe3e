"""Fixtures: a scripted model on a small tokenizer."""

from typing import Any

import pytest

from rollout import small_tokenizer
from rollout.scripted_model import Model
from toolroll.rollout.chat.formats import load_rendering
from toolroll.rollout.chat.rendering import Rendering


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return small_tokenizer.make(small_tokenizer.CHATML, small_tokenizer.MARKERS)


@pytest.fixture(scope="session")
def rendering(tokenizer: Any) -> Rendering:
    return load_rendering(tokenizer, "chatml")


@pytest.fixture
def model(tokenizer: Any, rendering: Rendering) -> Model:
    return Model(tokenizer, rendering)
