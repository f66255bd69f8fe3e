"""A sample as a conversation: everything is there, in order, calls with their answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolroll.records.index import Shelf
from toolroll.records.record import Record
from toolroll.viewer.conversation import conversation
from toolroll.viewer.document import Block, Kind
from toolroll.viewer.fields import fields
from toolroll.viewer.harmless import harmless
from toolroll.viewer.layout import Layout
from toolroll.viewer.rewards import rewards
from viewer.dumps import ours, verls


def record(**written: Any) -> Record:
    return Record.parse(json.dumps({"format": "toolroll/1", "input": "", "output": "", **written}).encode())


def blocks(**written: Any) -> list[Block]:
    return list(conversation(record(**written)).blocks)


def call(name: str, identity: str | None = None, **arguments: Any) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def samples(directory: Path, step: int = 0) -> list[Record]:
    found = Shelf(directory).steps[step]
    found.index()
    return [found.record(row) for row in range(len(found))]


def test_ours_turn_by_turn(tmp_path: Path) -> None:
    failed = next(sample for sample in samples(ours(tmp_path, steps=[1])) if len(sample.calls) == 2)
    found = conversation(failed).blocks
    assert [block.kind for block in found][:10] == [
        Kind.SYSTEM,
        Kind.USER,
        Kind.THINKING,
        Kind.ASSISTANT,
        Kind.CALL,
        Kind.FAULT,
        Kind.ASSISTANT,
        Kind.CALL,
        Kind.ANSWER,
        Kind.ASSISTANT,
    ]
    thinking, said, called, fault = found[2:6]
    assert thinking.folded
    assert "I should compute" in thinking.text
    assert said.title == "assistant · turn 1"
    assert "tokens" in said.detail
    assert (called.title, called.language) == ("calls code_interpreter", "python")
    assert called.text.startswith("shelf = 48")
    assert fault.beside
    assert fault.title == "failed, the model's fault"
    assert "NameError" in fault.text
    detail = fault.detail.replace("\u00a0", " ")
    assert all(word in detail for word in ("waited", "ran", "ms", "reward -0.05"))


def test_an_infrastructures_fault_is_not_the_models(tmp_path: Path) -> None:
    broken = next(
        sample for step in range(3) for sample in samples(ours(tmp_path / "d", [1, 2, 3], 8, 8), step) if sample.error
    )
    found = conversation(broken).blocks
    fault = next(block for block in found if block.kind is Kind.FAULT)
    assert fault.title == "failed, not the model's fault"
    assert "could not be reached" in fault.text
    assert "5\u00a0attempts" in fault.detail
    assert next(block for block in found if block.title == "what failed").text == broken.error


@pytest.mark.parametrize("step", [0, 1])
def test_verls_conversation_is_read_out_of_its_text(tmp_path: Path, step: int) -> None:
    found = conversation(samples(verls(tmp_path), step)[0]).blocks
    kinds = [block.kind for block in found]
    assert kinds[:7] == [
        Kind.SYSTEM,
        Kind.USER,
        Kind.THINKING,
        Kind.ASSISTANT,
        Kind.CALL,
        Kind.ANSWER,
        Kind.ASSISTANT,
    ]
    assert found[4].text.startswith("shelf = 48")
    assert found[5].text == "72"
    assert found[6].text == "So it is.\n#### 72"
    assert "gts" in found[-1].text


def test_answers_find_their_calls_by_id_then_by_order() -> None:
    found = blocks(
        messages=[
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [call("a", "1", x=1), call("b", "2", y=2)]},
            {"role": "tool", "content": "second", "tool_call_id": "2"},
            {"role": "tool", "content": "first", "tool_call_id": "1"},
            {"role": "assistant", "content": "", "tool_calls": [call("c")]},
        ]
    )
    told = [(block.title, block.text) for block in found if block.kind in (Kind.CALL, Kind.ANSWER, Kind.NOTE)]
    assert told == [
        ("calls a", '{\n  "x": 1\n}'),
        ("answers", "first"),
        ("calls b", '{\n  "y": 2\n}'),
        ("answers", "second"),
        ("calls c", "{}"),
        ("no answer", ""),
    ]


def test_a_call_that_is_only_on_record_is_shown_too() -> None:
    found = blocks(
        messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<tool_call>{broken"}],
        turns=[{"turn": 0, "tokens": 3, "timings": {"total": 0.5}}],
        calls=[
            {"turn": 0, "tool": None, "arguments": None, "answer": "It is not valid JSON.", "fault": "policy"},
        ],
    )
    assert [(block.kind, block.text) for block in found[2:4]] == [
        (Kind.CALL, "{broken"),
        (Kind.FAULT, "It is not valid JSON."),
    ]


def test_a_prompt_that_has_answers_already() -> None:
    found = blocks(
        messages=[
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "3 + 3?"},
            {"role": "assistant", "content": "6"},
        ],
        turns=[{"turn": 0}],
    )
    assert [block.title for block in found[:4]] == ["user", "assistant · in the prompt", "user", "assistant · turn 1"]


def test_thinking_without_its_first_marker_and_parts_of_a_message() -> None:
    found = blocks(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "image", "image": "…"}]},
            {"role": "assistant", "content": "hm\n</think>\n\nYes."},
        ]
    )
    assert [(block.kind, block.text) for block in found[:3]] == [
        (Kind.USER, "Look\n[image]"),
        (Kind.THINKING, "hm"),
        (Kind.ASSISTANT, "Yes."),
    ]


def test_nothing_of_a_line_is_lost(tmp_path: Path) -> None:
    sample = samples(ours(tmp_path, steps=[1]))[0]
    shown = "\n".join(block.text for block in conversation(sample).blocks)
    for word in ("gsm8k/0", "difficulty", sample.request_id or "", "exact", "scaled", "code_interpreter"):
        assert word in shown
    whole = fields(sample)
    assert [block.title for block in whole.blocks] == list(sample.fields)
    packed = next(block for block in whole.blocks if block.title == "tokens")
    assert "press t" in packed.detail
    assert not packed.text
    assert [block.title for block in fields(sample, {"tokens", "messages"}).blocks] == [
        name for name in sample.fields if name not in ("tokens", "messages")
    ]
    assert "No field is chosen" in fields(sample, set(sample.fields)).blocks[0].title


def test_markup_and_escapes_are_text() -> None:
    found = blocks(messages=[{"role": "user[b]", "content": "[bold red]x[/] \x1b[2J"}])
    assert found[0].title == "user[b]"
    assert found[0].text == "[bold red]x[/] ␛[2J"


@pytest.mark.parametrize(
    "written",
    [
        {"messages": [{"role": "assistant", "content": None, "tool_calls": "?"}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": 3}, 4]}]},
        {"messages": [{"role": "tool", "content": {"a": 1}}, {"role": None}, {}]},
        {"messages": [{"role": "assistant", "content": "x", "reasoning_content": {"a": 1}}]},
        {"calls": [{"turn": "x"}, {}], "turns": [{"turn": None, "timings": 3}], "rewards": {"steps": [None, "x"]}},
        {"calls": [{"turn": 0, "metrics": {"queue_wait": "?", "attempts": "many"}, "seconds": True, "arguments": [1]}]},
        {"score": "high", "gts": {"a": [1]}, "rewards": {"functions": {"f": "x"}, "tools": 3}},
        {"output": 5, "input": ["x"], "messages": 7},
    ],
)
def test_lines_that_are_not_as_they_should_be_are_shown_all_the_same(written: dict[str, Any]) -> None:
    sample = record(**written)
    assert conversation(sample).blocks
    assert rewards(sample).blocks
    assert fields(sample).blocks


def test_rewards_by_component(tmp_path: Path) -> None:
    sample = next(sample for sample in samples(ours(tmp_path / "a", steps=[1])) if len(sample.calls) == 2)
    found = {block.title: block.text for block in rewards(sample).blocks}
    assert found["ground truth"] == "72"
    assert found["rewards by function"].startswith("gsm8k")
    assert "-0.05" in found["rewards by turn"]
    assert found["turns"].splitlines()[0].split() == (
        ["turn", "tokens", "finish", "weights", "time", "queue", "cached", "attempts"]
    )
    assert len(found["tool calls"].splitlines()) == 3
    assert "policy" in found["tool calls"]
    beside = {block.title: block.text for block in rewards(samples(verls(tmp_path / "b"))[0]).blocks}
    assert beside["beside the score"].split() == ["acc", "false", "format", "0.5"]


NAMES = ("role", "content", "tool_calls", "function", "name", "arguments", "turn", "tool", "answer", "fault", "error")
MORE = ("metrics", "queue_wait", "seconds", "reward", "timings", "total", "steps", "functions", "tools", "id", "code")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*NAMES, *MORE]), inner, max_size=5),
    max_leaves=12,
)
PARTS = st.lists(st.dictionaries(st.sampled_from([*NAMES, *MORE]), JSON, max_size=6), max_size=3)
ROLES = st.sampled_from(["assistant", "tool", "user", "system"])


@settings(max_examples=50)  # large examples, which take time to make
@given(
    messages=st.lists(
        st.tuples(ROLES, st.dictionaries(st.sampled_from(NAMES), JSON)).map(lambda pair: {**pair[1], "role": pair[0]}),
        max_size=4,
    ),
    calls=PARTS,
    turns=PARTS,
    rewards_given=st.dictionaries(st.sampled_from(MORE), JSON),
    score=JSON,
    is_ours=st.booleans(),
)
def test_any_line_that_can_be_read_can_be_shown(
    messages: Any, calls: Any, turns: Any, rewards_given: Any, score: Any, is_ours: bool
) -> None:
    given = {
        "messages": messages,
        "calls": calls,
        "turns": turns,
        "rewards": rewards_given,
        "score": score,
        "gts": score,
    }
    line = json.dumps({**given, **({"format": "toolroll/1"} if is_ours else {})}).encode()
    sample = Record.parse(line)
    for document in (conversation(sample), rewards(sample), fields(sample)):
        assert all(block.text == harmless(block.text) for block in document.blocks)
        assert len(Layout(document, 40).lines) >= len(document.blocks)
