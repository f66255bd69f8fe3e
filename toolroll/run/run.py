"""Run: a whole run, in this process or on a Ray cluster.

    async with Run(RunConfig.load("run.yaml")) as run:
        await run.wait()                      # meanwhile `await run.status()` says how it stands

Every sample of every prompt is in the records once when it has ended. One that is stopped, or whose process is killed,
goes on from there when it is begun anew with the same config.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, Self

from toolroll.limiter.limiter import get_limiter
from toolroll.ray_cluster import NoCluster, connect
from toolroll.rollout.collector import rare_full_collections
from toolroll.rollout.dispatch import LEASE
from toolroll.rollout.worker import Worker
from toolroll.run.config import RunConfig
from toolroll.run.hands import RunHands
from toolroll.run.run_board import RunBoard
from toolroll.run.status import Status
from toolroll.tools.registry import initialize_tools_from_config
from toolroll.tools.sandbox_fusion_tool import SandboxFusionTool

ASK_AGAIN = 0.5
"""Seconds before a board is asked again that is begun anew."""


class _Place(Protocol):
    """Where a run runs."""

    async def work(self) -> None: ...

    async def status(self) -> Status: ...

    async def end(self) -> None: ...


class Run:
    """A run. `async with` begins it, and stops what is left of it at the end of the block."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._place: _Place | None = None
        self._working: asyncio.Task[None] | None = None
        self._last: Status | None = None

    async def __aenter__(self) -> Self:
        self._place = _Here(self.config) if self.config.cluster is None else _OnRay(self.config)
        self._working = asyncio.create_task(self._place.work())
        return self

    async def __aexit__(self, *why: object) -> None:
        assert self._working is not None
        assert self._place is not None
        self._working.cancel()
        await asyncio.gather(self._working, return_exceptions=True)
        self._last = await self._place.status()
        await self._place.end()

    async def wait(self) -> None:
        """Until all is done. What ended the workers is raised."""
        assert self._working is not None
        await asyncio.shield(self._working)

    async def status(self) -> Status:
        """How it stands; after its end, how it ended."""
        if self._last is not None:
            return self._last
        assert self._place is not None
        return await self._place.status()


class _Here:
    """In this process."""

    def __init__(self, config: RunConfig) -> None:
        self._board = RunBoard(config, workers=1)
        self._hands = RunHands(config, apart=False)
        self._resources = _resources(config)
        self._worker = Worker(
            self._board, self._hands.carry_out, self._hands.commit, capacity=config.max_in_flight, name="here"
        )

    async def work(self) -> None:
        with rare_full_collections():
            await self._worker.run()

    async def status(self) -> Status:
        limiters = [get_limiter(resource, limit) for resource, limit in self._resources.items()]
        return replace(await self._board.status(), **_sum((one.in_use, one.limit) for one in limiters))

    async def end(self) -> None:
        await self._hands.close()
        await self._board.close()


class _OnRay:
    """On a cluster: a board on this node, and workers on all."""

    def __init__(self, config: RunConfig) -> None:
        self._connected = _connect(str(config.cluster))
        import ray

        from toolroll.rollout.crew import Crew, actor_here, number_of_nodes

        self._ray: Any = ray

        self._resources = _resources(config)
        workers = config.workers or number_of_nodes()
        # It knows nothing that isn't in the records: begun anew, it goes on.
        self._board: Any = actor_here(RunBoard, max_restarts=-1).remote(config, workers, lease=LEASE)
        self._last: Status | None = None
        hands = partial(RunHands, config, apart=True, path=list(sys.path))
        self._crew = Crew(self._board, hands, workers=workers, capacity=config.max_in_flight, name="worker")

    async def work(self) -> None:
        await self._crew.work()

    async def status(self) -> Status:
        self._last = await self._ask_board() or self._last
        while self._last is None:
            await asyncio.sleep(ASK_AGAIN)
            self._last = await self._ask_board()
        return replace(self._last, **_sum(await asyncio.to_thread(self._standings)))

    async def _ask_board(self) -> Status | None:
        """How it stands; None while the board is begun anew."""
        from toolroll.rollout.crew import WorkersFailed, last_line

        errors = self._ray.exceptions
        try:
            status: Status = await self._board.status.remote()
        except errors.ActorDiedError as error:
            raise WorkersFailed(f"The run could not go on: {last_line(error)}") from error
        except errors.RayError:
            return None
        return status

    def _standings(self) -> list[tuple[int, int]]:
        """Of the limits that there are: one that nobody has used yet has no actor, and is left out."""
        from toolroll.limiter.token_bucket import standing

        found = []
        for resource in self._resources:
            with contextlib.suppress(ValueError, self._ray.exceptions.RayError):
                now = standing(resource, timeout=1.0)
                found.append((now.in_use, now.limit))
        return found

    async def end(self) -> None:
        self._crew.end()
        with contextlib.suppress(self._ray.exceptions.RayError):  # else the next run waits for what may be at work
            await self._board.close.remote()
        self._ray.kill(self._board)
        if self._connected:
            self._ray.shutdown()


def _connect(address: str) -> bool:
    """Whether it was done here; else the process was connected before."""
    try:
        return connect(address)
    except NoCluster:
        if address != "auto" or "RAY_ADDRESS" in os.environ:
            raise
    import ray

    ray.init("local", num_cpus=os.cpu_count() or 1, log_to_driver=False, include_dashboard=False)
    return True


def _resources(config: RunConfig) -> dict[str, int]:
    """What the tools' limits are of, and what they ask for."""
    tools = initialize_tools_from_config(config.tools) if config.tools else []
    sandboxes = [tool for tool in tools if isinstance(tool, SandboxFusionTool)]
    return {tool.resource: tool.settings.rate_limit for tool in sandboxes}


def _sum(standings: Iterable[tuple[int, int]]) -> dict[str, Any]:
    """What is in flight of all that is limited; nothing, where nothing is."""
    known = list(standings)
    return {"in_flight": sum(one[0] for one in known), "limit": sum(one[1] for one in known)} if known else {}
