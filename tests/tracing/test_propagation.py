"""The trace of a tool call continues at the sandbox server."""

import asyncio

import pytest
from collector import Collector, attributes, tree
from rollout import small_tokenizer
from sandbox.serving import serving

from toolroll import Rollout, SandboxFusionTool, ScriptedEngine, start_tracing

pytestmark = pytest.mark.sandbox

CALL = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>'


async def test_sandbox_logs_the_trace_of_a_call() -> None:
    tokenizer = small_tokenizer.make(
        small_tokenizer.CHATML, small_tokenizer.MARKERS, chat_template=small_tokenizer.CHATML_TEMPLATE
    )
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    turns = [[*tokenizer.encode(text, add_special_tokens=False), stop] for text in (CALL, "42")]
    with serving("--access-log") as server, Collector() as collector:
        interpreter = SandboxFusionTool({"sandbox_fusion_url": server.url})
        tracing = start_tracing(collector.url)
        async with Rollout(
            engine=ScriptedEngine(turns), tokenizer=tokenizer, tools=[interpreter], tool_prompt="hermes"
        ) as rollout:
            trajectory = await rollout.sample("What is 6 times 7?")
        await asyncio.to_thread(tracing.close)
        assert trajectory.calls[0].answer == "42"
        assert server.process.stdout is not None
        line = ""
        while "POST /run_code" not in line:
            line = await asyncio.to_thread(server.process.stdout.readline)
    assert f" trace {trajectory.request_id}" in line
    call = ("invoke_agent", "turn 0", "execute_tool code_interpreter")
    assert {call, (*call, "queue"), (*call, "sandbox")} <= set(tree(collector.spans))
    [sandbox] = [span for span in collector.spans if span.name == "sandbox"]
    assert attributes(sandbox)["toolroll.sandbox.outcome"] == "ok"
