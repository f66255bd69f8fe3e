"""Complete clean-up work even if the waiting task is cancelled meanwhile.

`asyncio.shield` protects the inner task but returns to the caller at the first cancellation. These functions defer
every cancellation until the work has ended, then raise it, so that `asyncio.timeout` and task groups around the caller
keep working.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


async def finish_despite_cancellation(work: Awaitable[T]) -> T:
    """Await work until it ends, deferring cancellations of the caller.

    Args:
        work: Coroutine, task or future. It is not cancelled with the caller.

    Returns:
        The result of the work.

    Raises:
        asyncio.CancelledError: After the work has ended, if the caller was cancelled meanwhile.
        Exception: Any exception of the work, if the caller was not cancelled.
    """
    task = asyncio.ensure_future(work)
    await wait_despite_cancellation(task)
    return task.result()


async def wait_despite_cancellation(task: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Wait until a task ends or the timeout expires, deferring cancellations of the caller.

    The task is not cancelled, and its exception is not raised: check `task.done()` and call `task.result()`.

    Args:
        task: Task or future to wait for.
        timeout_s: Maximum time to wait, in seconds. Cancellations neither shorten nor extend it.

    Raises:
        asyncio.CancelledError: After the wait, if the caller was cancelled meanwhile.
    """
    clock = asyncio.get_running_loop().time
    deadline = None if timeout_s is None else clock() + timeout_s
    cancellation: asyncio.CancelledError | None = None
    while not task.done() and (deadline is None or clock() < deadline):
        try:
            await asyncio.wait({task}, timeout=None if deadline is None else deadline - clock())
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        raise cancellation
