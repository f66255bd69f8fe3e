"""A rollout with real tokens, recorded: what is on disk is what it was, and reads as verl's own dumps do."""

import asyncio
import json
from functools import partial
from pathlib import Path

from rollout import small_tokenizer

from toolroll import Rollout, tool
from toolroll.records.conversation import messages_of
from toolroll.records.reader import read
from toolroll.records.schema import Line
from toolroll.records.writer import RecordWriter
from toolroll.rollout.engines.scripted import ScriptedEngine
from toolroll.rollout.formats import load_rendering


@tool
def multiply(a: int, b: int) -> int:
    """Multiply."""
    return a * b


CALL = json.dumps({"name": "multiply", "arguments": {"a": 6, "b": 7}})
TURNS = [f"I compute.\n<tool_call>\n{CALL}\n</tool_call>", "It is 42."]


async def test_a_rollout_is_recorded_as_it_was(tmp_path: Path) -> None:
    tokenizer = small_tokenizer.make(small_tokenizer.CHATML, small_tokenizer.MARKERS)
    rendering = load_rendering(tokenizer, "chatml")
    script = [[*tokenizer.encode(turn, add_special_tokens=False), rendering.stop_ids[0]] for turn in TURNS]
    rollout = Rollout(engine=ScriptedEngine(script), tools=[multiply], rendering=rendering)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    async with rollout, RecordWriter(tmp_path, decode=decode) as writer:
        trajectories = [one async for one in rollout.run(["What is 6 times 7?"], n=8)]
        await asyncio.gather(*(writer.write(one, 3) for one in trajectories))
    records = {record.request_id: record for record in read(tmp_path)}
    assert len(records) == 8
    for one in trajectories:
        record = records[one.request_id]
        Line.model_validate(record.fields)
        assert record.tokens is not None
        assert record.tokens.ids == list(one.tokens.ids)
        assert record.tokens.mask == list(one.tokens.mask)
        assert [message["role"] for message in record.messages][-3:] == ["assistant", "tool", "assistant"]
        assert (record.summary().turns, record.summary().calls) == (2, 1)
        out_of_text = messages_of(record.input, record.output)
        assert [message["role"] for message in out_of_text][-3:] == ["assistant", "tool", "assistant"]
        assert out_of_text[-3]["tool_calls"][0]["function"]["arguments"] == {"a": 6, "b": 7}
        assert out_of_text[-2]["content"] == "42"
        assert out_of_text[-1]["content"].strip() == "It is 42."
