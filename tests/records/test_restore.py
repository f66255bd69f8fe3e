"""A trajectory that is restored from its record equals the original."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from record_samples import TRAJECTORIES, trajectory, verl_line
from strategies import scaled

from toolroll.errors import Fault
from toolroll.images import Image, ImageSpan
from toolroll.records.json_line import BadLine, encode
from toolroll.records.line import trajectory_fields
from toolroll.records.record import Record
from toolroll.records.restore import restore_trajectory
from toolroll.rollout.tokens import TokenStream
from toolroll.rollout.trajectory import Rewards, Trajectory
from toolroll.run.reward_functions import ground_truth, gsm8k_flexible, last_message_text


def record_of(one: Trajectory, **options: Any) -> Record:
    return Record.parse(encode(trajectory_fields(one, 7, **options)))


def exact(stream: TokenStream) -> tuple[Any, ...]:
    logprobs = np.array(stream.logprobs, "<f4").tobytes()
    return list(stream.ids), bytes(stream.mask), logprobs, stream.spans, stream.images


@settings(max_examples=scaled(25))
@given(TRAJECTORIES)
def test_record_of_restored_trajectory_is_identical(one: Trajectory) -> None:
    record = record_of(one)
    restored = restore_trajectory(record)
    again = record_of(restored, gts=record.gts)
    ignored = ("written_at", "extra")
    assert {name: value for name, value in again.fields.items() if name not in ignored} == {
        name: value for name, value in record.fields.items() if name not in ignored
    }


def test_restored_trajectory_equals_the_original() -> None:
    one = trajectory(3)
    restored = restore_trajectory(record_of(one))
    assert exact(restored.tokens) == exact(one.tokens)
    empty = TokenStream([])
    assert replace(restored, tokens=empty) == replace(one, tokens=empty)
    assert restored.calls[0].fault is None


def test_images_keep_their_place_but_not_their_bytes() -> None:
    image = Image.from_data(b"pixels", "image/png", (4, 2))
    stream = TokenStream([1, 2, 2, 3], [ImageSpan(image, 1, 3)])
    stream.append_sampled([4], [-1.0], turn=0)
    stream.append_unsampled([5, 2, 2], turn=0, images=[ImageSpan(image, 1, 3)])
    call = replace(trajectory().calls[0], images=(image,), fault=Fault.INFRA)
    restored = restore_trajectory(record_of(trajectory(tokens=stream, calls=[call])))
    assert restored.tokens.images == [ImageSpan(image, 1, 3), ImageSpan(image, 6, 8)]
    assert restored.calls[0].images == (image,)
    assert restored.calls[0].fault is Fault.INFRA


def test_reward_functions_score_records_of_verl() -> None:
    restored = restore_trajectory(Record.parse(encode(verl_line(3, acc=1.0))))
    assert last_message_text(restored) == "6 times 7 is #### 42"
    assert ground_truth(restored) == "42"
    assert gsm8k_flexible(restored) == 1.0
    assert restored.extra["acc"] == 1.0


def test_ground_truth_of_the_writer_is_restored() -> None:
    assert ground_truth(restore_trajectory(record_of(trajectory(extra={}), gts="7"))) == "7"
    assert ground_truth(restore_trajectory(record_of(trajectory(), gts="7"))) == "42", "the row's takes precedence"


@pytest.mark.parametrize(
    "change",
    [{"messages": [{"role": "wizard"}]}, {"tokens": {"ids": "?"}}, {"finish_reason": "bored"}, {"turns": [{}]}],
)
def test_invalid_field_is_named_as_such(change: dict[str, Any]) -> None:
    fields = {**record_of(trajectory()).fields, **change}
    with pytest.raises(BadLine, match="Invalid"):
        restore_trajectory(Record.parse(encode(fields)))


def test_rewards_that_were_not_finite_are_zero() -> None:
    one = trajectory(rewards=Rewards(total=float("nan"), steps=(float("inf"), 1.0)))
    assert restore_trajectory(record_of(one)).rewards.steps == (0.0, 1.0)
