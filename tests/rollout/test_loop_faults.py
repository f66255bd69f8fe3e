"""Engines, tools and reward functions that fail, hang or ignore cancellation; invalid settings."""

import asyncio
import gc
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest

from rollout.scripted_model import QUESTION, Counting, Model, call, check
from toolroll import BaseTool, Hidden, InfraFault, ToolResponse, ToolResult, tool
from toolroll.errors import ConfigError, Fault, PolicyFault
from toolroll.rollout.engines.base import FinishType, Generation
from toolroll.rollout.engines.scripted import ScriptedEngine
from toolroll.rollout.engines.sglang import SGLangEngine
from toolroll.rollout.generation import MAX_EXTERNAL_ABORTS
from toolroll.rollout.instances import ToolInstances
from toolroll.rollout.limits import Limits
from toolroll.rollout.reward import RewardRule
from toolroll.rollout.rollout import Rollout
from toolroll.rollout.tokens import Author
from toolroll.rollout.tool_execution import CALL_GRACE_PERIOD_S
from toolroll.rollout.trajectory import FinishReason, Trajectory
from toolroll.tools.instance import ToolInstance

pytestmark = pytest.mark.virtual_time

SHORT = Limits(call_timeout=0.5, turn_timeout=0.5, trajectory_timeout=0.5)


async def sleep_ignoring_cancellation(seconds: float) -> None:
    """Sleep without reacting to cancellation."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            await asyncio.sleep(deadline - time.monotonic())
        except asyncio.CancelledError:
            continue


async def collect(rollout: Rollout, count: int) -> list[Trajectory]:
    return [one async for one in rollout.run([QUESTION], n=count)]


# Engines


async def test_unreachable_engine_is_infra(model: Model) -> None:
    rollout = Rollout(engine=SGLangEngine("http://127.0.0.1:9"), rendering=model.rendering, limits=SHORT)
    (trajectory,) = await collect(rollout, 1)
    assert (trajectory.finish_reason, trajectory.outcome) == (FinishReason.INFRA, "infra")
    assert "127.0.0.1:9" in str(trajectory.error)


async def test_engine_that_ignores_deadline_is_infra(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolroll.rollout.generation.ENGINE_GRACE_PERIOD_S", 0.2)

    class Hanging(ScriptedEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Generation:
            await asyncio.sleep(60)
            raise AssertionError

    started = time.monotonic()
    trajectory = await model.run([], engine=Hanging([]), limits=SHORT)
    assert time.monotonic() - started < 5
    assert (trajectory.finish_reason, trajectory.outcome) == (FinishReason.INFRA, "infra")


async def test_context_length_of_engine_limits_trajectory(model: Model) -> None:
    class Small(ScriptedEngine):
        async def context_length(self) -> int:
            return 330

    calls = [model.ids(call("count", to=9))] * 9
    trajectory = await model.run([], [Counting()], engine=Small(calls))
    assert (trajectory.finish_reason, trajectory.outcome) == (FinishReason.LENGTH, "ok")
    assert len(trajectory.tokens) <= 330
    assert trajectory.turns, "the trajectory started"


# Limits


async def test_tool_response_that_does_not_fit_is_omitted(model: Model) -> None:
    limits = Limits(max_response_len=100, max_seq_len=400)
    trajectory = await model.run([call("count", to=500), "Done."], [Counting()], limits=limits)
    assert trajectory.finish_reason is FinishReason.LENGTH
    assert trajectory.tokens.response_length <= 100
    assert trajectory.tokens.spans[-1].author is Author.MODEL
    assert "500" in str(trajectory.messages[-1].content), "the messages contain the response"


async def test_thousands_of_calls_in_one_turn_are_dropped(model: Model) -> None:
    limits = Limits(max_response_len=100_000, max_parallel_calls=2)
    turn = "<tool_call></tool_call>" * 4000
    trajectory = await model.run([turn, "Done."], [Counting()], limits=limits)
    assert trajectory.finish_reason is FinishReason.STOP
    assert len(trajectory.calls) == 10
    assert "The 3990 calls after this one were not executed" in trajectory.calls[-1].answer


# Pauses


async def test_consecutive_pauses(model: Model) -> None:
    engine = ScriptedEngine([model.ids("word " * 40)], seconds_per_token=0.01)
    rollout = Rollout(engine=engine, rendering=model.rendering)
    collecting = asyncio.create_task(collect(rollout, 5))
    await asyncio.sleep(0.2)
    await rollout.abort()
    rollout.resume()
    await rollout.abort()
    for _ in range(10):
        await asyncio.sleep(0.02)
        assert engine.in_flight == 0
    rollout.resume()
    assert {one.finish_reason for one in await collecting} == {FinishReason.STOP}


async def test_cancelled_abort_loses_no_tokens(model: Model) -> None:
    class Slow(ScriptedEngine):
        async def abort(self, request_id: str) -> None:
            await asyncio.sleep(0.5)
            await super().abort(request_id)

    engine = Slow([model.ids("word " * 40)], seconds_per_token=0.01)
    rollout = Rollout(engine=engine, rendering=model.rendering)
    collecting = asyncio.create_task(collect(rollout, 5))
    await asyncio.sleep(0.2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(rollout.abort(), 0.1)
    rollout.resume()
    for one in await collecting:
        assert (one.finish_reason, one.tokens.response_ids) == (FinishReason.STOP, model.ids("word " * 40))


async def test_paused_resumes_after_exception(model: Model) -> None:
    rollout = Rollout(engine=model.engine(["Done."]), rendering=model.rendering)
    with pytest.raises(RuntimeError):
        async with rollout.paused():
            raise RuntimeError("weight update failed")
    (trajectory,) = await collect(rollout, 1)
    assert trajectory.finish_reason is FinishReason.STOP


async def test_turn_with_grammar_is_restarted(model: Model) -> None:
    """An engine restarts a grammar with each request, so a partial turn cannot be resumed."""
    prompt_lengths: list[int] = []

    def script(request_id: str, prompt_ids: Any, turn: int) -> list[int]:
        prompt_lengths.append(len(prompt_ids))
        return model.ids("word " * 30)

    class Grammar(ScriptedEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Generation:
            self._remainders.clear()
            return await super().generate(*args, **kwargs)

    params = {"regex": "(word )*"}
    engine = Grammar(script, seconds_per_token=0.01)
    rollout = Rollout(engine=engine, rendering=model.rendering, sampling_params=params)
    collecting = asyncio.create_task(collect(rollout, 1))
    await asyncio.sleep(0.3)
    await rollout.abort()
    rollout.resume()
    (trajectory,) = await collecting
    assert len(prompt_lengths) == 2
    assert prompt_lengths[0] == prompt_lengths[1]
    assert trajectory.tokens.response_ids == model.ids("word " * 30)


class Aborting(ScriptedEngine):
    """An engine whose first answer is an abort after the given ids."""

    def __init__(self, ids: list[int], then: list[int] | None = None) -> None:
        super().__init__([then or []])
        self.ids, self.then, self.calls = ids, then, 0

    async def generate(self, *args: Any, **kwargs: Any) -> Generation:
        self.calls += 1
        if self.calls > 1 and self.then is not None:
            return await super().generate(*args, **kwargs)
        await asyncio.sleep(0.01)
        return Generation(ids=self.ids, logprobs=[-1.0] * len(self.ids), finish=FinishType.ABORT)


async def test_turn_aborted_behind_its_stop_token_has_ended(model: Model) -> None:
    ids = model.ids("Done.")
    assert ids[-1] in model.rendering.stop_ids
    engine = Aborting(ids, then=model.ids("More."))
    trajectory = await model.run([], engine=engine)
    assert (trajectory.finish_reason, engine.calls) == (FinishReason.STOP, 1)
    assert trajectory.tokens.response_ids == ids


async def test_aborts_of_a_turn_with_grammar_are_bounded(model: Model) -> None:
    engine = Aborting(model.ids("word")[:1])
    trajectory = await model.run([], engine=engine, sampling_params={"regex": "(word )*"})
    assert (trajectory.finish_reason, trajectory.outcome) == (FinishReason.ABORTED, "infra")
    assert engine.calls == MAX_EXTERNAL_ABORTS + 1


async def test_restarted_turn_keeps_its_deadline(model: Model) -> None:
    limits = Limits(call_timeout=2, turn_timeout=2)
    trajectory = await model.run([], engine=Aborting([]), sampling_params={"regex": "a*"}, limits=limits)
    assert trajectory.finish_reason is FinishReason.DEADLINE
    assert trajectory.seconds < 2.6


async def test_deadline_before_the_first_generation_is_infra(model: Model) -> None:
    class Slow(ScriptedEngine):
        async def context_length(self) -> None:
            await asyncio.sleep(1)

    trajectory = await model.run([], engine=Slow([model.ids("Done.")]), limits=SHORT)
    assert (trajectory.finish_reason, trajectory.outcome) == (FinishReason.INFRA, "infra")


def test_rollout_works_in_successive_event_loops(model: Model) -> None:
    rollout = Rollout(
        engine=ScriptedEngine([model.ids("word " * 20)], seconds_per_token=0.01), rendering=model.rendering
    )

    async def step() -> list[Trajectory]:
        collecting = asyncio.create_task(collect(rollout, 2))
        await asyncio.sleep(0.1)
        await rollout.abort()
        rollout.resume()
        return await collecting

    for _ in range(2):
        assert {one.finish_reason for one in asyncio.run(step())} == {FinishReason.STOP}


# Tools


class Uncancellable(BaseTool[None]):
    """A tool that ignores cancellation in one of its methods."""

    default_schema = {  # noqa: RUF012
        "type": "function",
        "function": {"name": "uncancellable", "description": "Hang.", "parameters": {"type": "object"}},
    }

    def __init__(self, method: str, seconds: float = 3.0) -> None:
        super().__init__()
        self.method, self.seconds = method, seconds
        self.released = 0

    async def _hang(self, method: str) -> None:
        if method == self.method:
            await sleep_ignoring_cancellation(self.seconds)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        await self._hang("create")
        return await super().create(instance_id, **kwargs)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        await self._hang("execute")
        return ToolResult(ToolResponse(text="done"), None, {})

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        await self._hang("calc_reward")
        return 1.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.released += 1
        await super().release(instance_id)


@pytest.mark.parametrize(
    ("method", "finish", "outcome"),
    [
        ("execute", FinishReason.DEADLINE, "ok"),
        ("create", FinishReason.INFRA, "infra"),
        ("calc_reward", FinishReason.INFRA, "infra"),
    ],
)
async def test_tool_ignoring_cancellation_causes_no_delay(
    model: Model, monkeypatch: pytest.MonkeyPatch, method: str, finish: FinishReason, outcome: str
) -> None:
    monkeypatch.setattr("toolroll.rollout.instances.CREATE_CANCEL_TIMEOUT_S", 0.2)
    uncancellable = Uncancellable(method, seconds=6.0)
    started = time.monotonic()
    trajectory = await model.run([call("uncancellable"), "Done."], [uncancellable], limits=SHORT)
    assert time.monotonic() - started < SHORT.turn_timeout + 3 * CALL_GRACE_PERIOD_S + 0.3
    assert trajectory.outcome == outcome
    assert trajectory.finish_reason is finish or method == "calc_reward"
    await asyncio.sleep(6.2)
    assert uncancellable.released == 1, "released when the method returns"


async def test_cancelled_call_is_recorded(model: Model) -> None:
    turn = call("count", to=14) + call("count", to=1)
    trajectory = await model.run([turn, "Done."], [Counting()], limits=SHORT)
    assert trajectory.finish_reason is FinishReason.DEADLINE
    slow, quick = trajectory.calls
    assert (slow.tool, quick.answer) == ("count", "1")
    assert slow.seconds >= 0.4
    assert slow.error == "The tool call timed out after 0.5 s."


async def test_infra_fault_at_the_turn_deadline_is_infra(model: Model) -> None:
    @tool
    async def search(deadline: Hidden[float] = 0.0) -> str:
        """Search."""
        await asyncio.sleep(deadline - time.monotonic() + 0.1)
        raise InfraFault("The service did not answer.")

    trajectory = await model.run([call("search"), "never"], [search], limits=SHORT)
    assert (trajectory.finish_reason, trajectory.outcome) == (FinishReason.INFRA, "infra")


async def test_cached_policy_fault_is_marked_in_the_record(model: Model) -> None:
    @tool(pure=True)
    def look_up() -> str:
        """Look up."""
        raise PolicyFault("There is no such word.")

    trajectory = await model.run([call("look_up"), call("look_up"), "Done."], [look_up])
    first, second = trajectory.calls
    assert (first.answer, first.fault) == (second.answer, second.fault) == ("There is no such word.", Fault.POLICY)
    assert "cache" not in first.metrics
    assert second.metrics["cache"]["origin"] == trajectory.request_id


async def test_timeout_error_of_tool_is_returned_verbatim(model: Model) -> None:
    @tool
    async def look() -> str:
        """Look."""
        raise TimeoutError("the library is closed")

    trajectory = await model.run([call("look"), "Done."], [look])
    assert trajectory.calls[0].answer == "TimeoutError: the library is closed"


async def test_lone_surrogate_in_tool_response_is_replaced(model: Model) -> None:
    @tool
    async def look() -> str:
        """Look."""
        return "a\ud800b"

    trajectory = await model.run([call("look"), "Done."], [look])
    assert trajectory.calls[0].answer.encode()
    assert str(trajectory.messages[-2].content).encode()


@pytest.mark.parametrize("cancelled_at", [None, 0.1, 0.35])
async def test_failed_create_releases_other_instances(cancelled_at: float | None) -> None:
    fine, slow, broken = Counting(), Counting(), Counting()

    async def slow_create(instance_id: str | None = None, **_: Any) -> Any:
        await asyncio.sleep(0.5)
        return await Counting.create(slow, instance_id)

    async def slow_release(instance_id: str, **_: Any) -> None:
        await asyncio.sleep(0.4)
        await Counting.release(slow, instance_id)

    async def failing_create(instance_id: str | None = None, **_: Any) -> Any:
        await asyncio.sleep(0.2)
        broken.seen["created"] += 1
        raise InfraFault("out of stock")

    slow.create, slow.release, broken.create = slow_create, slow_release, failing_create  # type: ignore[method-assign]
    instances = ToolInstances(
        {name: ToolInstance(one) for name, one in {"a": fine, "b": slow, "c": broken}.items()}, 0.4
    )
    creating = asyncio.create_task(AsyncExitStack().enter_async_context(instances))
    if cancelled_at is not None:
        await asyncio.sleep(cancelled_at)
        creating.cancel()
        await asyncio.sleep(0.05)
        creating.cancel()
    with pytest.raises((InfraFault, asyncio.CancelledError)):
        await creating
    assert fine.seen["created"] == fine.seen["released"] == 1


@pytest.mark.parametrize("count", [1, 2])
async def test_cancellation_does_not_interrupt_release(count: int) -> None:
    tools = [Counting() for _ in range(count)]

    async def use() -> None:
        async with ToolInstances({str(index): ToolInstance(one) for index, one in enumerate(tools)}, 1.0):
            await asyncio.sleep(60)

    task = asyncio.create_task(use())
    await asyncio.sleep(0.05)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [one.seen["released"] for one in tools] == [1] * count


# Reward functions


@pytest.mark.parametrize(
    "given",
    [
        *(float("nan"), float("inf"), "0.5", [1.0], "hang"),
        *(InfraFault("down"), ValueError("bad"), SystemExit(0), asyncio.CancelledError()),
    ],
)
async def test_invalid_reward_excludes_one_trajectory(model: Model, given: Any) -> None:
    async def judge(trajectory: Trajectory) -> Any:
        if trajectory.sample:
            return 1.0
        if given == "hang":
            await asyncio.sleep(60)
        if isinstance(given, BaseException):
            raise given
        return given

    limits = Limits(call_timeout=0.5, turn_timeout=0.5)
    rollout = Rollout(engine=model.engine(["Done."]), rendering=model.rendering, limits=limits, rewards=judge)
    bad, good = sorted(await collect(rollout, 2), key=lambda one: one.sample)
    check(bad)
    assert (bad.outcome, bad.rewards.total) == ("infra", None)
    assert "'judge' failed" in str(bad.error)
    assert (good.outcome, good.rewards.total) == ("ok", 1.0)


# Rollouts


class ClosingEngine(ScriptedEngine):
    """A scripted engine that counts how often it is closed."""

    closed = 0

    async def close(self) -> None:
        self.closed += 1


async def test_last_rollout_closes_engine(model: Model) -> None:
    engine = ClosingEngine([model.ids("Done.")])
    async with Rollout(engine=engine, rendering=model.rendering) as one:
        async with Rollout(engine=engine, rendering=model.rendering) as other:
            await collect(other, 1)
        assert not engine.closed
        await collect(one, 1)
    assert engine.closed == 1


async def test_aclose_is_idempotent(model: Model) -> None:
    engine = ClosingEngine([model.ids("Done.")])
    rollout = Rollout(engine=engine, rendering=model.rendering)
    await collect(rollout, 1)
    await rollout.aclose()
    await rollout.aclose()
    assert engine.closed == 1
    async with rollout:
        await collect(rollout, 1)
    await rollout.aclose()
    assert engine.closed == 2


async def test_rollout_keeps_garbage_collector_settings(model: Model) -> None:
    settings, callbacks = gc.get_threshold(), list(gc.callbacks)
    async for _ in Rollout(engine=model.engine(["Done."]), rendering=model.rendering).run([QUESTION]):
        assert (gc.get_threshold(), gc.callbacks) == (settings, callbacks)


async def test_running_trajectories_end_with_rollout(model: Model) -> None:
    counting = Counting()
    engine = ScriptedEngine(lambda *_: model.ids(call("count", to=1)), seconds_per_token=0.002)
    async with Rollout(engine=engine, tools=counting, rendering=model.rendering, max_in_flight=4) as rollout:
        running = rollout.run(QUESTION for _ in range(10**9))
        await anext(running)
    made = engine.calls
    await asyncio.sleep(0.3)
    assert engine.calls == made
    assert counting.seen["created"] == counting.seen["released"]


async def test_repeated_failure_is_logged_once(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    def script(*_: Any) -> list[int]:
        raise InfraFault(f"worker {id(object())} is gone")

    await collect(Rollout(engine=ScriptedEngine(script), rendering=model.rendering), 20)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "is gone" in warnings[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "http://127.0.0.1:30000"}, "Expected an engine, got 'http"),
        ({"tools": [print]}, "Expected a tool, got"),
        ({"tools": [Counting(), Counting()]}, "Duplicate tool name 'count'"),
        ({"limits": {"max_turns": 3}}, r"limits: .*max_turns"),
        ({"rewards": 3}, "Expected a RewardRule or a function"),
        ({"rewards": RewardRule(tools={"cuont": 1.0})}, r"weight for unknown tool 'cuont'"),
        ({"sampling_params": {"max_new_tokens": 0}}, "invalid max_new_tokens: 0"),
        ({"sampling_params": {"n": 4}}, r"run\(prompts, n=…\)"),
        ({"max_in_flight": 0}, "Invalid max_in_flight: 0"),
    ],
)
def test_invalid_settings_are_rejected(model: Model, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rollout(**{"engine": model.engine([]), "rendering": model.rendering, **settings})


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("What is 6 times 7?", "got one: .* Put it into a list"),
        ({"prompt": "What?"}, "got one: .* Put it into a list"),
        ([{"prompt": "What?", "tools_kwargs": {"count": {"create_kwarg": {}}}}], "create_kwarg.*did you mean"),
    ],
)
async def test_invalid_prompts_are_rejected(model: Model, prompts: Any, message: str) -> None:
    rollout = Rollout(engine=model.engine(["Done."]), tools=[Counting()], rendering=model.rendering)
    with pytest.raises(ConfigError, match=message):
        _ = [one async for one in rollout.run(prompts)]


async def test_none_values_of_table_rows_are_ignored(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    kwargs = {"count": {"create_kwargs": None, "execute_kwargs": {}}, "other": {"create_kwargs": {"a": 1}}}
    row = {"prompt": "What?", "tools_kwargs": kwargs, "group": 7, "sampling_params": None}
    rollout = Rollout(engine=model.engine(["Done."]), tools=[Counting()], rendering=model.rendering)
    (trajectory,) = [one async for one in rollout.run([row])]
    assert (trajectory.group, trajectory.finish_reason) == ("7", FinishReason.STOP)
    assert "tools_kwargs for unknown tool 'other' ignored" in caplog.text


async def test_exception_of_a_tool_is_logged_once_with_its_traceback(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    @tool
    def buggy(x: int) -> int:
        """Divide."""
        return 1 // (x - x)

    for _ in range(3):
        trajectory = await model.run([call("buggy", x=1), "Done."], [buggy])
        assert trajectory.calls[0].fault is Fault.POLICY
        assert "ZeroDivisionError" in trajectory.calls[0].answer
    rollout = Rollout(engine=model.engine([call("buggy", x=1), "Done."]), rendering=model.rendering, tools=[buggy])
    caplog.clear()
    for _ in range(3):
        await rollout.sample("Divide.")
    [record] = caplog.records
    assert "tool 'buggy' raised an exception" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
