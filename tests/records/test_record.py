"""Records contain everything that was written of a trajectory."""

import json
import math
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import doc_page
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from record_samples import MESSAGES, TRAJECTORIES, VERL_ANSWER, VERL_PROMPT, streams, trajectory, verl_line
from strategies import JSON, scaled

from toolroll.records.json_line import MAX_NESTING_DEPTH, BadLine, decode, encode
from toolroll.records.line import mapping_fields, trajectory_fields
from toolroll.records.packed_tokens import PackedTokens, pack
from toolroll.records.record import FORMAT, Record
from toolroll.rollout.tokens import TokenStream
from toolroll.rollout.trajectory import Rewards, Trajectory
from toolroll.schemas import Message


def written(one: Trajectory, **options: Any) -> Record:
    line = encode(trajectory_fields(one, 7, **options))
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    return Record.parse(line)


def after_json(value: Any) -> Any:
    """Return a value after a JSON round trip: adjacent surrogates become one character."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if isinstance(value, dict):
        return {after_json(key): after_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [after_json(item) for item in value]
    return value


def bits(numbers: list[float] | None) -> bytes | None:
    return None if numbers is None else np.array(numbers, "<f4").tobytes()


def same_tokens(tokens: PackedTokens, stream: TokenStream) -> bool:
    return (
        tokens.ids == list(stream.ids)
        and tokens.mask == list(stream.mask)
        and bits(tokens.logprobs) == (bits(list(stream.logprobs)) if stream.has_logprobs else None)
        and after_json([asdict(span) for span in tokens.spans]) == after_json([asdict(span) for span in stream.spans])
        and tokens.prompt_length == stream.prompt_length
    )


@settings(max_examples=scaled(100))
@given(TRAJECTORIES)
@example(trajectory(extra={"ground_truth": -(2**63) - 1}))
def test_record_has_all_fields_of_trajectory(one: Trajectory) -> None:
    record = written(one)
    assert record.is_native
    assert record.step == 7
    assert record.fields["messages"] == after_json(record.fields["messages"])
    assert [Message.model_validate(message).model_dump() for message in record.fields["messages"]] == [
        after_json(message.model_dump()) for message in one.messages
    ]
    assert record.tokens is not None if len(one.tokens) else record.tokens is None
    assert record.tokens is None or same_tokens(record.tokens, one.tokens)
    assert len(record.earlier) == len(one.earlier)
    assert all(map(same_tokens, record.earlier, one.earlier))
    assert record.score == one.rewards.total
    for name in ("request_id", "group", "sample", "error", "seconds", "outcome", "finish_reason", "fidelity"):
        assert getattr(record, name) == after_json(getattr(one, name)), name
    assert record.rewards == after_json(asdict(one.rewards))
    assert record.calls == [after_json(asdict(call)) for call in one.calls]
    assert record.turns == [after_json(asdict(turn)) for turn in one.turns]
    assert record.fields["logprobs_mode"] == one.logprobs_mode
    assert record.fields["extra"] == after_json(dict(one.extra))


PAGE = doc_page.files((Path(__file__).parent.parent.parent / "docs/records.md").read_text())


@given(streams())
def test_tokens_can_be_decoded_with_numpy(stream: TokenStream) -> None:
    """Runs the code in docs/records.md."""
    page: dict[str, Any] = {}
    exec(PAGE["tokens.py"], page)
    ids, mask, logprobs = page["decode"](json.loads(encode(pack(stream))))
    assert ids.tolist() == list(stream.ids)
    assert mask.tolist() == [bool(one) for one in stream.mask]
    assert (None if logprobs is None else logprobs.tobytes()) == (
        bits(list(stream.logprobs)) if stream.has_logprobs else None
    )


@given(MESSAGES)
def test_unset_fields_of_message_are_omitted(message: Message) -> None:
    fields = written(trajectory(messages=[message])).fields["messages"][0]
    assert "content" in fields
    assert fields.get("tool_calls", ()) is not None
    assert fields.get("reasoning_content", "") is not None


def test_numbers_that_are_not_finite_are_null() -> None:
    one = trajectory(
        rewards=Rewards(total=math.nan, steps=(math.inf, 1.0), tools={}, functions={}),
        seconds=-math.inf,
        extra={"x": [math.nan, "\ud800"]},  # which orjson rejects
    )
    for given_, seen in ((one, [None, "\ud800"]), (trajectory(extra={"x": [math.nan]}, seconds=math.nan), [None])):
        record = written(given_)
        assert record.seconds is None
        assert record.fields["extra"] == {"x": seen}
    assert written(one).score is None
    assert written(one).rewards["steps"] == [None, 1.0]


class BadStr:
    def __str__(self) -> str:
        raise RuntimeError("no")


class BadArray:
    def tolist(self) -> list[Any]:
        raise ValueError("on another device")


def test_any_value_of_extra_can_be_written() -> None:
    nested: Any = "innermost"
    for _ in range(5000):
        nested = [nested]
    extra = {
        "array": np.arange(3),
        "numbers": (np.float32(0.5), np.int64(3), 10**30, -(2**63) - 1, 10**5000),
        "objects": np.array([{"a": 1}, None], dtype=object),
        "set": {1},
        "bytes": b"\xff\x00",
        "bad str": BadStr(),
        "class": BadStr,
        "classes": [Message, np.ndarray],
        "model": Message(role="user", content="Hi"),
        "bad array": BadArray(),
        3: "not a text",
        "nested": nested,
    }
    found = written(trajectory(extra=extra)).fields["extra"]
    assert found["array"] == [0, 1, 2]
    assert found["numbers"] == [0.5, 3, 10**30, -(2**63) - 1, "(integer of 16610 bits)"]
    assert found["objects"] == [{"a": 1}, None]
    assert found["set"] == [1]
    assert found["bytes"] == "/wA="
    assert "BadStr" in found["bad str"]
    assert "BadStr" in found["class"]
    assert ["Message" in found["classes"][0], "ndarray" in found["classes"][1]] == [True, True]
    assert found["model"]["content"] == "Hi"
    assert found["bad array"] == "(BadArray, cannot be encoded: ValueError)"
    assert found["3"] == "not a text"
    depth = 0
    while isinstance(found["nested"], list):
        found["nested"], depth = found["nested"][0], depth + 1
    assert MAX_NESTING_DEPTH - 5 < depth < MAX_NESTING_DEPTH
    assert found["nested"] == "(nested too deeply)"


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4))
@example({"NaN": None})
@example({"large": [2**64, -(2**63) - 1, 10**4299]})
def test_output_of_python_json_is_decoded(fields: dict[str, Any]) -> None:
    assert decode(json.dumps(fields).encode()) == fields


def test_text_is_decoded_from_tokens() -> None:
    record = written(trajectory(), decode=lambda ids: "-".join(map(str, ids)))
    assert (record.input, record.output) == ("1-2-3-4", "5-6-7-8-9-10-11")


def test_text_without_tokenizer_uses_messages() -> None:
    record = written(trajectory())
    assert record.input == "user\nWhat is 6 times 7?\nassistant\n"
    assert record.output == (
        "<think>\nLet me compute.\n</think>\n\n<tool_call>\n"
        '{"name": "code_interpreter", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>\n'
        "tool\n42\n\nassistant\n6 times 7 is 42."
    )


def test_few_shot_examples_belong_to_prompt() -> None:
    shots = [Message(role="user", content="1 + 1?"), Message(role="assistant", content="2")]
    record = written(trajectory(messages=[*shots, *trajectory().messages]))
    assert record.input.startswith("user\n1 + 1?\nassistant\n2\nuser\nWhat is")
    assert record.output.startswith("<think>")


def test_tokens_can_be_left_out() -> None:
    complete, without = written(trajectory()), written(trajectory(), tokens=False)
    assert complete.tokens is not None
    assert without.tokens is None
    assert without.fields["tokens"] is None
    assert without.messages == complete.messages


def test_ground_truth_is_found_in_extra() -> None:
    assert written(trajectory()).gts == "42"
    assert written(trajectory(extra={"reward_model": {"ground_truth": [1], "style": "rule"}})).gts == [1]
    assert written(trajectory(extra={})).gts is None
    assert written(trajectory(), gts=None).gts is None
    assert written(trajectory(), gts="else").gts == "else"


def test_verl_keys_come_first() -> None:
    fields = written(trajectory(3)).fields
    assert list(fields)[:5] == ["input", "output", "gts", "score", "step"]
    assert fields["uid"] == "0_3_0"
    assert fields["format"] == FORMAT
    assert list(mapping_fields({"score": 1.0, "note": "x"}, 3)) == ["input", "output", "gts", "score", "note", "step"]


@pytest.mark.parametrize("version", ["0.6", "0.7", "0.8", "0.9"])
def test_verl_lines_are_read(version: str) -> None:
    line = verl_line(12, 3, score=0.5, version=version, acc=True, pred="42", score_of_format=math.nan)
    record = Record.parse(json.dumps(line, ensure_ascii=False).encode())
    assert not record.is_native
    assert (record.step, record.score, record.gts) == (12, 0.5, "42")
    assert (record.input, record.output) == (VERL_PROMPT, VERL_ANSWER)
    assert record.fields["acc"] is True
    assert record.fields["score_of_format"] is None
    assert record.tokens is None
    assert record.earlier == []
    assert record.request_id == ("verl-3" if version == "0.8" else None)
    assert record.sample == (3 if version == "0.9" else None)
    summary = record.summary()
    assert (summary.turns, summary.calls, summary.tokens, summary.finish_reason) == (2, 1, None, None)


def test_samples_of_one_prompt_share_a_group() -> None:
    def group(**line: Any) -> str | None:
        return Record.parse(encode(line)).group

    assert group(**verl_line(1, 0)) == group(**verl_line(9, 5, score=0.0))
    assert group(input="a") != group(input="b")
    assert group(**verl_line(1, 0, version="0.9")) == group(**verl_line(1, 7, version="0.9")) == "0d9a4a66-9c9e-4d9b"
    assert group(uid="by_itself") == "by_itself"
    assert group(uid="a_b_0_1") == "a_b"
    assert group(output="x") is None


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"input": "a", "out', "Invalid JSON"),
        (b'{"input": "\xff"}', "Invalid UTF-8: byte 11 is 0xff"),
        (b"[1, 2]", "Expected a JSON object"),
        (b"", "Invalid JSON"),
        (b"\x00\x00", "Invalid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"format": "toolroll/2"}', "toolroll/2"),
        (b"9" * 5000, "Invalid JSON"),
    ],
)
def test_bad_line_is_explained(line: bytes, problem: str) -> None:
    with pytest.raises(BadLine, match=problem):
        Record.parse(line)


@settings(max_examples=scaled(100))
@example({"turns": [{"turn": []}]})
@given(st.dictionaries(st.sampled_from(sorted(trajectory_fields(trajectory(), 1))), JSON))
def test_fields_of_other_types_are_tolerated(fields: dict[str, Any]) -> None:
    """A line of another program may use the same names for other values."""
    for line in (fields, {**fields, "format": FORMAT}):
        record = Record.parse(encode(line))
        record.summary()
        assert all(isinstance(message, dict) for message in record.messages)
        for part in ("tokens", "earlier"):
            with suppress(BadLine):
                getattr(record, part)


def test_damaged_tokens_raise_bad_line() -> None:
    good = json.loads(encode(pack(trajectory().tokens)))
    first, *others = good["spans"]
    for damage in (
        {"ids": good["ids"][:-4]},
        {"ids": "?"},
        {"logprobs": ""},
        {"spans": others},
        {"spans": [first]},
        {"spans": [{**first, "author": "unknown"}, *others]},
        {"spans": [{**first, "end": "4"}, *others]},
    ):
        fields = trajectory_fields(trajectory(), 1) | {"tokens": {**good, **damage}}
        with pytest.raises(BadLine, match="Invalid tokens"):
            Record.parse(encode(fields)).tokens  # noqa: B018
