"""The schema in docs/ is that of the lines which are written."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from record_samples import TRAJECTORIES, trajectory, verl_line

from toolroll.records.json_line import decode, encode
from toolroll.records.line import fields_of
from toolroll.records.schema import json_schema
from toolroll.rollout.trajectory import Trajectory

VALIDATOR = jsonschema.Draft202012Validator(json.loads(json_schema()))


def test_the_file_is_made_from_the_code(root: Path) -> None:
    """`toolroll records schema > docs/records.schema.json` makes it."""
    assert (root / "docs/records.schema.json").read_text() == json_schema()


@settings(max_examples=25)
@given(TRAJECTORIES)
def test_every_line_is_valid(one: Trajectory) -> None:
    for tokens in (True, False):
        VALIDATOR.validate(decode(encode(fields_of(one, 7, tokens=tokens))))


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
def test_what_is_wrong_is_not_valid(change: dict[str, Any]) -> None:
    line = decode(encode(fields_of(trajectory(), 7)))
    assert VALIDATOR.is_valid(line)
    assert not VALIDATOR.is_valid(line | change)


def test_every_field_is_there_in_the_order_of_the_schema() -> None:
    assert list(fields_of(trajectory(), 7)) == list(json.loads(json_schema())["properties"])
    assert not VALIDATOR.is_valid(verl_line(1))
