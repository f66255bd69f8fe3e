"""Our records, beside verl's dump: `{trainer.rollout_data_dir}/toolroll/{writer}/{step}.jsonl`.

verl's own dump has a line of text for each sample; ours has its tokens, calls, turns and rewards, and those that were
left out as well. Each recording of each process has a directory of its own. What keeps a record from being written is
logged: no sample is lost by it.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from toolroll.records.writer import RecordWriter
from toolroll.rollout.trajectory import Trajectory

logger = logging.getLogger(__name__)

FOLDER = "toolroll"
_numbers = itertools.count()
"""Of this process's recordings: a worker may have several agent loops of ours."""


class Recording:
    """Writes trajectories, if verl writes its own dump; else it does nothing."""

    def __init__(self, rollout_data_dir: str | None, decode: Callable[[Sequence[int]], str]) -> None:
        self._writer: RecordWriter | None = None
        if rollout_data_dir:
            name = f"{socket.gethostname()}-{os.getpid()}-{next(_numbers)}"
            self._writer = RecordWriter(Path(rollout_data_dir) / FOLDER, writer=name, decode=decode)

    async def write(self, trajectory: Trajectory, step: int) -> None:
        """Write one."""
        if self._writer is None:
            return
        try:
            await self._writer.write(trajectory, step)
        except Exception as error:  # a full disk, say: the sample itself is well
            logger.error("the record of %s could not be written: %r", trajectory.request_id, error)
