"""ToolInstance: what is created is released, once, in bounded time, whatever happens.

This is the one place that holds the rule. For every `create` that began, `release` is called exactly once, after
`create` has ended: by returning, by failing, or by being cancelled. It is called when the block ends, whichever way it
ends; a cancellation that arrives meanwhile waits until `release` is through. `release` has `RELEASE_TIMEOUT` seconds;
one that takes longer, or fails, is logged, and its trajectory goes on. (One thing cuts a release short: the end of the
event loop, which cancels all that is still running in it.)

A tool's code can't pass for something else: if it ends with `sys.exit` or a cancellation of its own making, that is an
error of this one call, not the end of the process or of the trajectory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from inspect import isawaitable
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import uuid4

from toolroll.errors import DuplicateInstance, InfraFault, ToolContractError
from toolroll.tools.base_tool import BaseTool, ToolResult, as_result, as_reward

T = TypeVar("T")

logger = logging.getLogger(__name__)

RELEASE_TIMEOUT = 10.0
"""Seconds that `release` may take."""


class ToolInstance:
    """One trajectory's share of a tool.

    async with ToolInstance(tool, create_kwargs={"ground_truth": "72"}) as instance:
        response, reward, metrics = await instance.execute({"answer": "72"})
        final = await instance.calc_reward()
    """

    def __init__(
        self,
        tool: BaseTool[Any],
        instance_id: str | None = None,
        *,
        create_kwargs: Mapping[str, Any] | None = None,
        release_kwargs: Mapping[str, Any] | None = None,
        release_timeout: float = RELEASE_TIMEOUT,
    ) -> None:
        self.tool = tool
        # Chosen here and not by the tool, so that a create that is cut short can be released too.
        self.id = instance_id or str(uuid4())
        self._create_kwargs = create_kwargs or {}
        self._release_kwargs = release_kwargs or {}
        self._release_timeout = release_timeout
        self._open = False
        self._releasing: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether it was created, and not released yet."""
        return self._open

    async def __aenter__(self) -> Self:
        if self._open or self._releasing is not None:
            raise ToolContractError(
                f"Instance {self.id!r} of tool {self.tool.name!r} was begun before: make a new one."
            )
        try:
            made: Any = await _own_end(self.tool.create(self.id, **self._create_kwargs))
            # Early tools return the id alone, and a tool may insist on an id of its own.
            chosen = made[0] if isinstance(made, tuple) and made else made
            self.id = chosen if chosen and isinstance(chosen, str) else self.id
        except DuplicateInstance:
            raise
        except BaseException as error:
            await self._close()
            if isinstance(error, InfraFault) or not isinstance(error, Exception):
                raise
            raise InfraFault(f"Creating an instance of tool {self.tool.name!r} failed: {_say(error)}") from error
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def execute(self, arguments: str | Mapping[str, Any] | None, **kwargs: Any) -> ToolResult:
        """Check the arguments, as text or parsed, and carry out one call. Whose an exception is, `fault_of` says."""
        self._check_open()
        parameters = self.tool.arguments.parse(arguments)
        return as_result(self.tool.name, await _own_end(self.tool.execute(self.id, parameters, **kwargs)))

    async def calc_reward(self, **kwargs: Any) -> float:
        """The tool's reward for the whole trajectory.

        The model has no part in it, so a failure is the infrastructure's.
        """
        self._check_open()
        try:
            return as_reward(self.tool.name, await _own_end(self.tool.calc_reward(self.id, **kwargs)))
        except InfraFault:
            raise
        except Exception as error:
            raise InfraFault(f"calc_reward of tool {self.tool.name!r} failed: {_say(error)}") from error

    def _check_open(self) -> None:
        if not self._open:
            what = "not begun yet: use it in `async with`" if self._releasing is None else "released already"
            raise ToolContractError(f"Instance {self.id!r} of tool {self.tool.name!r} is {what}.")

    async def _close(self) -> None:
        """Release, and wait for it. A cancellation is kept back until the release has ended or run out of time."""
        self._open = False
        release = self._releasing = asyncio.create_task(self._release(), name=f"release {self.tool.name} {self.id}")
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._release_timeout
        cancelled: asyncio.CancelledError | None = None
        while not release.done() and (left := deadline - clock()) > 0:
            try:
                await asyncio.wait({release}, timeout=left)
            except asyncio.CancelledError as error:
                cancelled = error
        if not release.done():
            release.cancel()
            logger.warning(
                "release of tool %r, instance %s, took more than %g s and was given up",
                self.tool.name,
                self.id,
                self._release_timeout,
            )
        if cancelled is not None:
            raise cancelled

    async def _release(self) -> None:
        try:
            await _own_end(self.tool.release(self.id, **self._release_kwargs))
        except Exception:
            logger.warning("release of tool %r, instance %s, failed", self.tool.name, self.id, exc_info=True)


async def _own_end(call: Awaitable[T]) -> T:
    """What a tool's own code gives. Its `sys.exit`, or a cancellation that nobody asked this task for, is an error."""
    if not isawaitable(call):
        raise ToolContractError("create, execute, calc_reward and release of a tool must be `async def`.")
    try:
        return await call
    except SystemExit as error:
        raise RuntimeError(f"the tool called sys.exit({error.code!r})") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("the tool was cancelled from within") from error


def _say(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
