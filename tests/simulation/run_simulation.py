"""Simulation of a run: a real coordinator and real workers, real record files and write fences, and random faults.

Invariants:

- Each sample is recorded exactly once.
- The run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolroll.records.record import FORMAT
from toolroll.records.writer import RecordWriter
from toolroll.rollout.distributed.dispatch import NO_LEASE_S, WORKER_LEASE_S, Results
from toolroll.rollout.distributed.worker import Assignment, CoordinatorUnreachable, Worker
from toolroll.run.aggregates import SampleOutcome
from toolroll.run.config import RunConfig
from toolroll.run.resume import SampleItem, recorded_outcomes
from toolroll.run.run_coordinator import RunCoordinator
from toolroll.run.write_fence import FENCE_RETRY_INTERVAL_S, WritePermission

from .faults import Fault, Simulation, Violation
from .world import ConnectionLost, Network, Process, WouldBlock

COORDINATOR = "coordinator"
MAX_CLOCK_ERROR = 0.04
MAX_RUN_S = 600.0
"""Time after which a run must have ended. Faults last for a few leases."""


class RunSimulation(Simulation):
    """A run with some workers.

    Args:
        seed: Determines the simulation.
        directory: Empty directory for the records.
        faults: Faults. Default: random faults, and random values of all other arguments.
        workers: Number of workers; 0 for a worker in the process of the coordinator.
        rows: Number of prompts.
        n: Number of samples per prompt.
        capacity: Maximum number of concurrent samples per worker.
        max_execution_s: Maximum duration of a sample.
        blocking_s: Duration for which samples of the first row block the event loop of their process.
    """

    POINTS = ("before write", "in write", "after write")

    def __init__(
        self,
        seed: int,
        directory: Path,
        faults: Sequence[Fault] | None = None,
        *,
        workers: int = 2,
        rows: int = 4,
        n: int = 2,
        capacity: int = 2,
        max_execution_s: float = 5.0,
        blocking_s: float = 0.0,
    ) -> None:
        super().__init__(seed, WORKER_LEASE_S, MAX_RUN_S, MAX_CLOCK_ERROR)
        rng = self.world.random
        if faults is None:
            workers, rows, n, capacity = (
                rng.choice([0, 1, 2, 3]),
                rng.randint(1, 8),
                rng.randint(1, 3),
                rng.randint(1, 3),
            )
            max_execution_s = rng.choice([1.0, 5.0, 15.0])
            blocking_s = rng.choice([0.0, 0.0, 0.0, rng.uniform(0.0, 2.0 * WORKER_LEASE_S)])
        self._samples = rows * n
        self._max_execution_s, self._blocking_s = max_execution_s, blocking_s
        self._workers = [f"worker-{index}" for index in range(workers)]
        self._running = set(self._workers or [COORDINATOR])
        self._directory = directory / "records"
        data = directory / "data.jsonl"
        data.write_text("".join(json.dumps({"prompt": str(row)}) + "\n" for row in range(rows)))
        self._config = RunConfig.model_validate(
            {
                "engine": {"kind": "openai", "urls": ["http://engine"]},
                "data": {"path": str(data)},
                "n": n,
                "rollout_data_dir": str(self._directory),
                "prompts_per_step": rng.randint(1, 3),
                "max_in_flight": capacity,
            }
        )
        for name in (COORDINATOR, *self._workers):
            self.start(name)
        if faults is None:
            self.targets = [COORDINATOR, *self._workers]
            self.add_random_faults()
        else:
            self.add_faults(faults)

    def check(self, ended: bool) -> None:
        recorded = Counter((one.row, one.sample) for one in recorded_outcomes(self._directory, lambda step: True))
        if doubled := sorted(key for key, count in recorded.items() if count > 1):
            raise Violation(f"Samples were recorded more than once: {doubled}.")
        if not ended:
            raise Violation(f"The run has not ended after {MAX_RUN_S:g} s: {len(recorded)} of {self._samples} samples.")
        if len(recorded) != self._samples:
            raise Violation(f"The run has ended with {len(recorded)} of {self._samples} samples.")

    async def main(self, process: Process) -> None:
        """Run a coordinator or a worker."""
        if process.name == COORDINATOR:
            coordinator = await self._start_coordinator(process)
            if self._workers:
                self.network.serve(process, coordinator)
                return
            client, lease_s = coordinator, NO_LEASE_S
        else:
            client, lease_s = RemoteCoordinator(self.network), WORKER_LEASE_S
        recorder = Recorder(self, process)
        capacity = self._config.max_in_flight
        await Worker(
            client, self._execute, recorder.commit, capacity=capacity, name=process.name, lease_s=lease_s
        ).run()
        process.on_kill.clear()
        self._running.discard(process.name)
        if not self._running:
            self.world.stop()

    async def _start_coordinator(self, process: Process) -> RunCoordinator:
        while True:
            try:
                coordinator = RunCoordinator(self._config, len(self._workers), in_process=not self._workers)
            except WouldBlock:  # a worker is paused while it writes
                await asyncio.sleep(FENCE_RETRY_INTERVAL_S)
            else:
                process.resources.callback(coordinator._lock.release)
                return coordinator

    async def _execute(self, item: SampleItem) -> SampleItem:
        await asyncio.sleep(self.world.random.uniform(0.0, self._max_execution_s))
        if item.row == 0 and self._blocking_s:
            process = self.world.current
            assert process is not None
            process.pause(self._blocking_s)
            await asyncio.sleep(0)
        return item


class RemoteCoordinator:
    """A worker's client of the coordinator, like `RayCoordinator`."""

    def __init__(self, network: Network) -> None:
        self._network = network

    async def register(self, worker: str, lease_s: float) -> None:
        await self._call("register", worker, lease_s)

    async def exchange(self, worker: str, sequence: int, completed: Results, capacity: int) -> Assignment[Any] | None:
        return await self._call("exchange", worker, sequence, list(completed), capacity)

    async def deregister(self, worker: str) -> None:
        await self._call("deregister", worker)

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            return await self._network.call(COORDINATOR, method, *args)
        except ConnectionLost as error:
            raise CoordinatorUnreachable(str(error)) from error


class Recorder:
    """Writes the records of one process, like `SampleWorker`, but can be paused or killed at any point."""

    def __init__(self, simulation: RunSimulation, process: Process) -> None:
        self._simulation, self._process = simulation, process
        self._lock = asyncio.Lock()
        self._writers: dict[str, tuple[RecordWriter, WritePermission | None]] = {}

    async def commit(self, worker: str, item: SampleItem, _: Any) -> SampleOutcome:
        config = self._simulation._config
        if worker not in self._writers:
            separate = bool(self._simulation._workers)
            permission = WritePermission(Path(config.rollout_data_dir) / worker) if separate else None
            writer = RecordWriter(config.rollout_data_dir, writer=worker if separate else None)
            self._writers[worker] = writer, permission
            self._process.resources.callback(writer.close)
            if permission:
                self._process.resources.callback(permission.close)
        await asyncio.shield(self._process.create_task(self._write(worker, item)))
        return SampleOutcome(item.row, item.sample, None, "ok", "", *[0] * 6, *[0.0] * 3, fidelity="")

    async def _write(self, worker: str, item: SampleItem) -> None:
        """Write a record, even if the commit is cancelled: `RecordWriter` uses a thread, which cannot be cancelled."""
        writer, permission = self._writers[worker]
        simulation, world = self._simulation, self._simulation.world
        async with self._lock:
            await simulation.reach("before write")
            with permission.hold() if permission else contextlib.nullcontext():
                await asyncio.sleep(world.random.uniform(0.0, 0.01))
                await simulation.reach("in write")
                fields = {"format": FORMAT, "group": str(item.row), "sample": item.sample, "outcome": "ok"}
                writer.append(fields, item.row // simulation._config.prompts_per_step)
                world.log(f"{worker} records row {item.row}, sample {item.sample}")
            await simulation.reach("after write")
