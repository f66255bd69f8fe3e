"""The rollout loop with a scripted engine, real tokens and real tools."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import scaled

from rollout.scripted_model import QUESTION, Counting, Model, call, check
from toolroll import InfraFault, SandboxFusionTool, tool
from toolroll.rollout.engines.base import FinishType, Generation
from toolroll.rollout.engines.scripted import ScriptedEngine
from toolroll.rollout.limits import Limits
from toolroll.rollout.reward import RewardRule
from toolroll.rollout.rollout import Rollout
from toolroll.rollout.tokens import Author
from toolroll.rollout.trajectory import Fidelity, FinishReason, Trajectory

pytestmark = pytest.mark.virtual_time

# Cases of the original test plan


async def test_over_size_case(model: Model) -> None:
    """A response that exceeds the limit ends the trajectory without a tool call."""
    counting = Counting()
    long = model.ids(call("count", to=3) + " and so on " * 50, stop=False)
    trajectory = await model.run([long], [counting], limits=Limits(max_response_len=20))
    assert trajectory.finish_reason is FinishReason.LENGTH
    assert [message.role for message in trajectory.messages] == ["user", "assistant"]
    assert trajectory.calls == []
    assert trajectory.tokens.response_length == 20


async def two_tool_turns(model: Model, url: str, count: int) -> list[Trajectory]:
    turns = [call("code_interpreter", code="print(6 * 7)"), call("code_interpreter", code="6 *"), "It is 42."]
    engine = model.engine(turns)
    rollout = Rollout(engine=engine, tools=[SandboxFusionTool({"sandbox_fusion_url": url})], rendering=model.rendering)
    trajectories = [one async for one in rollout.run([{"prompt": QUESTION}], n=count)]
    assert engine.calls == 3 * count
    return trajectories


@pytest.mark.sandbox
async def test_tool_call_basic_case(model: Model, sandbox_url: str) -> None:
    """Two turns with tool calls and an answer make six messages."""
    (trajectory,) = await two_tool_turns(model, sandbox_url, 1)
    check(trajectory)
    roles = [message.role for message in trajectory.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert trajectory.messages[2].content == "42"
    assert "SyntaxError" in str(trajectory.messages[4].content)
    assert trajectory.messages[5].content == "It is 42."
    assert (trajectory.finish_reason, trajectory.fidelity) == (FinishReason.STOP, Fidelity.EXACT)
    assert [one.metrics["outcome"] for one in trajectory.calls] == ["ok", "failed"]


@pytest.mark.sandbox
async def test_tool_call_batch_case(model: Model, sandbox_url: str) -> None:
    trajectories = await two_tool_turns(model, sandbox_url, 100)
    assert len({one.request_id for one in trajectories}) == 100
    assert sorted(one.sample for one in trajectories) == list(range(100))
    for one in trajectories:
        check(one)
        assert (len(one.messages), one.finish_reason) == (6, FinishReason.STOP)
        assert one.messages[2].content == "42"


# Tokens


async def test_sampled_ids_are_unchanged_and_rest_is_masked(model: Model) -> None:
    turns = [model.ids(call("count", to=2)), model.ids("Done.")]
    engine = model.engine(turns)
    trajectory = await model.run(turns, [Counting()], engine=engine)
    stream = trajectory.tokens
    sampled = [list(stream.ids[span.start : span.end]) for span in stream.spans if span.author is Author.MODEL]
    assert sampled == turns
    assert [span.author for span in stream.spans] == [Author.PROMPT, Author.MODEL, Author.TOOL, Author.MODEL]
    assert [span.turn for span in stream.spans] == [0, 0, 0, 1]
    text = model.tokenizer.decode(stream.response_ids)
    assert "<tool_response>\n1 2\n</tool_response>" in text
    assert stream.response_logprobs is not None
    assert trajectory.logprobs_mode == engine.logprobs_mode


# Rejected calls


@pytest.mark.parametrize(
    ("turn", "answer", "is_malformed"),
    [
        ("<tool_call>\n{not json}\n</tool_call>", "JSON", True),
        ('<tool_call>\n{"arguments": {}}\n</tool_call>', "name", True),
        (call("cuont", to=1), "Did you mean 'count'", True),
        (call("count", to="three"), "'to' must be an integer", True),
        (call("count"), "'to' is missing", True),
        (call("count", to=-1), "Count up, not down.", False),
    ],
)
async def test_invalid_call_is_answered_and_can_be_corrected(
    model: Model, turn: str, answer: str, is_malformed: bool
) -> None:
    counting = Counting()
    trajectory = await model.run([turn, call("count", to=2), "Done."], [counting])
    assert trajectory.finish_reason is FinishReason.STOP
    assert answer in str(trajectory.messages[2].content)
    assert trajectory.calls[0].fault == "policy"
    assert trajectory.calls[0].metrics == ({"malformed": True} if is_malformed else {})
    assert trajectory.messages[4].content == "1 2", "the next call is executed"
    assert counting.seen == {"created": 1, "rewarded": 1, "released": 1}


async def test_surplus_calls_are_answered(model: Model) -> None:
    turns = [call("count", to=1) * 4, call("count", to=2) * 2, call("count", to=3), "Done."]
    limits = Limits(max_parallel_calls=2, max_tool_calls=3)
    trajectory = await model.run(turns, [Counting()], limits=limits)
    answers = [str(message.content) for message in trajectory.messages if message.role == "tool"]
    assert answers[:2] == ["1", "1"]
    assert all("At most 2 tool calls are allowed per turn" in answer for answer in answers[2:4])
    assert answers[4] == "1 2"
    assert all("At most 3 tool calls are allowed per conversation" in answer for answer in answers[5:])
    assert [one.fault for one in trajectory.calls] == [None, None, "policy", "policy", None, "policy", "policy"]
    assert not any("malformed" in one.metrics for one in trajectory.calls)


async def test_calls_of_one_turn_run_concurrently(model: Model) -> None:
    @tool
    async def wait(seconds: float) -> str:
        """Wait.

        Args:
            seconds: How long.
        """
        seen.append("start")
        await asyncio.sleep(seconds)
        seen.append("end")
        return f"{seconds}"

    seen: list[str] = []
    trajectory = await model.run([call("wait", seconds=0.4) + call("wait", seconds=0.2), "Done."], [wait])
    assert seen == ["start", "start", "end", "end"]
    assert [message.content for message in trajectory.messages if message.role == "tool"] == ["0.4", "0.2"]


async def test_long_tool_response_is_truncated(model: Model) -> None:
    trajectory = await model.run(
        [call("count", to=500), "Done."], [Counting()], limits=Limits(max_tool_response_tokens=64)
    )
    answer = str(trajectory.messages[2].content)
    assert answer.startswith("1 2 3")
    assert answer.endswith("500")
    assert "[text truncated]" in answer
    assert len(model.rendering.encode(answer)) <= 64


# Finish reasons


async def test_max_turns(model: Model) -> None:
    counting = Counting()
    trajectory = await model.run([call("count", to=1)] * 5, [counting], limits=Limits(max_assistant_turns=3))
    assert trajectory.finish_reason is FinishReason.MAX_TURNS
    assert (len(trajectory.turns), len(trajectory.calls)) == (3, 2)


async def test_tool_stop(model: Model) -> None:
    trajectory = await model.run([call("count", to=99), "never"], [Counting()])
    assert trajectory.finish_reason is FinishReason.TOOL_STOP
    assert trajectory.messages[-1].role == "tool"


async def test_too_long_prompt_finishes_at_once(model: Model) -> None:
    counting = Counting()
    trajectory = await model.run(["never"], [counting], limits=Limits(max_prompt_len=3))
    assert (trajectory.finish_reason, trajectory.turns) == (FinishReason.LENGTH, [])
    assert "max_prompt_len" in str(trajectory.error)
    assert counting.seen["released"] == 1


async def test_tool_responses_count_towards_length(model: Model) -> None:
    trajectory = await model.run([call("count", to=60), "never"], [Counting()], limits=Limits(max_response_len=90))
    assert (trajectory.finish_reason, len(trajectory.turns)) == (FinishReason.LENGTH, 1)


async def test_infra_fault_ends_trajectory_without_answer(model: Model) -> None:
    counting = Counting()
    trajectory = await model.run([call("count", to=13) + call("count", to=14)], [counting])
    assert (trajectory.finish_reason, trajectory.outcome) == (FinishReason.INFRA, "infra")
    assert trajectory.error == "the abacus is broken"
    assert trajectory.rewards.total is None
    assert [message.role for message in trajectory.messages] == ["user", "assistant"]
    assert counting.seen == {"created": 1, "released": 1}


async def test_engine_failure_is_infra(model: Model) -> None:
    class Broken(ScriptedEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            raise InfraFault("no engine")

    trajectory = await model.run([], [Counting()], engine=Broken([[1]]))
    assert (trajectory.finish_reason, trajectory.error) == (FinishReason.INFRA, "no engine")


async def test_internal_error_is_infra(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    class Odd(ScriptedEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyError("surprise")

    trajectory = await model.run([], [Counting()], engine=Odd([[1]]))
    assert (trajectory.finish_reason, trajectory.error) == (FinishReason.INFRA, "KeyError: 'surprise'")
    assert "internal error" in caplog.text


async def test_timed_out_call_is_answered(model: Model) -> None:
    limits = Limits(call_timeout=0.2)
    started = time.monotonic()
    trajectory = await model.run([call("count", to=14), "Done."], [Counting()], limits=limits)
    assert time.monotonic() - started < 3
    assert trajectory.messages[2].content == "The tool call timed out after 0.2 s."
    assert trajectory.finish_reason is FinishReason.STOP


async def test_turn_timeout_during_tool_call(model: Model) -> None:
    counting = Counting()
    limits = Limits(call_timeout=0.5, turn_timeout=0.5)
    started = time.monotonic()
    trajectory = await model.run([call("count", to=14), "never"], [counting], limits=limits)
    assert time.monotonic() - started < 2
    assert (trajectory.finish_reason, trajectory.outcome) == (FinishReason.DEADLINE, "ok")
    assert counting.seen["released"] == 1


async def test_turn_timeout_keeps_sampled_tokens(model: Model) -> None:
    text = model.ids("word " * 200)
    engine = ScriptedEngine([text], seconds_per_token=0.02)
    limits = Limits(call_timeout=0.5, turn_timeout=0.5)
    started = time.monotonic()
    trajectory = await model.run([], [Counting()], engine=engine, limits=limits)
    assert time.monotonic() - started < 2
    assert trajectory.finish_reason is FinishReason.DEADLINE
    kept = trajectory.tokens.response_ids
    assert 5 < len(kept) < len(text)
    assert kept == text[: len(kept)]


async def test_trajectory_timeout(model: Model) -> None:
    limits = Limits(call_timeout=0.3, turn_timeout=0.3, trajectory_timeout=0.5)
    engine = ScriptedEngine(lambda *_: model.ids(call("count", to=1)), seconds_per_token=0.005)
    trajectory = await model.run([], [Counting()], engine=engine, limits=limits)
    assert trajectory.finish_reason is FinishReason.DEADLINE
    assert trajectory.seconds < 2


# Rewards and kwargs


async def test_reward_rule_composes_total(model: Model) -> None:
    def length(trajectory: Trajectory) -> float:
        return float(len(trajectory.messages))

    rule = RewardRule(steps=10, tools={"count": 100}, functions={"length": length}, weights={"length": 0.001})
    kwargs = {"count": {"calc_reward_kwargs": {"bonus": 1.0}, "create_kwargs": {"a": 1}}}
    prompt = {"prompt": QUESTION, "tools_kwargs": kwargs, "ground_truth": "42"}
    turns = [call("count", to=1) * 2, call("count", to=2), "Done."]
    trajectory = await model.run(turns, [Counting()], prompt=prompt, rewards=rule)
    rewards = trajectory.rewards
    assert (rewards.steps, rewards.tools, rewards.functions) == ((1.0, 0.5, 0.0), {"count": 3.0}, {"length": 7.0})
    assert rewards.total == pytest.approx(10 * 1.5 + 100 * 3 + 0.007)
    assert trajectory.extra == {"ground_truth": "42"}


async def test_execute_receives_kwargs_and_deadline(model: Model) -> None:
    prompt = {"prompt": QUESTION, "tools_kwargs": {"count": {"execute_kwargs": {"hint": 1}}}}
    trajectory = await model.run([call("count", to=1), "Done."], [Counting()], prompt=prompt)
    assert trajectory.calls[0].metrics["kwargs"] == ["deadline", "hint"]


async def test_failing_reward_function_is_infra(model: Model) -> None:
    rule = RewardRule(functions={"judge": lambda _: 1 / 0})
    trajectory = await model.run(["Done."], [Counting()], rewards=rule)
    assert (trajectory.finish_reason, trajectory.outcome) == (FinishReason.STOP, "infra")
    assert "'judge' failed" in str(trajectory.error)


# Abort and resume


async def test_resume_continues_after_sampled_tokens(model: Model) -> None:
    text = model.ids("word " * 60)
    counting = Counting()
    engine = ScriptedEngine([text], seconds_per_token=0.01, weight_version="1")
    rollout = Rollout(engine=engine, tools=[counting], rendering=model.rendering)
    collecting = asyncio.create_task(_collect(rollout, 20))
    await asyncio.sleep(0.3)
    started = time.monotonic()
    await rollout.abort()
    assert time.monotonic() - started < 3
    assert engine.in_flight == 0
    await asyncio.sleep(0.3)
    assert engine.in_flight == 0, "no request starts during the pause"
    engine.weight_version = "2"
    rollout.resume()
    for trajectory in await collecting:
        check(trajectory)
        assert trajectory.finish_reason is FinishReason.STOP
        assert trajectory.tokens.response_ids == text, "no token is lost or repeated"
        versions = [span.weight_version for span in trajectory.tokens.spans if span.author is Author.MODEL]
        assert versions == ["1", "2"]
        assert {span.turn for span in trajectory.tokens.spans} == {0}
    assert counting.seen == {"created": 20, "rewarded": 20, "released": 20}


async def test_weight_change_within_turn_splits_spans(model: Model) -> None:
    class Changing(ScriptedEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Generation:
            generation = await super().generate(*args, **kwargs)
            return replace(generation, weight_version="1", weight_changes=((2, "2"), (3, "3")))

    ids = model.ids("One, two, three, four.")
    trajectory = await model.run([], engine=Changing([ids]))
    spans = [span for span in trajectory.tokens.spans if span.author is Author.MODEL]
    assert [(span.end - span.start, span.weight_version) for span in spans] == [(2, "1"), (1, "2"), (len(ids) - 3, "3")]
    assert trajectory.tokens.response_ids == ids
    assert {span.turn for span in spans} == {0}


async def _collect(rollout: Rollout, count: int) -> list[Trajectory]:
    return [one async for one in rollout.run([{"prompt": QUESTION}], n=count)]


async def test_pause_does_not_count_towards_deadlines(model: Model) -> None:
    engine = ScriptedEngine([model.ids("word " * 20)], seconds_per_token=0.01)
    limits = Limits(call_timeout=2, turn_timeout=2, trajectory_timeout=2)
    rollout = Rollout(engine=engine, rendering=model.rendering, limits=limits)
    collecting = asyncio.create_task(_collect(rollout, 3))
    await asyncio.sleep(0.1)
    await rollout.abort()
    await asyncio.sleep(2.2)
    rollout.resume()
    assert {one.finish_reason for one in await collecting} == {FinishReason.STOP}


async def test_turn_resumes_after_external_abort(model: Model) -> None:
    """Trainers abort all requests of an engine before they update its weights."""
    engine = ScriptedEngine([model.ids("word " * 100)], seconds_per_token=0.01)
    rollout = Rollout(engine=engine, rendering=model.rendering)
    collecting = asyncio.create_task(_collect(rollout, 1))
    await asyncio.sleep(0.2)
    for request_id in list(engine.running):
        await engine.abort(request_id)
    (trajectory,) = await collecting
    assert (trajectory.finish_reason, trajectory.outcome) == (FinishReason.STOP, "ok")
    assert trajectory.tokens.response_ids == model.ids("word " * 100)


async def test_repeated_external_aborts_end_trajectory(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolroll.rollout.generation.EXTERNAL_ABORT_BACKOFF_S", 0.0)

    class Aborting(ScriptedEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Generation:
            return Generation(ids=[5], logprobs=[-1.0], finish=FinishType.ABORT)

    trajectory = await model.run([], engine=Aborting([]))
    assert (trajectory.finish_reason, trajectory.outcome) == (FinishReason.ABORTED, "infra")


async def test_leaving_run_early_cleans_up(model: Model) -> None:
    counting = Counting()
    engine = ScriptedEngine(lambda *_: model.ids(call("count", to=1)), seconds_per_token=0.001)
    rollout = Rollout(engine=engine, tools=[counting], rendering=model.rendering, max_in_flight=8)
    before = len(asyncio.all_tasks())
    running = rollout.run(({"prompt": QUESTION} for _ in range(10**9)), n=2)
    taken = [await anext(running) for _ in range(3)]
    await running.aclose()  # type: ignore[attr-defined]
    assert len(taken) == 3
    assert len(asyncio.all_tasks()) == before
    assert counting.seen["created"] == counting.seen["released"]
    assert counting.seen["created"] < 30, "an endless source is read only as fast as trajectories are consumed"


async def test_invalid_prompt_is_named(model: Model) -> None:
    rollout = Rollout(engine=model.engine(["Done."]), rendering=model.rendering)
    with pytest.raises(Exception, match="Invalid prompt 1"):
        [one async for one in rollout.run([{"prompt": QUESTION}, {"question": "?"}])]


# Arbitrary model output


PIECES = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            "<tool_response>",
            "<think>",
            "</think>",
            "<|im_start|>",
            '\n{"name": "count", "arguments": {"to": 2}}\n',
            '{"name": "count", "arguments": {"to": "x"}}',
            '{"name": "nope", "arguments": {}}',
            '{"name": "count", "arguments": [1]}',
            '{"name": "count"',
            "\\ud800",
            "é中🎉",
        ]
    ),
)
TURN = st.tuples(st.lists(PIECES, max_size=8), st.booleans(), st.lists(st.integers(0, 10**6), max_size=5))


@settings(max_examples=scaled(150), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(turns=st.lists(TURN, min_size=1, max_size=4), max_len=st.integers(5, 400))
def test_loop_ends_for_any_model_output(
    model: Model, turns: list[tuple[list[str], bool, list[int]]], max_len: int
) -> None:
    size = model.rendering.vocab_size

    def ids(pieces: list[str], stop: bool, extra: list[int]) -> list[int]:
        text = "".join(pieces).encode("utf-8", "replace").decode()
        made = model.ids(text, stop=False) + [number % size for number in extra]
        return made + [model.rendering.stop_ids[0]] * stop or [0]

    counting = Counting()
    scripted = [ids(*turn) for turn in turns]
    limits = Limits(max_response_len=max_len, max_assistant_turns=6)
    trajectory = asyncio.run(
        model.run(
            [], [counting], engine=ScriptedEngine(lambda _, __, turn: scripted[turn % len(scripted)]), limits=limits
        )
    )
    assert trajectory.finish_reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.MAX_TURNS)
    assert counting.seen["created"] == counting.seen["released"] == 1
    assert trajectory.tokens.response_length <= max_len or not trajectory.turns or trajectory.calls
    assert len(trajectory.turns) <= 6
