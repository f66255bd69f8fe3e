"""The progress of a rollout moves while trajectories run, and names services that do not answer."""

import asyncio
import time

import pytest
from free_port import free_port
from sandbox.fault_server import FaultServer, answer

from rollout.scripted_model import Counting, Model, call
from rollout.test_engine_answers import PARAMS, PROMPT, sglang_answer
from toolroll.errors import EngineUnavailable
from toolroll.rollout.engines.sglang import SGLangEngine
from toolroll.rollout.progress import RolloutProgress
from toolroll.rollout.rollout import Rollout


@pytest.mark.virtual_time
async def test_progress_moves_inside_trajectories(model: Model) -> None:
    engine = model.engine([call("count", to=3), call("count", to=2), "Done."], delay=1.0)
    async with Rollout(engine=engine, rendering=model.rendering, tools=[Counting()]) as rollout:
        seen = []
        running = asyncio.create_task(rollout.sample("Count."))
        while not running.done():
            await asyncio.sleep(0.5)
            progress = rollout.progress()
            seen.append((progress.turns, progress.calls))
    trajectory = running.result()
    assert (1, 1) in seen, "before the trajectory has ended"
    assert (2, 2) in seen
    assert rollout.progress() == RolloutProgress(turns=3, tokens=sum(trajectory.tokens.mask), calls=2)


@pytest.mark.virtual_time
async def test_unreachable_engine_is_named_until_it_answers(model: Model) -> None:
    port = free_port()
    engine = SGLangEngine(f"http://127.0.0.1:{port}", vocab_size=100)
    rollout = Rollout(engine=engine, rendering=model.rendering)
    assert rollout.progress().unreachable == {}, "it was not tried yet"
    with pytest.raises(EngineUnavailable):
        await engine.generate("r", PROMPT, PARAMS, deadline=time.monotonic() + 60)
    [(name, seconds)] = rollout.progress().unreachable.items()
    assert name == "engine"
    assert 50 <= seconds <= 70
    await engine.close()
    async with FaultServer([answer(200, sglang_answer())]) as server:
        engine = SGLangEngine(server.url, vocab_size=100)
        await engine.generate("r", PROMPT, PARAMS)
        assert engine.unreachable_s() is None
        await engine.close()


def test_progress_of_workers_is_added() -> None:
    one = RolloutProgress(turns=1, tokens=10, calls=2, unreachable={"engine": 5.0})
    two = RolloutProgress(turns=2, tokens=20, calls=0, unreachable={"engine": 7.0, "sandbox": 1.0})
    assert one.merged(two) == RolloutProgress(3, 30, 2, {"engine": 7.0, "sandbox": 1.0})
