"""Samples as conversations: complete, in order, calls paired with results."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import scaled

from toolroll._internal.sanitize import sanitize
from toolroll.records.index import DumpDirectory
from toolroll.records.record import Record
from toolroll.viewer.documents.conversation import conversation
from toolroll.viewer.documents.document import Block, BlockKind
from toolroll.viewer.documents.fields import fields_document, rewards_document
from toolroll.viewer.documents.layout import Layout
from viewer.dumps import write_toolroll_run, write_verl_run


def record(**written: Any) -> Record:
    return Record.parse(json.dumps({"format": "toolroll/1", "input": "", "output": "", **written}).encode())


def blocks(**written: Any) -> list[Block]:
    return list(conversation(record(**written)).blocks)


def call(name: str, identity: str | None = None, **arguments: Any) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def samples(directory: Path, step: int = 0) -> list[Record]:
    found = DumpDirectory(directory).steps[step]
    found.index()
    return [found.record(row) for row in range(len(found))]


def test_toolroll_record_turn_by_turn(tmp_path: Path) -> None:
    failed = next(sample for sample in samples(write_toolroll_run(tmp_path, steps=[1])) if len(sample.calls) == 2)
    found = conversation(failed).blocks
    assert [block.kind for block in found][:10] == [
        BlockKind.SYSTEM,
        BlockKind.USER,
        BlockKind.THINKING,
        BlockKind.ASSISTANT,
        BlockKind.CALL,
        BlockKind.FAULT,
        BlockKind.ASSISTANT,
        BlockKind.CALL,
        BlockKind.RESULT,
        BlockKind.ASSISTANT,
    ]
    thinking, text, called, fault = found[2:6]
    assert thinking.folded
    assert "I should compute" in thinking.text
    assert text.title == "assistant · turn 0"
    assert "tokens" in text.detail
    assert (called.title, called.language) == ("call code_interpreter", "python")
    assert called.text.startswith("shelf = 48")
    assert fault.beside
    assert fault.title == "policy fault"
    assert "NameError" in fault.text
    detail = fault.detail.replace("\u00a0", " ")
    assert all(word in detail for word in ("queued", "ran", "ms", "reward -0.05"))


def test_turns_are_numbered_as_in_the_record(tmp_path: Path) -> None:
    sample = next(sample for sample in samples(write_toolroll_run(tmp_path, steps=[1])) if len(sample.calls) == 2)
    recorded = [turn["turn"] for turn in sample.turns]
    assert recorded == [0, 1, 2]
    titles = [block.title for block in conversation(sample).blocks if block.kind is BlockKind.ASSISTANT]
    assert titles == [f"assistant · turn {turn}" for turn in recorded]
    tables = {block.title: block.text.splitlines() for block in rewards_document(sample).blocks}
    assert [int(row.split()[0]) for row in tables["turns"][1:]] == recorded
    assert [int(row.split()[1]) for row in tables["tool calls"][1:]] == [call["turn"] for call in sample.calls]
    assert [row.split()[:2] for row in tables["rewards by turn"]] == [["turn", "0"], ["turn", "1"]]


def test_infra_fault_is_distinguished(tmp_path: Path) -> None:
    broken = next(
        sample
        for step in range(3)
        for sample in samples(write_toolroll_run(tmp_path / "d", [1, 2, 3], 8, 8), step)
        if sample.error
    )
    found = conversation(broken).blocks
    fault = next(block for block in found if block.kind is BlockKind.FAULT)
    assert fault.title == "infra fault"
    assert "could not be reached" in fault.text
    assert "5\u00a0attempts" in fault.detail
    assert next(block for block in found if block.title == "error").text == broken.error


@pytest.mark.parametrize("step", [0, 1])
def test_verl_conversation_is_parsed_from_text(tmp_path: Path, step: int) -> None:
    found = conversation(samples(write_verl_run(tmp_path), step)[0]).blocks
    kinds = [block.kind for block in found]
    assert kinds[:7] == [
        BlockKind.SYSTEM,
        BlockKind.USER,
        BlockKind.THINKING,
        BlockKind.ASSISTANT,
        BlockKind.CALL,
        BlockKind.RESULT,
        BlockKind.ASSISTANT,
    ]
    assert found[4].text.startswith("shelf = 48")
    assert found[5].text == "72"
    assert found[6].text == "So it is.\n#### 72"
    assert "gts" in found[-1].text


def test_results_are_paired_by_id_then_by_order() -> None:
    found = blocks(
        messages=[
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [call("a", "1", x=1), call("b", "2", y=2)]},
            {"role": "tool", "content": "second", "tool_call_id": "2"},
            {"role": "tool", "content": "first", "tool_call_id": "1"},
            {"role": "assistant", "content": "", "tool_calls": [call("c")]},
        ]
    )
    shown = [
        (block.title, block.text) for block in found if block.kind in (BlockKind.CALL, BlockKind.RESULT, BlockKind.NOTE)
    ]
    assert shown == [
        ("call a", '{\n  "x": 1\n}'),
        ("result", "first"),
        ("call b", '{\n  "y": 2\n}'),
        ("result", "second"),
        ("call c", "{}"),
        ("no result", ""),
    ]


def test_recorded_call_without_message_is_shown() -> None:
    found = blocks(
        messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<tool_call>{broken"}],
        turns=[{"turn": 0, "tokens": 3, "timings": {"total": 0.5}}],
        calls=[
            {"turn": 0, "tool": None, "arguments": None, "answer": "It is not valid JSON.", "fault": "policy"},
        ],
    )
    assert [(block.kind, block.text) for block in found[2:4]] == [
        (BlockKind.CALL, "{broken"),
        (BlockKind.FAULT, "It is not valid JSON."),
    ]


def test_assistant_messages_in_prompt_are_marked() -> None:
    found = blocks(
        messages=[
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "3 + 3?"},
            {"role": "assistant", "content": "6"},
        ],
        turns=[{"turn": 0}],
    )
    assert [block.title for block in found[:4]] == ["user", "assistant · in the prompt", "user", "assistant · turn 0"]


def test_thinking_without_opening_tag_and_content_parts() -> None:
    found = blocks(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "image", "image": "…"}]},
            {"role": "assistant", "content": "hm\n</think>\n\nYes."},
        ]
    )
    assert [(block.kind, block.text) for block in found[:3]] == [
        (BlockKind.USER, "Look\n[image]"),
        (BlockKind.THINKING, "hm"),
        (BlockKind.ASSISTANT, "Yes."),
    ]


def test_no_field_is_lost(tmp_path: Path) -> None:
    sample = samples(write_toolroll_run(tmp_path, steps=[1]))[0]
    shown = "\n".join(block.text for block in conversation(sample).blocks)
    for word in ("gsm8k/0", "difficulty", sample.request_id or "", "exact", "processed_logprobs", "code_interpreter"):
        assert word in shown
    whole = fields_document(sample)
    assert [block.title for block in whole.blocks] == list(sample.fields)
    packed = next(block for block in whole.blocks if block.title == "tokens")
    assert "press t" in packed.detail
    assert not packed.text
    assert [block.title for block in fields_document(sample, {"tokens", "messages"}).blocks] == [
        name for name in sample.fields if name not in ("tokens", "messages")
    ]
    assert "No fields selected" in fields_document(sample, set(sample.fields)).blocks[0].title


def test_markup_and_escapes_are_plain_text() -> None:
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
def test_malformed_records_are_shown(written: dict[str, Any]) -> None:
    sample = record(**written)
    assert conversation(sample).blocks
    assert rewards_document(sample).blocks
    assert fields_document(sample).blocks


def test_rewards_are_shown_by_component(tmp_path: Path) -> None:
    sample = next(sample for sample in samples(write_toolroll_run(tmp_path / "a", steps=[1])) if len(sample.calls) == 2)
    found = {block.title: block.text for block in rewards_document(sample).blocks}
    assert found["ground truth"] == "72"
    assert found["rewards by function"].startswith("gsm8k")
    assert "-0.05" in found["rewards by turn"]
    assert found["turns"].splitlines()[0].split() == (
        ["turn", "tokens", "finish", "weights", "time", "queue", "cached", "attempts"]
    )
    assert len(found["tool calls"].splitlines()) == 3
    assert "policy" in found["tool calls"]
    verl = {block.title: block.text for block in rewards_document(samples(write_verl_run(tmp_path / "b"))[0]).blocks}
    assert verl["reward extra info"].split() == ["acc", "false", "format", "0.5"]


NAMES = ("role", "content", "tool_calls", "function", "name", "arguments", "turn", "tool", "answer", "fault", "error")
MORE = ("metrics", "queue_wait", "seconds", "reward", "timings", "total", "steps", "functions", "tools", "id", "code")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*NAMES, *MORE]), inner, max_size=5),
    max_leaves=12,
)
PARTS = st.lists(st.dictionaries(st.sampled_from([*NAMES, *MORE]), JSON, max_size=6), max_size=3)
ROLES = st.sampled_from(["assistant", "tool", "user", "system"])


@settings(max_examples=scaled(50))  # large examples take time to generate
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
def test_any_readable_record_can_be_shown(
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
    for document in (conversation(sample), rewards_document(sample), fields_document(sample)):
        assert all(block.text == sanitize(block.text) for block in document.blocks)
        assert len(Layout(document, 40).lines) >= len(document.blocks)
