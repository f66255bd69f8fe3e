"""Write toolroll's records next to verl's dump.

The files are `{trainer.rollout_data_dir}/toolroll/{writer}/{step}.jsonl`. verl's dump has the text of each sample; the
records also have its tokens, calls, turns and rewards, and include excluded samples. Each sink of each process writes
to its own directory. A record that cannot be written is logged and does not affect the sample.
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

RECORDS_DIRECTORY = "toolroll"
_sink_numbers = itertools.count()
"""Numbers of this process's sinks. A worker may have several agent loops."""


class RecordSink:
    """Writes trajectories if verl writes its own dump.

    Args:
        rollout_data_dir: verl's `trainer.rollout_data_dir`, or None to write nothing.
        decode: Function that converts token ids to text.
    """

    def __init__(self, rollout_data_dir: str | None, decode: Callable[[Sequence[int]], str]) -> None:
        self._writer: RecordWriter | None = None
        if rollout_data_dir:
            name = f"{socket.gethostname()}-{os.getpid()}-{next(_sink_numbers)}"
            self._writer = RecordWriter(Path(rollout_data_dir) / RECORDS_DIRECTORY, writer=name, decode=decode)

    async def write(self, trajectory: Trajectory, step: int) -> None:
        """Write one record. Failures are logged."""
        if self._writer is None:
            return
        try:
            await self._writer.write(trajectory, step)
        except Exception as error:  # for example a full disk, which does not affect the sample
            logger.error("The record of %s could not be written: %r", trajectory.request_id, error)
