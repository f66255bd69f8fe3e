"""The schema in docs/ matches the lines that are written."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from record_samples import TRAJECTORIES, trajectory, verl_line
from strategies import scaled

from toolroll.records.json_line import decode, encode
from toolroll.records.line import trajectory_fields
from toolroll.records.schema import json_schema
from toolroll.rollout.trajectory import Trajectory

VALIDATOR = jsonschema.Draft202012Validator(json.loads(json_schema()))


def test_schema_file_is_up_to_date(root: Path) -> None:
    """Regenerate it with `toolroll records schema > docs/records.schema.json`."""
    assert (root / "docs/records.schema.json").read_text() == json_schema()


@settings(max_examples=scaled(25))
@given(TRAJECTORIES)
def test_every_line_is_valid(one: Trajectory) -> None:
    for tokens in (True, False):
        VALIDATOR.validate(decode(encode(trajectory_fields(one, 7, tokens=tokens))))


@pytest.mark.parametrize(
    "change",
    [
        {"score": "1.0"},
        {"format": "toolroll/2"},
        {"finish_reason": "bored"},
        {"calls": [{"tool": "f"}]},
        {"tokens": {"ids": [1, 2], "logprobs": None, "spans": []}},
        {"unknown": 1},
    ],
)
def test_invalid_lines_are_rejected(change: dict[str, Any]) -> None:
    line = decode(encode(trajectory_fields(trajectory(), 7)))
    assert VALIDATOR.is_valid(line)
    assert not VALIDATOR.is_valid(line | change)


def test_fields_are_in_order_of_schema() -> None:
    assert [*trajectory_fields(trajectory(), 7), "rescored"] == list(json.loads(json_schema())["properties"])
    assert not VALIDATOR.is_valid(verl_line(1))
