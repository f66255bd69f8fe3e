"""Rollouts on a real Ray: steps of a trainer, workers that are killed, abort and resume over all of them."""

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import psutil
import pytest
import ray

from toolroll.errors import ConfigError
from toolroll.rollout.crew import WorkersFailed
from toolroll.rollout.rollout import Rollout
from toolroll.rollout.tokens import Author
from toolroll.rollout.trajectory import FinishReason, Trajectory
from toolroll.rollout.workers import RolloutWorkers

PROMPTS = [f"What is {number} times 7?" for number in range(20)]


def make_rollout(seconds_per_token: float = 0.002) -> Rollout:
    """In a worker's process: a scripted engine, whose answers take a fifth of a second."""
    from rollout import small_tokenizer
    from toolroll.rollout.engines.scripted import ScriptedEngine
    from toolroll.rollout.formats import load_rendering

    tokenizer = small_tokenizer.make(small_tokenizer.CHATML, small_tokenizer.MARKERS)
    rendering = load_rendering(tokenizer, "chatml")
    answer = [*tokenizer.encode("word " * 30, add_special_tokens=False), rendering.stop_ids[0]]
    engine = ScriptedEngine([answer], seconds_per_token=seconds_per_token, weight_version=str(os.getpid()))
    return Rollout(engine=engine, rendering=rendering)


def slow_rollout() -> Rollout:
    return make_rollout(0.02)


def broken_rollout() -> Rollout:
    raise ConfigError("There is no such model.")


@pytest.fixture
async def workers(cluster: str) -> AsyncIterator[Any]:
    made: list[RolloutWorkers] = []

    def begin(make: Any, **more: Any) -> RolloutWorkers:
        made.append(RolloutWorkers(make, workers=2, **more))
        return made[-1]

    yield begin
    for one in made:
        await one.close()


def processes_of(trajectories: list[Trajectory]) -> Counter[int]:
    """Which process wrote how many."""
    spans = [span for one in trajectories for span in one.tokens.spans if span.author is Author.MODEL]
    return Counter(int(str(span.weight_version)) for span in spans)


async def test_steps_of_a_trainer(workers: Any) -> None:
    crew = workers(make_rollout)
    for step in range(2):
        trajectories = await crew.generate(PROMPTS, n=3)
        assert [(one.group, one.sample) for one in trajectories] == [(str(r), s) for r in range(20) for s in range(3)]
        assert {one.finish_reason for one in trajectories} == {FinishReason.STOP}
        asked = [one.messages[0].content for one in trajectories[::3]]
        assert asked == PROMPTS
        assert step == 0 or len(processes_of(trajectories)) == 2, "once both are there, both work"


async def test_a_worker_that_is_killed_loses_nothing(workers: Any) -> None:
    crew = workers(slow_rollout, max_in_flight=8)
    ended: list[Trajectory] = []
    killed = None
    async for one in crew.run(PROMPTS, n=4):
        ended.append(one)
        if len(ended) == 10:
            killed = next(iter(processes_of(ended)))
            os.kill(killed, signal.SIGKILL)
    assert Counter((one.group, one.sample) for one in ended) == {(str(r), s): 1 for r in range(20) for s in range(4)}
    assert killed is not None
    assert not psutil.pid_exists(killed)


async def test_abort_and_resume_over_all_workers(workers: Any) -> None:
    crew = workers(slow_rollout)
    await crew.generate(PROMPTS[:2])  # when that is done, they are there
    stepping = asyncio.create_task(crew.generate(PROMPTS, n=2))
    await asyncio.sleep(1)
    await crew.abort()
    await asyncio.sleep(3)
    assert not stepping.done(), "it would have ended by now"
    await crew.resume()
    trajectories = await asyncio.wait_for(stepping, 60)
    assert any(turn.finish == "abort" for one in trajectories for turn in one.turns)
    assert {one.finish_reason for one in trajectories} == {FinishReason.STOP}
    assert {one.tokens.response_length for one in trajectories} == {trajectories[0].tokens.response_length}


async def test_a_rollout_that_cant_be_made_is_said(workers: Any) -> None:
    with pytest.raises(WorkersFailed, match=r"A worker could not begin: .*There is no such model"):
        await workers(broken_rollout).generate(PROMPTS)


async def test_what_was_done_is_in_rays_metrics(workers: Any, cluster: str) -> None:
    await workers(make_rollout).generate(PROMPTS[:5], n=2)
    [node] = [one for one in ray.nodes() if one["Alive"]]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    wanted = 'ray_toolroll_trajectories_total{.*finish_reason="stop".*outcome="ok"'
    deadline = time.monotonic() + 60  # Ray gathers them every ten seconds
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(url) as answer:
                lines = [line for line in (await answer.text()).splitlines() if re.match(wanted, line)]
            if sum(float(line.rsplit(" ", 1)[1]) for line in lines) >= 10:
                return
            assert time.monotonic() < deadline, lines
            await asyncio.sleep(1)
