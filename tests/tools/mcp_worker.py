"""Worker with many trajectories at once, each with an MCP server.

    python mcp_worker.py SERVER DIRECTORY COUNT

Each trajectory writes a file with its own text, reads it back, and waits until all have read theirs. Then half of them
end, a quarter is cancelled, and the others wait until the process is killed. After each step the worker prints a line
of JSON and waits for a line on stdin.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from rollout import small_tokenizer
from rollout.scripted_model import QUESTION, Model, call

from toolroll import Rollout, Trajectory
from toolroll.rollout.chat.formats import load_rendering
from toolroll.rollout.engines.base import Generation
from toolroll.rollout.engines.scripted import ScriptedEngine
from toolroll.tools.mcp.mcp_tool import load_mcp_tools

LIMITS = {"call_timeout": 550, "turn_timeout": 550}


class Script(ScriptedEngine):
    """The model of all trajectories. The last turn waits for `finish`."""

    def __init__(self, model: Model, count: int, finish: asyncio.Event) -> None:
        super().__init__(self.turn)
        self.model, self.missing, self.finish = model, count, finish
        self.all_have_read = asyncio.Event()
        self.right = 0

    def turn(self, request_id: str, prompt_ids: Sequence[int], turn: int) -> list[int]:
        own_text = f"text of {request_id.partition('-')[0]}"
        if turn == 0:
            return self.model.ids(call("write_file", path="note.txt", content=own_text))
        if turn == 1:
            return self.model.ids(call("read_text_file", path="note.txt"))
        self.right += f"<tool_response>\n{own_text}\n" in self.model.tokenizer.decode(list(prompt_ids))
        return self.model.ids("Done.")

    async def generate(self, *args: Any, **kwargs: Any) -> Generation:
        generation = await super().generate(*args, **kwargs)
        if generation.ids == self.model.ids("Done."):
            self.missing -= 1
            if not self.missing:
                self.all_have_read.set()
            await self.finish.wait()
        return generation


async def report(step: str, **values: Any) -> None:
    print(json.dumps({"step": step, **values}), flush=True)
    await asyncio.to_thread(sys.stdin.readline)


async def main(server: str, directory: str, count: int) -> None:
    tokenizer = small_tokenizer.make(small_tokenizer.CHATML, small_tokenizer.MARKERS)
    rendering = load_rendering(tokenizer, "chatml")
    config = {"type": "mcp", "command": server, "args": [".", directory], "scope": "trajectory"}
    tools = load_mcp_tools({**config, "tools": ["write_file", "read_text_file"]})
    model, finish_first = Model(tokenizer, rendering), asyncio.Event()
    engines = [
        Script(model, count // 2, finish_first),
        Script(model, count // 4, asyncio.Event()),
        Script(model, count // 4, asyncio.Event()),
    ]

    async def run(engine: Script) -> list[Trajectory]:
        async with Rollout(engine=engine, tools=tools, rendering=rendering, limits=LIMITS) as rollout:
            return [one async for one in rollout.run([{"prompt": QUESTION}], n=engine.missing)]

    ending, cancelled, killed = [asyncio.create_task(run(engine)) for engine in engines]
    await asyncio.gather(*(engine.all_have_read.wait() for engine in engines))
    await report("all", right=sum(engine.right for engine in engines))
    finish_first.set()
    trajectories = await ending
    await report("ended", outcomes=[one.outcome for one in trajectories], calls=sum(len(t.calls) for t in trajectories))
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    await report("cancelled")
    await killed


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
