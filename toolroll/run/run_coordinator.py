"""Coordinate the workers of a run: read the data, assign samples, and track which are done.

The coordinator runs in the same process as the worker, or as a Ray actor. Its state is derived from the data and the
records, so a new coordinator can replace one that died. The samples that a lost worker had recorded are read from its
record files after its directory is fenced (`write_fence.py`), so no sample is recorded twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from toolroll.errors import ConfigError, RecordsNotWritten
from toolroll.rollout.distributed.coordinator import WorkCoordinator
from toolroll.rollout.distributed.dispatch import WORKER_LEASE_S, Key, LostWorker, Results, WorkItem
from toolroll.run.aggregates import BudgetRefusal
from toolroll.run.config import RunConfig
from toolroll.run.data import PromptRows
from toolroll.run.early_stop import EarlyStop
from toolroll.run.resume import ResumeState, SampleItem, recorded_outcomes
from toolroll.run.row_files import BadRow
from toolroll.run.run_lock import RunLock
from toolroll.run.status import RunSnapshot
from toolroll.run.write_fence import FENCE_RETRY_INTERVAL_S, fence, permit
from toolroll.tools.base_tool import BaseTool
from toolroll.tools.mcp.mcp_tool import McpTool
from toolroll.tools.registry import ToolType, initialize_tools_from_config

logger = logging.getLogger(__name__)


def lock_directory(config: RunConfig, rows: PromptRows | None = None) -> RunLock:
    """Lock the directory of a run.

    Args:
        config: Configuration of the run.
        rows: Its data, if it was opened already.

    Raises:
        ConfigError: If another run is active in the directory, or it contains records of a different run.
    """
    identity = {
        "data": (rows or PromptRows(config.data)).fingerprint(),
        "n": config.n,
        "prompts_per_step": config.prompts_per_step,
        "model": config.model_name,
        **mcp_identity(_mcp_tools(config)),
    }
    return RunLock(Path(config.rollout_data_dir), identity, keeps_failed=config.retry == "none")


def _mcp_tools(config: RunConfig) -> list[BaseTool[Any]]:
    """Return the MCP tools of a run. The modules of other tools can only be imported by the driver and the workers."""
    return initialize_tools_from_config(config.tools, kind=ToolType.MCP) if config.tools else []


def mcp_identity(tools: Iterable[BaseTool[Any]]) -> dict[str, str | None]:
    """Return the names and the hashes of the schemas of MCP tools. Their servers can change them between two runs."""
    hashes = {tool.name: tool.schema_hash for tool in tools if isinstance(tool, McpTool)}
    return {"mcp_tools": ", ".join(hashes) or None, **{f"mcp_tools.{name}": one for name, one in hashes.items()}}


def check_mcp_identity(tools: Iterable[BaseTool[Any]], expected: Mapping[str, str | None]) -> None:
    """Check that the MCP tools of a worker are those with which the run was started.

    Raises:
        ConfigError: If a server has changed the names or schemas of its tools.
    """
    found = mcp_identity(tools)
    for key in {**expected, **found}:
        if found.get(key) != expected.get(key):
            raise ConfigError(
                f"The run was started with {key}={expected.get(key)!r}, but a worker found {key}={found.get(key)!r}. "
                "Pin the version of the MCP server."
            )


class RunCoordinator(WorkCoordinator[SampleItem]):
    """Coordinator of one run.

    Args:
        config: Configuration of the run.
        workers: Expected number of workers.
        in_process: The only worker runs in this process, so it cannot be lost. It writes to the run's directory itself,
            and not to a subdirectory.

    Raises:
        ConfigError: If the data or the run's directory cannot be used.
    """

    def __init__(self, config: RunConfig, workers: int, *, in_process: bool = False) -> None:
        super().__init__(self._work_items(), workers=workers)
        self._config = config
        self._in_process = in_process
        self._registered: set[str] = set()
        """All names under which workers have registered, including lost workers."""
        self._rows = PromptRows(config.data)
        self._row_count = self._rows.known_length()
        directory = Path(config.rollout_data_dir)
        self._lock = lock_directory(config, self._rows)
        self._resume_state = ResumeState(directory, config.n, config.prompts_per_step, config.rewards.solved_at)
        self._resume_state.load()
        self._resumed = self._resume_state.aggregates.summary()
        self._started_at: float | None = None
        """Time at which the first item was assigned."""
        self._early_stop = EarlyStop()
        self._refusal: BudgetRefusal | None = None
        """First sample that ended because a budget is spent. No samples are assigned after it."""
        self._refused = 0

    async def register(self, worker: str, lease_s: float = WORKER_LEASE_S) -> None:
        """Register a worker and permit it to write records. A request that is repeated late has no effect."""
        if worker in self._registered:
            return
        if not self._in_process:
            try:
                permit(self._directory_of(worker))
            except OSError as error:
                raise RecordsNotWritten.because(error, self._config.rollout_data_dir) from error
        self._registered.add(worker)
        await super().register(worker, lease_s)

    async def deregister(self, worker: str) -> None:
        """Remove a worker, which cannot write any more. Its items are assigned to others immediately."""
        await self._fence(worker)
        await super().deregister(worker)

    def record_result(self, key: Key, result: Any) -> None:
        """Mark a sample as done, or stop assigning samples if a budget is spent."""
        if isinstance(result, BudgetRefusal):
            self._refusal = self._refusal or result
            self._refused += 1
            self.stop()
            return
        self._resume_state.add(result)
        self._early_stop.add(result)

    async def find_committed(self, lost: LostWorker[SampleItem]) -> Results:
        """Fence a lost worker, and return the pending samples that it had recorded."""
        await self._fence(lost.worker)
        pending = {(item.payload.row, item.payload.sample) for item in lost.items}
        steps = {self._resume_state.step_of(row) for row, _ in pending}
        directory = self._directory_of(lost.worker)
        outcomes = await asyncio.to_thread(lambda: list(recorded_outcomes(directory, lambda step: step in steps)))
        return [((one.row, one.sample), one) for one in outcomes if (one.row, one.sample) in pending]

    async def status(self) -> RunSnapshot:
        """Return the current status of the run, without the limiters' slots."""
        aggregates, resumed = self._resume_state.aggregates.summary(), self._resumed
        done, running = aggregates["trajectories"], self.dispatch.assigned
        bad_rows = self._resume_state.bad_rows
        total = None if self._row_count is None else (self._row_count - bad_rows) * self._config.n
        return RunSnapshot(
            done=done,
            running=running,
            queued=None if total is None else max(0, total - done - running),
            total=total,
            tokens=aggregates["sampled_tokens"] - resumed["sampled_tokens"],
            calls=aggregates["calls"] - resumed["calls"],
            workers=len(self.dispatch.workers),
            lost_workers=self.lost_workers,
            seconds=0.0 if self._started_at is None else time.monotonic() - self._started_at,
            resumed=resumed["trajectories"],
            bad_rows=bad_rows,
            failure=self._early_stop.failure,
            exhausted=self._refusal and f"The {self._refusal.unit} budget of {self._refusal.resource!r} is spent.",
            refused=self._refused,
            alarms=self._resume_state.alarm_blocks.alarms.figures(),
            aggregates=aggregates,
        )

    async def close(self) -> None:
        """Stop coordinating and release the run's directory."""
        await super().close()
        self._lock.release()

    def _directory_of(self, worker: str) -> Path:
        return Path(self._config.rollout_data_dir) / ("" if self._in_process else worker)

    async def _fence(self, worker: str) -> None:
        while not self._in_process:
            if await asyncio.to_thread(fence, self._directory_of(worker)):
                break
            await asyncio.sleep(FENCE_RETRY_INTERVAL_S)

    def _work_items(self) -> Iterator[WorkItem[SampleItem]]:
        """Yield the samples that are not done, in the order of the data."""
        first_row = row_count = self._resume_state.first_row()
        for row in self._rows.rows(first_row):
            row_count = row[0] + 1
            if isinstance(row, BadRow):
                self._resume_state.skip_row(row.number)
                logger.warning("Skipping row %d of the data: %s", row.number, row.reason)
                continue
            number, prompt = row
            self._started_at = self._started_at or time.monotonic()
            for sample in self._resume_state.missing_samples(number):
                yield WorkItem((number, sample), SampleItem(number, sample, prompt))
        self._resume_state.alarm_blocks.end_data(row_count)
