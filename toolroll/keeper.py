"""A keeper of connections: they close with whoever holds it, or with their event loop, whichever goes first.

    keeper = keep(session)
    await anext(keeper)     # begins
    await keeper.aclose()   # closes; so does letting go of it, and so does the loop when it is shut down

An event loop closes the asynchronous generators that were begun in it, when it is shut down or nobody refers to them
any more: a generator is the one thing of which both is promised.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import aiohttp

_open: dict[aiohttp.ClientSession, asyncio.AbstractEventLoop] = {}
"""Held here, so that the garbage collector can't find a session together with its keeper: it would have the session
complain that nobody closed it, just before the keeper does."""


async def keep(
    session: aiohttp.ClientSession, before: Callable[[], Awaitable[None]] | None = None
) -> AsyncGenerator[None, None]:
    """Close a session, after what is to be done before that. `before` mustn't refer to whatever holds this."""
    for other, loop in list(_open.items()):
        if loop.is_closed():  # without having been shut down: nothing can close it any more
            _open.pop(other, None)
    _open[session] = asyncio.get_running_loop()
    try:
        yield
    finally:
        try:
            if before is not None:
                await before()
        finally:
            _open.pop(session, None)
            await session.close()
