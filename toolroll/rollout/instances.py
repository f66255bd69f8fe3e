"""The tool instances of one trajectory, created and released together.

Invariant: every instance whose `create` has started is released before the block ends, after failures, timeouts and any
number of cancellations. The exception is a `create` that ignores its cancellation for `CREATE_CANCEL_TIMEOUT_S`: its
instance is released in the background when it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Self

from toolroll._internal.cancellation import finish_despite_cancellation
from toolroll.errors import InfraFault
from toolroll.tools.instance import ToolInstance

logger = logging.getLogger(__name__)

CREATE_CANCEL_TIMEOUT_S = 10.0
"""Timeout for a cancelled `create` to end."""

_background_releases: set[asyncio.Task[None]] = set()


class ToolInstances(dict[str, ToolInstance]):
    """Tool instances by tool name. `async with` creates all of them concurrently and releases them at the end.

    Args:
        instances: Instances that are not open yet, by tool name.
        create_timeout_s: Timeout for creating all instances. Entering raises InfraFault if it expires.
    """

    def __init__(self, instances: Mapping[str, ToolInstance], create_timeout_s: float) -> None:
        super().__init__(instances)
        self._create_timeout_s = create_timeout_s
        self._exit_stacks = {name: AsyncExitStack() for name in instances}

    async def __aenter__(self) -> Self:
        if not self:
            return self
        tasks = {
            asyncio.create_task(self._exit_stacks[name].enter_async_context(instance)): name
            for name, instance in self.items()
        }
        try:
            await asyncio.wait(tasks, timeout=self._create_timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            await finish_despite_cancellation(self._roll_back(tasks))
            raise
        errors = [error for task in tasks if task.done() and (error := task.exception())]
        pending = [name for task, name in tasks.items() if not task.done()]
        if errors or pending:
            await finish_despite_cancellation(self._roll_back(tasks))
            timeout = f"Creating tools timed out after {self._create_timeout_s:g} s: {', '.join(pending)}."
            raise errors[0] if errors else InfraFault(timeout)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        open_names = self._open_names()
        if len(open_names) == 1:  # the most frequent case needs no task: an instance defers cancellations itself
            await self._exit_stacks[open_names[0]].aclose()
        elif open_names:
            await finish_despite_cancellation(self._release(open_names))

    async def _roll_back(self, tasks: Mapping[asyncio.Task[Any], str]) -> None:
        for task in tasks:
            task.cancel()
        _, pending = await asyncio.wait(tasks, timeout=CREATE_CANCEL_TIMEOUT_S)
        for task in pending:
            logger.warning("create of tool %r ignores its cancellation; releasing it when it ends", tasks[task])
            task.add_done_callback(partial(self._release_in_background, tasks[task]))
        await self._release(self._open_names())

    def _release_in_background(self, name: str, _: asyncio.Task[Any]) -> None:
        if self[name].is_open:
            _background_releases.add(release := asyncio.ensure_future(self._release([name])))
            release.add_done_callback(_background_releases.discard)

    async def _release(self, names: list[str]) -> None:
        await asyncio.gather(*(self._exit_stacks[name].aclose() for name in names))

    def _open_names(self) -> list[str]:
        return [name for name, instance in self.items() if instance.is_open]
