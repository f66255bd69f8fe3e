"""Instances: one trajectory's share of every tool, begun together and ended together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Self

from toolroll.errors import InfraFault
from toolroll.tools.instance import ToolInstance


class Instances(dict[str, ToolInstance]):
    """By tool. `async with` creates them all at once, and releases them all however the block ends.

    Creating them has `within` seconds. A tool that takes longer is broken, and no doing of the model's.
    """

    def __init__(self, instances: Mapping[str, ToolInstance], within: float) -> None:
        super().__init__(instances)
        self._within = within

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(self._within):
                await self._begin()
        except TimeoutError:
            raise InfraFault(f"Creating the tools took longer than {self._within:g} s: {', '.join(self)}.") from None
        return self

    async def __aexit__(self, *why: object) -> None:
        await self._end()

    async def _begin(self) -> None:
        if len(self) == 1:  # as most often: it needs no tasks
            for instance in self.values():
                await instance.__aenter__()
            return
        begun = [asyncio.ensure_future(instance.__aenter__()) for instance in self.values()]
        try:
            await asyncio.gather(*begun)
        except BaseException:
            for one in begun:
                one.cancel()
            await asyncio.gather(*begun, return_exceptions=True)
            await self._end()
            raise

    async def _end(self) -> None:
        open_ones = [instance for instance in self.values() if instance.is_open]
        if len(open_ones) == 1:
            await open_ones[0].__aexit__(None, None, None)
        elif open_ones:
            await asyncio.gather(*(instance.__aexit__(None, None, None) for instance in open_ones))
