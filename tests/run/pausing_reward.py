"""A reward function that blocks the event loop, for tests with a virtual clock."""

import asyncio
from typing import Any

from toolroll.rollout.distributed.dispatch import WORKER_LEASE_S


def pause(trajectory: Any) -> float:
    """Let the clock jump by more than a worker's lease for every third row, as `time.sleep` or SIGSTOP would."""
    if int(trajectory.group) % 3 == 0:
        loop: Any = asyncio.get_running_loop()
        loop.now += 1.1 * WORKER_LEASE_S
    return 1.0
