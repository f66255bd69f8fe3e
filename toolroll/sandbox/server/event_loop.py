"""The event loop of the sandbox server."""

from __future__ import annotations

import asyncio
import selectors

import uvloop

from toolroll.sandbox.server.isolation.program_users import ProgramUsers


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop that programs cannot break.

    The kernel limits the epoll watches of each user. Programs of a server that runs as an unprivileged user have the
    same user and can use up all watches, upon which uvloop aborts the process. poll(2) has no such limit. A server that
    can assign a separate user to each program, which needs root, does not have this problem.

    Returns:
        A loop of uvloop if programs have other users, otherwise a loop of asyncio that uses poll.

    Example:
        ```python
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(main())
        ```
    """
    return uvloop.new_event_loop() if ProgramUsers.find() else asyncio.SelectorEventLoop(selectors.PollSelector())
