"""What goes wrong around a trajectory: engines, tools and reward functions that hang, break, or heed nothing."""

import asyncio
import time
from typing import Any

import pytest

from rollout.scripted_model import QUESTION, Counting, Model, call, check
from toolroll import BaseTool, InfraFault, ToolResponse, ToolResult, tool
from toolroll.errors import ConfigError
from toolroll.rollout.engines.engine import Generation
from toolroll.rollout.engines.scripted import ScriptedEngine
from toolroll.rollout.engines.sglang import SGLangEngine
from toolroll.rollout.instances import Instances
from toolroll.rollout.limits import Limits
from toolroll.rollout.reward import RewardRule
from toolroll.rollout.rollout import Rollout
from toolroll.rollout.tokens import Author
from toolroll.rollout.trajectory import FinishReason, Trajectory
from toolroll.tools.instance import ToolInstance

SHORT = Limits(call_timeout=0.5, turn_timeout=0.5, trajectory_timeout=0.5)


async def deaf(seconds: float) -> None:
    """Heed no cancellation."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        try:
            await asyncio.sleep(ends - time.monotonic())
        except asyncio.CancelledError:
            continue


async def collect(rollout: Rollout, count: int) -> list[Trajectory]:
    return [one async for one in rollout.run([QUESTION], n=count)]


# Engines


async def test_an_engine_that_is_down_is_no_deadline_of_the_models(model: Model) -> None:
    rollout = Rollout(engine=SGLangEngine("http://127.0.0.1:9"), rendering=model.rendering, limits=SHORT)
    (trajectory,) = await collect(rollout, 1)
    assert (trajectory.finish_reason, trajectory.outcome) == (FinishReason.INFRA, "infra")
    assert "127.0.0.1:9" in str(trajectory.error)


async def test_an_engine_that_hangs_and_heeds_no_deadline(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolroll.rollout.token_writer.GRACE", 0.2)

    class Hanging(ScriptedEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Generation:
            await asyncio.sleep(60)
            raise AssertionError

    began = time.monotonic()
    trajectory = await model.run([], engine=Hanging([]), limits=SHORT)
    assert time.monotonic() - began < 5
    assert (trajectory.finish_reason, trajectory.outcome) == (FinishReason.INFRA, "infra")


async def test_the_engines_context_is_a_limit_too(model: Model) -> None:
    class Small(ScriptedEngine):
        async def context_length(self) -> int:
            return 330

    calls = [model.ids(call("count", to=9))] * 9
    trajectory = await model.run([], [Counting()], engine=Small(calls))
    assert (trajectory.finish_reason, trajectory.outcome) == (FinishReason.LENGTH, "ok")
    assert len(trajectory.tokens) <= 330
    assert trajectory.turns, "it had begun"


# Limits hold, whatever tools answer


async def test_answers_that_dont_fit_are_left_out(model: Model) -> None:
    limits = Limits(max_response_len=100, max_seq_len=400)
    trajectory = await model.run([call("count", to=500), "Done."], [Counting()], limits=limits)
    assert trajectory.finish_reason is FinishReason.LENGTH
    assert trajectory.tokens.response_length <= 100
    assert trajectory.tokens.spans[-1].author is Author.MODEL
    assert "500" in str(trajectory.messages[-1].content), "people see what the tool said"


async def test_thousands_of_calls_in_one_turn(model: Model) -> None:
    limits = Limits(max_response_len=100_000, max_parallel_calls=2)
    turn = "<tool_call></tool_call>" * 4000
    trajectory = await model.run([turn, "Done."], [Counting()], limits=limits)
    assert trajectory.finish_reason is FinishReason.STOP
    assert len(trajectory.calls) == 10
    assert "3990 calls after it were not carried out" in trajectory.calls[-1].answer


# Pauses


async def test_a_pause_right_after_another(model: Model) -> None:
    engine = ScriptedEngine([model.ids("word " * 40)], seconds_per_token=0.01)
    rollout = Rollout(engine=engine, rendering=model.rendering)
    gathering = asyncio.create_task(collect(rollout, 5))
    await asyncio.sleep(0.2)
    await rollout.abort()
    rollout.resume()
    await rollout.abort()
    for _ in range(10):
        await asyncio.sleep(0.02)
        assert engine.in_flight == 0
    rollout.resume()
    assert {one.finish_reason for one in await gathering} == {FinishReason.STOP}


async def test_an_abort_that_was_given_up_loses_nothing(model: Model) -> None:
    class Slow(ScriptedEngine):
        async def abort(self, request_id: str) -> None:
            await asyncio.sleep(0.5)
            await super().abort(request_id)

    engine = Slow([model.ids("word " * 40)], seconds_per_token=0.01)
    rollout = Rollout(engine=engine, rendering=model.rendering)
    gathering = asyncio.create_task(collect(rollout, 5))
    await asyncio.sleep(0.2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(rollout.abort(), 0.1)
    rollout.resume()
    for one in await gathering:
        assert (one.finish_reason, one.tokens.response_ids) == (FinishReason.STOP, model.ids("word " * 40))


async def test_paused_ends_however_the_change_ends(model: Model) -> None:
    rollout = Rollout(engine=model.engine(["Done."]), rendering=model.rendering)
    with pytest.raises(RuntimeError):
        async with rollout.paused():
            raise RuntimeError("no new weights")
    (trajectory,) = await collect(rollout, 1)
    assert trajectory.finish_reason is FinishReason.STOP


async def test_a_turn_under_a_grammar_begins_anew(model: Model) -> None:
    """A grammar starts anew with each call of the engine: half a turn would be gone on with by a whole one."""
    asked: list[int] = []

    def script(request_id: str, prompt_ids: Any, turn: int) -> list[int]:
        asked.append(len(prompt_ids))
        return model.ids("word " * 30)

    class Grammar(ScriptedEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Generation:
            self._unsaid.clear()
            return await super().generate(*args, **kwargs)

    params = {"regex": "(word )*"}
    engine = Grammar(script, seconds_per_token=0.01)
    rollout = Rollout(engine=engine, rendering=model.rendering, sampling_params=params)
    gathering = asyncio.create_task(collect(rollout, 1))
    await asyncio.sleep(0.3)
    await rollout.abort()
    rollout.resume()
    (trajectory,) = await gathering
    assert len(asked) == 2
    assert asked[0] == asked[1]
    assert trajectory.tokens.response_ids == model.ids("word " * 30)


def test_one_rollout_in_one_event_loop_after_another(model: Model) -> None:
    rollout = Rollout(
        engine=ScriptedEngine([model.ids("word " * 20)], seconds_per_token=0.01), rendering=model.rendering
    )

    async def step() -> list[Trajectory]:
        gathering = asyncio.create_task(collect(rollout, 2))
        await asyncio.sleep(0.1)
        await rollout.abort()
        rollout.resume()
        return await gathering

    for _ in range(2):
        assert {one.finish_reason for one in asyncio.run(step())} == {FinishReason.STOP}


# Tools


class Stubborn(BaseTool[None]):
    """A tool that heeds no cancellation, in one of its methods."""

    default_schema = {  # noqa: RUF012
        "type": "function",
        "function": {"name": "stubborn", "description": "Hang.", "parameters": {"type": "object"}},
    }

    def __init__(self, where: str, seconds: float = 3.0) -> None:
        super().__init__()
        self.where, self.seconds = where, seconds
        self.released = 0

    async def _hang(self, where: str) -> None:
        if where == self.where:
            await deaf(self.seconds)

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
    ("where", "finish", "outcome"),
    [
        ("execute", FinishReason.DEADLINE, "ok"),
        ("create", FinishReason.INFRA, "infra"),
        ("calc_reward", FinishReason.INFRA, "infra"),
    ],
)
async def test_tools_that_heed_nothing_hold_nothing_up(
    model: Model, monkeypatch: pytest.MonkeyPatch, where: str, finish: FinishReason, outcome: str
) -> None:
    monkeypatch.setattr("toolroll.rollout.instances.CREATE_GRACE", 0.2)
    stubborn = Stubborn(where)
    began = time.monotonic()
    trajectory = await model.run([call("stubborn"), "Done."], [stubborn], limits=SHORT)
    assert time.monotonic() - began < 2.8
    assert trajectory.outcome == outcome
    assert trajectory.finish_reason is finish or where == "calc_reward"
    await asyncio.sleep(3.2)
    assert stubborn.released == 1, "in the end"


async def test_what_was_cut_off_is_on_record(model: Model) -> None:
    turn = call("count", to=14) + call("count", to=1)
    trajectory = await model.run([turn, "Done."], [Counting()], limits=SHORT)
    assert trajectory.finish_reason is FinishReason.DEADLINE
    slow, quick = trajectory.calls
    assert (slow.tool, quick.answer) == ("count", "1")
    assert slow.seconds >= 0.4
    assert "given up" in str(slow.error)


async def test_a_tools_own_timeout_is_told_in_its_own_words(model: Model) -> None:
    @tool
    async def look() -> str:
        """Look."""
        raise TimeoutError("the library is closed")

    trajectory = await model.run([call("look"), "Done."], [look])
    assert trajectory.calls[0].answer == "TimeoutError: the library is closed"


async def test_half_a_character_in_an_answer(model: Model) -> None:
    @tool
    async def look() -> str:
        """Look."""
        return "a\ud800b"

    trajectory = await model.run([call("look"), "Done."], [look])
    assert trajectory.calls[0].answer.encode()
    assert str(trajectory.messages[-2].content).encode()


@pytest.mark.parametrize("cancelled_at", [None, 0.1, 0.35])
async def test_what_was_created_beside_one_that_fails_is_released(cancelled_at: float | None) -> None:
    fine, slow, broken = Counting(), Counting(), Counting()

    async def create_slowly(instance_id: str | None = None, **_: Any) -> Any:
        await asyncio.sleep(0.5)
        return await Counting.create(slow, instance_id)

    async def release_slowly(instance_id: str, **_: Any) -> None:
        await asyncio.sleep(0.4)
        await Counting.release(slow, instance_id)

    async def fail(instance_id: str | None = None, **_: Any) -> Any:
        await asyncio.sleep(0.2)
        broken.seen["created"] += 1
        raise InfraFault("no more of these")

    slow.create, slow.release, broken.create = create_slowly, release_slowly, fail  # type: ignore[method-assign]
    instances = Instances({name: ToolInstance(one) for name, one in {"a": fine, "b": slow, "c": broken}.items()}, 0.4)
    beginning = asyncio.create_task(instances.__aenter__())
    if cancelled_at is not None:
        await asyncio.sleep(cancelled_at)
        beginning.cancel()
        await asyncio.sleep(0.05)
        beginning.cancel()
    with pytest.raises((InfraFault, asyncio.CancelledError)):
        await beginning
    assert fine.seen["created"] == fine.seen["released"] == 1


# Reward functions


@pytest.mark.parametrize(
    "given", [float("nan"), float("inf"), "0.5", [1.0], InfraFault("down"), ValueError("bad"), "hang"]
)
async def test_a_reward_that_is_none_keeps_one_trajectory_out_and_no_more(model: Model, given: Any) -> None:
    async def judge(trajectory: Trajectory) -> Any:
        if trajectory.sample:
            return 1.0
        if given == "hang":
            await asyncio.sleep(60)
        if isinstance(given, Exception):
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


async def test_two_rollouts_on_one_engine(model: Model) -> None:
    class Closing(ScriptedEngine):
        closed = 0

        async def close(self) -> None:
            self.closed += 1

    engine = Closing([model.ids("Done.")])
    async with Rollout(engine=engine, rendering=model.rendering) as one:
        async with Rollout(engine=engine, rendering=model.rendering) as other:
            await collect(other, 1)
        assert not engine.closed
        await collect(one, 1)
    assert engine.closed == 1


async def test_what_still_runs_ends_with_the_rollout(model: Model) -> None:
    counting = Counting()
    engine = ScriptedEngine(lambda *_: model.ids(call("count", to=1)), seconds_per_token=0.002)
    async with Rollout(engine=engine, tools=counting, rendering=model.rendering, max_in_flight=4) as rollout:
        running = rollout.run(QUESTION for _ in range(10**9))
        await anext(running)
    made = engine.calls
    await asyncio.sleep(0.3)
    assert engine.calls == made
    assert counting.seen["created"] == counting.seen["released"]


async def test_what_fails_is_said_once(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    def script(*_: Any) -> list[int]:
        raise InfraFault(f"worker {id(object())} is gone")

    await collect(Rollout(engine=ScriptedEngine(script), rendering=model.rendering), 20)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1
    assert "is gone" in said[0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine": "http://127.0.0.1:30000"}, "is no engine. Make one"),
        ({"tools": [print]}, "is no tool"),
        ({"tools": [Counting(), Counting()]}, "Two tools are called 'count'"),
        ({"limits": {"max_turns": 3}}, r"limits: .*max_turns"),
        ({"rewards": 3}, "neither a RewardRule nor a function"),
        ({"rewards": RewardRule(tools={"cuont": 1.0})}, r"a weight for 'cuont', and no such tool"),
        ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens is 0"),
        ({"sampling_params": {"n": 4}}, r"run\(prompts, n=…\)"),
        ({"max_in_flight": 0}, "max_in_flight is 0"),
    ],
)
def test_what_is_wrong_is_said_at_once(model: Model, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Rollout(**{"engine": model.engine([]), "rendering": model.rendering, **settings})


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ("What is 6 times 7?", "is one: put it into a list"),
        ({"prompt": "What?"}, "is one: put it into a list"),
        ([{"prompt": "What?", "tools_kwargs": {"count": {"create_kwarg": {}}}}], "create_kwarg.*did you mean"),
    ],
)
async def test_prompts_that_are_none(model: Model, prompts: Any, said: str) -> None:
    rollout = Rollout(engine=model.engine(["Done."]), tools=[Counting()], rendering=model.rendering)
    with pytest.raises(ConfigError, match=said):
        _ = [one async for one in rollout.run(prompts)]


async def test_rows_as_tables_have_them(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    kwargs = {"count": {"create_kwargs": None, "execute_kwargs": {}}, "other": {"create_kwargs": {"a": 1}}}
    row = {"prompt": "What?", "tools_kwargs": kwargs, "group": 7, "sampling_params": None}
    rollout = Rollout(engine=model.engine(["Done."]), tools=[Counting()], rendering=model.rendering)
    (trajectory,) = [one async for one in rollout.run([row])]
    assert (trajectory.group, trajectory.finish_reason) == ("7", FinishReason.STOP)
    assert "'other', and there is no such tool" in caplog.text
