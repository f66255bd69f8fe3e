"""Tests of ToolInstance: every instance is released exactly once, in bounded time."""

import asyncio
import logging
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import scaled

from toolroll import BaseTool, Gsm8kTool, InfraFault, PolicyFault, ToolInstance, ToolResponse
from toolroll.errors import DuplicateInstance, InvalidArguments, ToolContractError

pytestmark = pytest.mark.virtual_time

SCHEMA = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object", "required": ["x"]}}}


@dataclass(frozen=True)
class Script:
    """Behaviour of one trajectory: the number of event-loop iterations of each step, and how it ends."""

    create: int = 0
    create_fails: bool = False
    execute: int = 0
    execute_fails: bool = False
    release: int = 0
    release_fails: bool = False
    cancelled_at: list[int] = field(default_factory=list)


SCRIPTS = st.builds(
    Script,
    create=st.integers(0, 3),
    create_fails=st.booleans(),
    execute=st.integers(0, 3),
    execute_fails=st.booleans(),
    release=st.integers(0, 3),
    release_fails=st.booleans(),
    cancelled_at=st.lists(st.integers(0, 12), max_size=3).map(sorted),
)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Probe(BaseTool[Script]):
    """Tool that follows the script of each instance and counts the calls."""

    def __init__(self) -> None:
        super().__init__({}, SCHEMA)
        self.created: Counter[str] = Counter()
        self.released: Counter[str] = Counter()
        self.closed: Counter[str] = Counter()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        assert instance_id is not None
        self.created[instance_id] += 1
        script = kwargs["script"]
        self.instances[instance_id] = script  # before the first await, so that a cancelled create leaves it behind
        await turns(script.create)
        if script.create_fails:
            raise ConnectionError("no room")
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        script = self.state(instance_id)
        await turns(script.execute)
        if script.execute_fails:
            raise PolicyFault("not like that")
        return ToolResponse(text="done"), 1, None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.released[instance_id] += 1
        script = self.instances.pop(instance_id, Script())
        await turns(script.release)
        self.closed[instance_id] += 1
        if script.release_fails:
            raise RuntimeError("lost the key")


async def trajectory(tool: Probe, script: Script) -> None:
    async with ToolInstance(tool, create_kwargs={"script": script}) as instance:
        await instance.execute({"x": 1})
        await instance.calc_reward()


async def disturb(task: "asyncio.Task[None]", script: Script) -> None:
    now = 0
    for moment in script.cancelled_at:
        await turns(moment - now)
        now = moment
        task.cancel()


@settings(max_examples=scaled(300))
@given(st.lists(SCRIPTS, min_size=1, max_size=20))
def test_every_instance_is_released_exactly_once(scripts: list[Script]) -> None:
    async def run() -> Probe:
        tool = Probe()
        tasks = [asyncio.create_task(trajectory(tool, script)) for script in scripts]
        await asyncio.gather(*(disturb(task, script) for task, script in zip(tasks, scripts, strict=True)))
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for script, end in zip(scripts, ends, strict=True):
            assert end is None or isinstance(end, asyncio.CancelledError | InfraFault | PolicyFault)
            assert tool.closed == tool.released, "a trajectory ended before its release"
            if not script.cancelled_at:
                expected = InfraFault if script.create_fails else PolicyFault if script.execute_fails else type(None)
                assert isinstance(end, expected)
        return tool

    logging.disable(logging.CRITICAL)
    try:
        tool = asyncio.run(run())
    finally:
        logging.disable(logging.NOTSET)
    assert tool.released == tool.closed == tool.created
    assert set(tool.released.values()) <= {1}
    assert not tool.instances


class Slow(Probe):
    """Tool whose release never ends; if `stubborn`, it even ignores cancellation."""

    stubborn = False

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.released[instance_id] += 1
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if not self.stubborn:
                    raise
                await asyncio.sleep(5)
                return


@pytest.mark.parametrize("stubborn", [False, True])
async def test_endless_release_times_out(stubborn: bool, caplog: pytest.LogCaptureFixture) -> None:
    tool = Slow()
    tool.stubborn = stubborn
    start = asyncio.get_running_loop().time()
    async with ToolInstance(tool, create_kwargs={"script": Script()}, release_timeout=0.1):
        pass
    assert asyncio.get_running_loop().time() - start < 4
    assert "timed out after 0.1 s" in caplog.text
    assert sum(tool.released.values()) == 1
    await asyncio.sleep(0)
    assert stubborn or not [task for task in asyncio.all_tasks() if task.get_name().startswith("release")]


async def test_cancellation_is_deferred_until_release_ends() -> None:
    tool = Probe()
    task = asyncio.create_task(trajectory(tool, Script(execute=100, release=50)))
    await turns(5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sum(tool.closed.values()) == 1
    assert not tool.instances


async def test_cancellation_during_release_is_deferred() -> None:
    tool = Probe()
    task = asyncio.create_task(trajectory(tool, Script(release=50)))
    for _ in range(5):
        await turns(8)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sum(tool.closed.values()) == 1


async def test_asyncio_timeout_around_instance() -> None:
    tool = Probe()

    async def sleeper() -> None:
        async with asyncio.timeout(0.05), ToolInstance(tool, create_kwargs={"script": Script()}):
            await asyncio.sleep(10)

    with pytest.raises(TimeoutError):
        await sleeper()
    assert not tool.instances


async def test_failed_release_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    await trajectory(Probe(), Script(release_fails=True))
    assert "lost the key" in caplog.text


async def test_duplicate_id_is_rejected_and_owner_keeps_it() -> None:
    class Plain(BaseTool[None]):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return "here", None, {}

    tool = Plain({}, SCHEMA)
    async with ToolInstance(tool, "request-1") as instance:
        with pytest.raises(DuplicateInstance, match="request-1"):
            async with ToolInstance(tool, "request-1"):
                pytest.fail("created a second instance with the same id")
        assert "request-1" in tool.instances
        assert (await instance.execute({"x": 1})).response.text == "here"
    assert not tool.instances


async def test_released_instance_rejects_calls() -> None:
    async with ToolInstance(Probe(), create_kwargs={"script": Script()}) as instance:
        pass
    with pytest.raises(ToolContractError, match="has been released"):
        await instance.execute({"x": 1})
    with pytest.raises(ToolContractError, match="has been released"):
        await instance.calc_reward()


async def test_arguments_are_validated_before_execute() -> None:
    async with ToolInstance(Probe(), create_kwargs={"script": Script()}) as instance:
        with pytest.raises(InvalidArguments, match="'x' is missing"):
            await instance.execute('{"y": 1}')


class Odd(Probe):
    """Tool that raises SystemExit and CancelledError."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        assert instance_id is not None
        self.instances[instance_id] = Script()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        if parameters["x"] == "exit":
            sys.exit(5)
        raise asyncio.CancelledError

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        raise PolicyFault("the model has no part in this")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await super().release(instance_id)
        self.kwargs = kwargs
        sys.exit(6)


async def test_exit_and_cancellation_by_tool_only_fail_call(caplog: pytest.LogCaptureFixture) -> None:
    tool = Odd()
    async with ToolInstance(tool, release_kwargs={"why": "done"}) as instance:
        with pytest.raises(RuntimeError, match=r"sys\.exit\(5\)"):
            await instance.execute({"x": "exit"})
        with pytest.raises(RuntimeError, match="raised CancelledError"):
            await instance.execute({"x": "cancel"})
        with pytest.raises(InfraFault, match="calc_reward\\(\\) of 'probe' failed"):
            await instance.calc_reward()
    assert "sys.exit(6)" in caplog.text
    assert tool.kwargs == {"why": "done"}
    assert not tool.instances


async def test_instance_is_used_once_within_block() -> None:
    instance = ToolInstance(Probe(), create_kwargs={"script": Script()})
    with pytest.raises(ToolContractError, match="was not created"):
        await instance.execute({"x": 1})
    async with instance:
        pass
    with pytest.raises(ToolContractError, match="was already used"):
        async with instance:
            pytest.fail("entered twice")


async def test_sync_method_is_contract_error() -> None:
    class Sync(Probe):
        def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return "done", None, {}

    async with ToolInstance(Sync(), create_kwargs={"script": Script()}) as instance:
        with pytest.raises(ToolContractError, match="async def"):
            await instance.execute({"x": 1})


class Early(Probe):
    """Tool of an early verl version: create returns only the id, execute text, and calc_reward a list."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        return "custom-id"

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return f"hello from {instance_id}", "0.5", {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return [1.0]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.released[instance_id] += 1


async def test_lenient_create_and_strict_rewards() -> None:
    tool = Early()
    async with ToolInstance(tool) as instance:
        with pytest.raises(ToolContractError, match=r"Invalid reward from 'probe': '0\.5'"):
            await instance.execute({"x": 1})
        with pytest.raises(ToolContractError, match=r"Invalid reward from 'probe': \[1\.0\]"):
            await instance.calc_reward()
    assert tool.released == {"custom-id": 1}


async def test_final_reward_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "toolroll")
    async with ToolInstance(Gsm8kTool(), "a", create_kwargs={"ground_truth": "72"}) as instance:
        await instance.execute({"answer": "72"})
        await instance.calc_reward()
    assert caplog.messages == ["tool_reward_scores: tool 'calc_gsm8k_reward', instance a: 1"]
