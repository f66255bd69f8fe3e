"""Trajectories with a real engine, real weights and the real sandbox.

The model is a small one, and is led: by four examples of calls in its prompt. Nothing forces its words.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from real_engine import RealEngine

from toolroll import SandboxFusionTool
from toolroll.rollout.engines.openai import OpenAIEngine
from toolroll.rollout.engines.sglang import SGLangEngine
from toolroll.rollout.formats import load_rendering
from toolroll.rollout.limits import Limits
from toolroll.rollout.rendering import Rendering
from toolroll.rollout.rollout import Rollout
from toolroll.rollout.tokens import Author
from toolroll.rollout.trajectory import Fidelity, FinishReason, Trajectory
from toolroll.schemas import Message

EXAMPLES = [("12 + 30", 42), ("81 - 19", 62), ("7 * 8", 56), ("45 + 28", 73)]
SUMS = ["59 - 7", "23 + 19", "64 - 8", "9 * 6", "31 + 44", "90 - 35", "8 * 7", "17 + 26"]


def question(expression: str) -> dict[str, Any]:
    return {"role": "user", "content": f"What is {expression}?"}


def conversation(expression: str) -> list[dict[str, Any]]:
    """A question, after four that were answered by the tool."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Calculate with the code_interpreter."}]
    for example, value in EXAMPLES:
        function = {"name": "code_interpreter", "arguments": {"code": f"print({example})"}}
        messages += [
            question(example),
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": str(value)},
            {"role": "assistant", "content": f"{example} is {value}."},
        ]
    return [*messages, question(expression)]


@pytest.fixture(scope="module")
def rendering(sglang: RealEngine) -> Rendering:
    return load_rendering(sglang.model_dir)


async def run(sglang: RealEngine, rendering: Rendering, url: str, count: int, temperature: float) -> list[Trajectory]:
    limits = Limits(max_response_len=400, max_assistant_turns=4)
    prompts = [{"prompt": conversation(one), "sum": one} for one in SUMS]
    async with Rollout(
        engine=SGLangEngine(sglang.url),
        tools=[SandboxFusionTool({"sandbox_fusion_url": url, "default_timeout": 10})],
        rendering=rendering,
        limits=limits,
        sampling_params={"temperature": temperature, "max_new_tokens": 80},
        max_in_flight=16,
    ) as rollout:
        return [one async for one in rollout.run(prompts, n=count // len(SUMS))]


def drifted(trajectory: Trajectory, rendering: Rendering, tools: list[dict[str, Any]]) -> bool:
    """Whether a client that renders the messages anew at each turn would have sent the engine other tokens."""
    stream = trajectory.tokens
    assistants = [place for place, message in enumerate(trajectory.messages) if message.role == "assistant"]
    starts = [span.start for span in stream.spans if span.author is Author.MODEL]
    own = assistants[-len(starts) :]
    return any(
        rendering.prompt(trajectory.messages[:place], tools) != stream.ids[:start].tolist()
        for place, start in zip(own, starts, strict=True)
    )


async def test_trajectories_of_a_real_model_score_as_they_were_sampled(
    sglang: RealEngine, rendering: Rendering, sandbox_url: str, say: Callable[[str], None]
) -> None:
    trajectories = await run(sglang, rendering, sandbox_url, 56, temperature=1.0)
    called = [one for one in trajectories if any(call.fault is None for call in one.calls)]
    assert len(called) >= 32, f"only {len(called)} of {len(trajectories)} had a call that ran"
    ends = {FinishReason.STOP, FinishReason.LENGTH, FinishReason.MAX_TURNS}
    assert {one.finish_reason for one in trajectories} <= ends
    assert {one.fidelity for one in trajectories} == {Fidelity.EXACT}
    assert all(one.metrics["outcome"] for one in called[0].calls if one.fault is None)
    tools = [SandboxFusionTool.default_schema]
    differences: list[float] = []
    async with SGLangEngine(sglang.url) as engine:
        for one in called[:32]:
            stream = one.tokens
            scored = await engine.score(stream.ids.tolist(), start=stream.prompt_length)
            sampled, mask = stream.response_logprobs, stream.response_mask
            assert sampled is not None
            assert len(scored) == len(sampled) == len(mask)
            differences += [abs(a - b) for a, b, by_model in zip(scored, sampled, mask, strict=True) if by_model]
    mean, most = statistics.mean(differences), max(differences)
    drifts = sum(drifted(one, rendering, tools) for one in trajectories)
    say(
        f"{len(called)} of {len(trajectories)} trajectories called the tool; |sampled - scored| over "
        f"{len(differences)} tokens: mean {mean:.4f}, max {most:.3f}; rendered anew, {drifts} would have drifted"
    )
    assert mean < 0.05, "bfloat16 gives some hundredths"
    assert most < 1.5


async def test_the_answers_of_the_sandbox_are_in_the_tokens(
    sglang: RealEngine, rendering: Rendering, sandbox_url: str
) -> None:
    trajectories = await run(sglang, rendering, sandbox_url, 8, temperature=0.0)
    right = 0
    for one in trajectories:
        tools = [span for span in one.tokens.spans if span.author is Author.TOOL]
        value = str(eval(str(one.extra["sum"])))
        text = "".join(rendering.decode(one.tokens.ids[span.start : span.end].tolist()) for span in tools)
        right += f"<tool_response>\n{value}\n</tool_response>" in text and value in str(one.messages[-1].content)
        assert all(turn.timings.cached_tokens is not None for turn in one.turns)
    assert right >= 6, "the model, greedy, calculates by its tool"


async def test_abort_and_resume_on_a_real_engine(sglang: RealEngine, rendering: Rendering) -> None:
    params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 96}
    prompt = [Message(role="user", content="Count.").model_dump(exclude_none=True)]

    async def collect(rollout: Rollout) -> list[Trajectory]:
        return [one async for one in rollout.run([prompt], n=4)]

    engine = SGLangEngine(sglang.url)
    async with Rollout(engine=engine, rendering=rendering, sampling_params=params) as rollout:
        began = time.monotonic()
        await rollout.sample({"prompt": prompt, "sampling_params": {"max_new_tokens": 8}})
        gathering = asyncio.create_task(collect(rollout))
        await asyncio.sleep(max(1.0, 2 * (time.monotonic() - began)))  # long enough for some tokens, on any machine
        await rollout.abort()
        await engine.update_weights(sglang.model_dir, "step-9")
        rollout.resume()
        interrupted = await gathering
    for one in interrupted:
        assert one.tokens.response_length == 96
        assert len(one.turns) >= 2, "it was interrupted, and went on"
        assert one.turns[0].finish == "abort"
        assert sum(turn.tokens for turn in one.turns) == 96
        versions = [span.weight_version for span in one.tokens.spans if span.author is Author.MODEL]
        assert versions[0] != versions[-1] == "step-9", "which weights wrote which part is known"


async def test_the_end_of_the_engines_context_is_a_length(sglang: RealEngine, rendering: Rendering) -> None:
    long = [{"role": "user", "content": "word " * 4020}]
    params = {"temperature": 0.0, "ignore_eos": True}
    async with Rollout(engine=SGLangEngine(sglang.url), rendering=rendering, sampling_params=params) as rollout:
        (one,) = [one async for one in rollout.run([long])]
    assert (one.finish_reason, one.outcome) == (FinishReason.LENGTH, "ok"), one.error
    assert one.turns[0].tokens > 0


def in_words(expression: str) -> list[dict[str, Any]]:
    """The conversation with its calls as text: the template that SGLang has for this model leaves calls out."""
    said = []
    for message in conversation(expression):
        text = "".join(
            f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>" for call in message.pop("tool_calls", ())
        )
        said.append({**message, "content": text or message["content"]})
    return said


async def test_a_chat_server_gives_text_and_no_tokens(sglang: RealEngine, sandbox_url: str) -> None:
    limits = Limits(max_response_len=60, max_assistant_turns=3)
    async with Rollout(
        engine=OpenAIEngine(sglang.url + "/v1", model="default"),
        tools=[SandboxFusionTool({"sandbox_fusion_url": sandbox_url})],
        limits=limits,
        sampling_params={"temperature": 0.0},
    ) as rollout:
        trajectories = [one async for one in rollout.run([in_words(one) for one in SUMS[:4]])]
    for one in trajectories:
        assert (one.fidelity, len(one.tokens), one.logprobs_of) == (Fidelity.TEXT, 0, None)
        assert one.finish_reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.MAX_TURNS)
    answers = [call.answer for one in trajectories for call in one.calls if call.fault is None]
    assert answers, "SGLang reads the calls, and they are carried out"
