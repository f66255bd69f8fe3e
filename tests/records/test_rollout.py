"""A rollout with real tokens is recorded and read back."""

import asyncio
import json
from functools import partial
from pathlib import Path

from rollout import small_tokenizer

from toolroll import Rollout, tool
from toolroll.records.conversation import parse_messages
from toolroll.records.reader import read_records
from toolroll.records.schema import RecordLine
from toolroll.records.writer import RecordWriter
from toolroll.rollout.chat.formats import load_rendering
from toolroll.rollout.engines.scripted import ScriptedEngine


@tool
def multiply(a: int, b: int) -> int:
    """Multiply."""
    return a * b


CALL = json.dumps({"name": "multiply", "arguments": {"a": 6, "b": 7}})
TURNS = [f"I compute.\n<tool_call>\n{CALL}\n</tool_call>", "It is 42."]


async def test_rollout_is_recorded_unchanged(tmp_path: Path) -> None:
    tokenizer = small_tokenizer.make(small_tokenizer.CHATML, small_tokenizer.MARKERS)
    rendering = load_rendering(tokenizer, "chatml")
    script = [[*tokenizer.encode(turn, add_special_tokens=False), rendering.stop_ids[0]] for turn in TURNS]
    rollout = Rollout(engine=ScriptedEngine(script), tools=[multiply], rendering=rendering)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    async with rollout, RecordWriter(tmp_path, decode=decode) as writer:
        trajectories = [one async for one in rollout.run(["What is 6 times 7?"], n=8)]
        await asyncio.gather(*(writer.write(one, 3) for one in trajectories))
    records = {record.request_id: record for record in read_records(tmp_path)}
    assert len(records) == 8
    for one in trajectories:
        record = records[one.request_id]
        RecordLine.model_validate(record.fields)
        assert record.tokens is not None
        assert record.tokens.ids == list(one.tokens.ids)
        assert record.tokens.mask == list(one.tokens.mask)
        assert [message["role"] for message in record.messages][-3:] == ["assistant", "tool", "assistant"]
        assert (record.summary().turns, record.summary().calls) == (2, 1)
        parsed = parse_messages(record.input, record.output)
        assert [message["role"] for message in parsed][-3:] == ["assistant", "tool", "assistant"]
        assert parsed[-3]["tool_calls"][0]["function"]["arguments"] == {"a": 6, "b": 7}
        assert parsed[-2]["content"] == "42"
        assert parsed[-1]["content"].strip() == "It is 42."
