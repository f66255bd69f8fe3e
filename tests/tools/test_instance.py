"""What is created is released, once, in bounded time, whatever happens."""

import asyncio
import logging
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolroll import BaseTool, InfraFault, PolicyFault, ToolInstance, ToolResponse
from toolroll.errors import DuplicateInstance, InvalidArguments, ToolContractError

SCHEMA = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object", "required": ["x"]}}}


@dataclass(frozen=True)
class Script:
    """How one trajectory goes: how many turns of the event loop each step takes, and how it ends."""

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
    """Does what each instance's script says, and counts."""

    def __init__(self) -> None:
        super().__init__({}, SCHEMA)
        self.begun: Counter[str] = Counter()
        self.released: Counter[str] = Counter()
        self.closed: Counter[str] = Counter()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        assert instance_id is not None
        self.begun[instance_id] += 1
        script = kwargs["script"]
        self.instances[instance_id] = script  # held before the first await: a create that is cut short leaves it behind
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


@settings(max_examples=300)
@given(st.lists(SCRIPTS, min_size=1, max_size=20))
def test_whatever_fails_or_is_cancelled_each_is_released_once_and_none_is_left(scripts: list[Script]) -> None:
    async def run() -> Probe:
        tool = Probe()
        tasks = [asyncio.create_task(trajectory(tool, script)) for script in scripts]
        await asyncio.gather(*(disturb(task, script) for task, script in zip(tasks, scripts, strict=True)))
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for script, end in zip(scripts, ends, strict=True):
            assert end is None or isinstance(end, asyncio.CancelledError | InfraFault | PolicyFault)
            assert tool.closed == tool.released, "a trajectory ended before its release did"
            if not script.cancelled_at:
                wanted = InfraFault if script.create_fails else PolicyFault if script.execute_fails else type(None)
                assert isinstance(end, wanted)
        return tool

    logging.disable(logging.CRITICAL)
    try:
        tool = asyncio.run(run())
    finally:
        logging.disable(logging.NOTSET)
    assert tool.released == tool.closed == tool.begun
    assert set(tool.released.values()) <= {1}
    assert not tool.instances


class Slow(Probe):
    """Its release never ends; `stubborn` ones don't even heed their cancellation."""

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
async def test_a_release_that_never_ends_is_given_up(stubborn: bool, caplog: pytest.LogCaptureFixture) -> None:
    tool = Slow()
    tool.stubborn = stubborn
    began = asyncio.get_running_loop().time()
    async with ToolInstance(tool, create_kwargs={"script": Script()}, release_timeout=0.1):
        pass
    assert asyncio.get_running_loop().time() - began < 4
    assert "took more than 0.1 s" in caplog.text
    assert sum(tool.released.values()) == 1
    await asyncio.sleep(0)
    assert stubborn or not [task for task in asyncio.all_tasks() if task.get_name().startswith("release")]


async def test_a_cancellation_waits_for_the_release_and_then_goes_on() -> None:
    tool = Probe()
    task = asyncio.create_task(trajectory(tool, Script(execute=100, release=50)))
    await turns(5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sum(tool.closed.values()) == 1
    assert not tool.instances


async def test_cancellations_during_the_release_neither_shorten_it_nor_get_lost() -> None:
    tool = Probe()
    task = asyncio.create_task(trajectory(tool, Script(release=50)))
    for _ in range(5):
        await turns(8)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sum(tool.closed.values()) == 1


async def test_a_timeout_around_a_trajectory_is_a_timeout() -> None:
    tool = Probe()

    async def sleeper() -> None:
        async with asyncio.timeout(0.05), ToolInstance(tool, create_kwargs={"script": Script()}):
            await asyncio.sleep(10)

    with pytest.raises(TimeoutError):
        await sleeper()
    assert not tool.instances


async def test_a_release_that_fails_is_logged_and_the_trajectory_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    await trajectory(Probe(), Script(release_fails=True))
    assert "lost the key" in caplog.text


async def test_an_id_in_use_is_refused_and_its_owner_keeps_it() -> None:
    class Plain(BaseTool[None]):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return "here", None, {}

    tool = Plain({}, SCHEMA)
    async with ToolInstance(tool, "request-1") as instance:
        with pytest.raises(DuplicateInstance, match="request-1"):
            async with ToolInstance(tool, "request-1"):
                pytest.fail("a second one of the same id")
        assert "request-1" in tool.instances
        assert (await instance.execute({"x": 1})).response.text == "here"
    assert not tool.instances


async def test_after_the_end_nothing_can_be_called() -> None:
    async with ToolInstance(Probe(), create_kwargs={"script": Script()}) as instance:
        pass
    with pytest.raises(ToolContractError, match="released already"):
        await instance.execute({"x": 1})
    with pytest.raises(ToolContractError, match="released already"):
        await instance.calc_reward()


async def test_arguments_are_checked_before_the_tool_sees_them() -> None:
    async with ToolInstance(Probe(), create_kwargs={"script": Script()}) as instance:
        with pytest.raises(InvalidArguments, match="'x' is missing"):
            await instance.execute('{"y": 1}')


class Odd(Probe):
    """Ends in ways that would end more than the call."""

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


async def test_what_a_tool_does_ends_its_call_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    tool = Odd()
    async with ToolInstance(tool, release_kwargs={"why": "done"}) as instance:
        with pytest.raises(RuntimeError, match=r"sys\.exit\(5\)"):
            await instance.execute({"x": "exit"})
        with pytest.raises(RuntimeError, match="cancelled from within"):
            await instance.execute({"x": "cancel"})
        with pytest.raises(InfraFault, match="calc_reward of tool 'probe' failed"):
            await instance.calc_reward()
    assert "sys.exit(6)" in caplog.text
    assert tool.kwargs == {"why": "done"}
    assert not tool.instances


async def test_an_instance_is_used_once_and_within_its_block() -> None:
    instance = ToolInstance(Probe(), create_kwargs={"script": Script()})
    with pytest.raises(ToolContractError, match="not begun yet"):
        await instance.execute({"x": 1})
    async with instance:
        pass
    with pytest.raises(ToolContractError, match="make a new one"):
        await instance.__aenter__()


async def test_a_method_that_is_not_async_is_named_as_the_authors_mistake() -> None:
    class Sync(Probe):
        def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return "done", None, {}

    async with ToolInstance(Sync(), create_kwargs={"script": Script()}) as instance:
        with pytest.raises(ToolContractError, match="async def"):
            await instance.execute({"x": 1})


class Early(Probe):
    """As tools of the first days did it: the id alone from create, text from execute, a list from calc_reward."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        return "an id of my own"

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return f"hello from {instance_id}", "0.5", {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return [1.0]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.released[instance_id] += 1


async def test_tools_that_bend_the_contract_are_taken_where_it_is_safe_and_named_where_it_is_not() -> None:
    tool = Early()
    async with ToolInstance(tool) as instance:
        with pytest.raises(ToolContractError, match=r"'probe' gave the reward '0\.5'"):
            await instance.execute({"x": 1})
        with pytest.raises(ToolContractError, match=r"'probe' gave the reward \[1\.0\]"):
            await instance.calc_reward()
    assert tool.released == {"an id of my own": 1}
