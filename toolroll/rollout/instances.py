"""Instances: one trajectory's share of every tool, begun together and ended together.

Whatever comes in between, a failure, a time-out, one cancellation or several: what was begun is released before the
block is left. (A `create` that heeds no cancellation is left to itself after a while, and released when it ends.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any, Self

from toolroll.errors import InfraFault
from toolroll.tools.instance import ToolInstance

logger = logging.getLogger(__name__)

_releasing: set[asyncio.Task[None]] = set()
CREATE_GRACE = 10.0
"""Seconds in which a `create` that was cancelled may end. It releases what it had begun."""


class Instances(dict[str, ToolInstance]):
    """By tool. `async with` creates them all at once, and releases them all however the block ends.

    Creating them has `within` seconds. A tool that takes longer is broken, and no doing of the model's.
    """

    def __init__(self, instances: Mapping[str, ToolInstance], within: float) -> None:
        super().__init__(instances)
        self._within = within

    async def __aenter__(self) -> Self:
        begun = {asyncio.create_task(one.__aenter__()): (name, one) for name, one in self.items()}
        if not begun:
            return self
        try:
            await asyncio.wait(begun, timeout=self._within, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            await _through(self._undo(begun))
            raise
        late = [begun[task][0] for task in begun if not task.done()]
        failed = [error for task in begun if task.done() and (error := task.exception())]
        if late or failed:
            await _through(self._undo(begun))
            raise (
                failed[0]
                if failed
                else InfraFault(f"Creating the tools took longer than {self._within:g} s: {', '.join(late)}.")
            )
        return self

    async def __aexit__(self, *why: object) -> None:
        open_ones = [instance for instance in self.values() if instance.is_open]
        if len(open_ones) == 1:  # as most often: it needs no task
            await open_ones[0].__aexit__(None, None, None)
        elif open_ones:
            await _through(_release(open_ones))

    async def _undo(self, begun: Mapping[asyncio.Task[Any], tuple[str, ToolInstance]]) -> None:
        for task in begun:
            task.cancel()
        _, late = await asyncio.wait(begun, timeout=CREATE_GRACE)
        for task in late:
            name, instance = begun[task]
            logger.warning("create of tool %r heeds no cancellation: it is released when it ends", name)
            task.add_done_callback(partial(_release_late, instance))
        await _release([instance for instance in self.values() if instance.is_open])


def _release_late(instance: ToolInstance, task: asyncio.Task[Any]) -> None:
    if instance.is_open:
        _releasing.add(releasing := asyncio.ensure_future(_release([instance])))
        releasing.add_done_callback(_releasing.discard)


async def _release(instances: list[ToolInstance]) -> None:
    await asyncio.gather(*(instance.__aexit__(None, None, None) for instance in instances))


async def _through(work: Coroutine[Any, Any, None]) -> None:
    """See it through. A cancellation that comes meanwhile is kept back until then."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
