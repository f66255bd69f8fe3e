"""A lost worker cannot write records, however late it continues."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from toolroll.records.reader import read_records
from toolroll.records.writer import RecordWriter
from toolroll.rollout.distributed.dispatch import WORKER_LEASE_S
from toolroll.rollout.distributed.worker import CoordinatorUnreachable, LeaseExpired, Worker
from toolroll.run.aggregates import SampleOutcome
from toolroll.run.config import RunConfig
from toolroll.run.resume import SampleItem
from toolroll.run.run_coordinator import RunCoordinator
from toolroll.run.run_lock import RunLock
from toolroll.run.write_fence import WritePermission, fence, permit

ROWS, N = 12, 2


def test_fenced_worker_cannot_write(tmp_path: Path) -> None:
    directory = tmp_path / "worker-1"
    permit(directory)
    permission = WritePermission(directory)
    with RecordWriter(tmp_path, writer="worker-1", guard=permission.hold) as writer:
        writer.append({"output": "in time"}, 0)
        assert fence(directory)
        for step in (0, 1):
            with pytest.raises(LeaseExpired):
                writer.append({"output": "late"}, step)
    permission.close()
    assert [record.output for record in read_records(tmp_path)] == ["in time"]
    with pytest.raises(LeaseExpired):
        WritePermission(directory)
    assert [file.name for file in directory.iterdir()] == ["0.jsonl"], "nothing else is left"


def test_fence_waits_for_a_write_in_progress(tmp_path: Path) -> None:
    directory = tmp_path / "worker-1"
    permit(directory)
    permission = WritePermission(directory)
    with permission.hold():
        assert not fence(directory)
    assert fence(directory)
    assert not directory.exists(), "it has no records"
    assert fence(directory), "fencing again has no effect"


def test_next_run_fences_workers_of_killed_run(tmp_path: Path) -> None:
    RunLock(tmp_path, {"n": 1}).release()
    permit(tmp_path / "worker-1")
    permission = WritePermission(tmp_path / "worker-1")
    with permission.hold():  # it is suspended in the middle of a write
        starting = threading.Thread(target=RunLock, args=(tmp_path, {"n": 1}))
        starting.start()
        starting.join(0.5)
        assert starting.is_alive()
        (tmp_path / "worker-1" / "0.jsonl").write_text("{}\n")
    starting.join(60)
    with pytest.raises(LeaseExpired), permission.hold():
        pass


class SuspendedCoordinator:
    """A worker's connection to the coordinator. While the worker is suspended, no request is sent."""

    def __init__(self, coordinator: RunCoordinator) -> None:
        self._coordinator = coordinator
        self.is_suspended = False

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*arguments: Any) -> Any:
            if self.is_suspended:
                raise CoordinatorUnreachable("suspended")
            return await getattr(self._coordinator, name)(*arguments)

        return call


class RecordingWorker:
    """Writes a record for each sample. From the fifth sample on, it is suspended before each write if asked to."""

    def __init__(self, directory: Path, coordinator: RunCoordinator, *, suspend: bool) -> None:
        self._directory = directory
        self._connection = SuspendedCoordinator(coordinator)
        self._suspends = suspend
        self._commits = 0
        self.refused = 0

    async def run(self) -> None:
        async def execute(payload: SampleItem) -> SampleItem:
            await asyncio.sleep(0.5)
            return payload

        await Worker(self._connection, execute, self._commit, capacity=4).run()  # type: ignore[arg-type]

    async def _commit(self, worker: str, payload: SampleItem, result: SampleItem) -> SampleOutcome:
        self._commits += 1
        permission = WritePermission(self._directory / worker)
        if self._suspends and 4 < self._commits <= 8:  # its lease was valid a moment ago
            self._connection.is_suspended = True
            await asyncio.sleep(3 * WORKER_LEASE_S)
            self._connection.is_suspended = False
        record = {"format": "toolroll/1", "group": str(payload.row), "sample": payload.sample, "outcome": "ok"}
        try:
            with RecordWriter(self._directory, writer=worker, guard=permission.hold) as writer:
                writer.append(record, 0)
        except LeaseExpired:
            self.refused += 1
            raise
        finally:
            permission.close()
        return SampleOutcome(payload.row, payload.sample, 1.0, "ok", "stop", 1, 1, 1, 0, 0, 0, 1.0, 0.0, 0.0, "exact")


@pytest.mark.virtual_time
async def test_suspended_worker_does_not_double_records(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Question {n}?"}) + "\n" for n in range(ROWS)))
    directory = tmp_path / "records"
    config = RunConfig.model_validate(
        {"engine": {"urls": "http://nowhere"}, "data": {"path": str(data)}, "n": N, "rollout_data_dir": str(directory)}
    )
    coordinator = RunCoordinator(config, workers=2)
    suspended = RecordingWorker(directory, coordinator, suspend=True)
    workers = [suspended, RecordingWorker(directory, coordinator, suspend=False)]
    await asyncio.wait_for(asyncio.gather(*(worker.run() for worker in workers)), 3600)
    assert suspended.refused > 0
    assert coordinator.lost_workers == 1
    await coordinator.close()
    seen = Counter((int(str(one.group)), one.sample) for one in read_records(directory))
    assert seen == Counter((row, sample) for row in range(ROWS) for sample in range(N))
