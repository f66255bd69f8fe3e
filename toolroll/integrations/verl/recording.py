"""Our records, beside verl's dump: `{trainer.rollout_data_dir}/toolroll/{worker}/{step}.jsonl`.

verl's own dump has a line of text for each sample; ours has its tokens, calls, turns and rewards, and those that were
left out as well. One writer for each process. What keeps a record from being written is logged: no sample is lost by
it.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolroll.rollout.trajectory import Trajectory

logger = logging.getLogger(__name__)

FOLDER = "toolroll"


class Recording:
    """Writes trajectories, if verl writes its own dump; else it does nothing."""

    def __init__(self, rollout_data_dir: str | None, decode: Callable[[Sequence[int]], str]) -> None:
        self._writer: Any = None
        if rollout_data_dir:
            from toolroll.records.writer import RecordWriter  # type: ignore[import-not-found,unused-ignore]

            name = f"{socket.gethostname()}-{os.getpid()}"
            self._writer = RecordWriter(Path(rollout_data_dir) / FOLDER, writer=name, decode=decode)

    async def write(self, trajectory: Trajectory, step: int) -> None:
        """Write one."""
        if self._writer is None:
            return
        try:
            await self._writer.write(trajectory, step)
        except Exception:  # a full disk, say: the sample itself is well
            logger.exception("the record of %s could not be written", trajectory.request_id)
