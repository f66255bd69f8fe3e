"""RolloutWorkers on a real Ray cluster: training steps, killed workers, abort and resume."""

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import ray

from toolroll import BaseTool, ToolResponse, ToolResult
from toolroll.errors import ConfigError
from toolroll.rollout.distributed.rollout_workers import RolloutWorkers, _TrainerCoordinator
from toolroll.rollout.distributed.worker_pool import WorkersFailed
from toolroll.rollout.rollout import Rollout
from toolroll.rollout.tokens import Author
from toolroll.rollout.trajectory import FinishReason, Trajectory

pytestmark = pytest.mark.ray

MAX_STEPS = 100
PROMPTS = [f"What is {number} times 7?" for number in range(20)]


def make_rollout(seconds_per_token: float = 0.002, tools: Sequence[BaseTool[Any]] = ()) -> Rollout:
    """Create a rollout whose scripted engine answers within 0.1 s."""
    from rollout import small_tokenizer
    from toolroll.rollout.chat.formats import load_rendering
    from toolroll.rollout.engines.scripted import ScriptedEngine

    tokenizer = small_tokenizer.make(small_tokenizer.CHATML, small_tokenizer.MARKERS)
    rendering = load_rendering(tokenizer, "chatml")
    answer = [*tokenizer.encode("word " * 30, add_special_tokens=False), rendering.stop_ids[0]]
    engine = ScriptedEngine([answer], seconds_per_token=seconds_per_token, weight_version=str(os.getpid()))
    return Rollout(engine=engine, rendering=rendering, tools=tools)


def slow_rollout(tools: Sequence[BaseTool[Any]] = ()) -> Rollout:
    return make_rollout(0.02, tools)


class NotedTool(BaseTool[None]):
    """Creates a file, and removes it when it is released."""

    default_schema = {  # noqa: RUF012
        "type": "function",
        "function": {"name": "noted", "description": "Do nothing.", "parameters": {"type": "object"}},
    }

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        Path(self.config["file"]).touch()
        return await super().create(instance_id, **kwargs)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        return ToolResult(ToolResponse(text="done"), None, {})

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        Path(self.config["file"]).unlink()


def broken_rollout() -> Rollout:
    raise ConfigError("Unknown model.")


@pytest.fixture
async def workers(cluster: str) -> AsyncIterator[Any]:
    made: list[RolloutWorkers] = []

    def start(make_rollout: Any, **more: Any) -> RolloutWorkers:
        made.append(RolloutWorkers(make_rollout, workers=2, **more))
        return made[-1]

    yield start
    for one in made:
        await one.close()


def processes_of(trajectories: list[Trajectory]) -> Counter[int]:
    """Count the model spans by process id."""
    spans = [span for one in trajectories for span in one.tokens.spans if span.author is Author.MODEL]
    return Counter(int(str(span.weight_version)) for span in spans)


async def test_training_steps_use_all_workers(workers: Any) -> None:
    pool = workers(make_rollout)
    used: set[int] = set()
    for step in range(MAX_STEPS):
        trajectories = await pool.generate(PROMPTS, n=3)
        assert [(one.group, one.sample) for one in trajectories] == [(str(r), s) for r in range(20) for s in range(3)]
        assert {one.finish_reason for one in trajectories} == {FinishReason.STOP}
        asked = [one.messages[0].content for one in trajectories[::3]]
        assert asked == PROMPTS
        used |= processes_of(trajectories).keys()
        if step > 0 and len(used) == 2:  # on a slow machine, the second worker starts late
            break
    assert len(used) == 2


async def test_cancelled_step_takes_no_trajectory_of_the_next() -> None:
    coordinator: Any = _TrainerCoordinator(1)
    await coordinator.start_step(1, [])
    assert await coordinator.collect(1) == []
    cancelled = asyncio.create_task(coordinator.collect(1))  # cancelling its caller does not cancel an actor's method
    await asyncio.sleep(0)
    await coordinator.start_step(2, [])
    coordinator.record_result((2, 0, 0), "trajectory")
    await asyncio.sleep(0)
    assert await coordinator.collect(2) == [((2, 0, 0), "trajectory")]
    assert await cancelled == []


async def test_generate_orders_prompts_with_their_own_groups(workers: Any) -> None:
    rows = [{"prompt": prompt, "group": group} for prompt, group in zip(PROMPTS, ["b", "a", "b"], strict=False)]
    trajectories = await workers(make_rollout).generate(rows, n=2)
    assert [(one.group, one.sample) for one in trajectories] == [(group, s) for group in "bab" for s in range(2)]
    assert [one.messages[0].content for one in trajectories[::2]] == PROMPTS[:3]


async def test_killed_worker_loses_no_trajectory(workers: Any) -> None:
    pool = workers(slow_rollout, max_in_flight=8)
    ended: list[Trajectory] = []
    killed = None
    async for one in pool.run(PROMPTS, n=4):
        ended.append(one)
        if len(ended) == 10:
            killed = next(iter(processes_of(ended)))
            os.kill(killed, signal.SIGKILL)
    assert Counter((one.group, one.sample) for one in ended) == {(str(r), s): 1 for r in range(20) for s in range(4)}
    assert killed is not None
    assert not psutil.pid_exists(killed)


async def test_close_releases_tools(workers: Any, tmp_path: Path) -> None:
    held = tmp_path / "held"
    pool = workers(partial(slow_rollout, [NotedTool({"file": str(held)})]))
    stepping = asyncio.create_task(pool.generate(PROMPTS[:1]))
    async with asyncio.timeout(60):
        while not held.exists():
            await asyncio.sleep(0.02)
    await pool.close()
    assert not held.exists()
    with pytest.raises((asyncio.CancelledError, WorkersFailed)):
        await stepping


async def test_abort_and_resume_reach_all_workers(workers: Any) -> None:
    pool = workers(slow_rollout)
    await pool.generate(PROMPTS[:2])  # wait until the workers have started
    stepping = asyncio.create_task(pool.generate(PROMPTS, n=2))
    await asyncio.sleep(1)
    await pool.abort()
    await asyncio.sleep(3)
    assert not stepping.done(), "without the abort it would be done"
    await pool.resume()
    trajectories = await asyncio.wait_for(stepping, 60)
    assert any(turn.finish == "abort" for one in trajectories for turn in one.turns)
    assert {one.finish_reason for one in trajectories} == {FinishReason.STOP}
    assert {one.tokens.response_length for one in trajectories} == {trajectories[0].tokens.response_length}


async def test_failing_make_rollout_raises_workers_failed(workers: Any) -> None:
    with pytest.raises(WorkersFailed, match=r"A worker could not be started: .*Unknown model"):
        await workers(broken_rollout).generate(PROMPTS)


async def test_metrics_are_exported_through_ray(workers: Any, cluster: str) -> None:
    await workers(make_rollout).generate(PROMPTS[:5], n=2)
    [node] = [one for one in ray.nodes() if one["Alive"]]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    wanted = 'ray_toolroll_trajectories_total{.*finish_reason="stop".*outcome="ok"'
    deadline = time.monotonic() + 60  # Ray exports metrics every 10 s
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(url) as answer:
                lines = [line for line in (await answer.text()).splitlines() if re.match(wanted, line)]
            if sum(float(line.rsplit(" ", 1)[1]) for line in lines) >= 10:
                return
            assert time.monotonic() < deadline, lines
            await asyncio.sleep(1)
