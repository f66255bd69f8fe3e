"""Worker: one process's share of the work. It takes as many pieces as it has room for, and commits what comes of them.

    worker = Worker(board, carry_out, commit, capacity=1024)
    await worker.run()

`carry_out` may take as long as it likes. `commit` makes what came of it count (writes it to disk, say), and is called
only while this worker is sure that the piece is its own; what it gives is told to the board. Promises:

- A piece is committed once, or given up. A worker that the board couldn't be reached from for too long gives up all
  that it has, and begins anew under another name: others have its pieces by then.
- A word to the board that is lost on the way is said again, and counts once.
- What `commit` or `carry_out` raises ends the worker: it would go wrong for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar
from uuid import uuid4

from toolroll.rollout.dispatch import LEASE, Key, Piece, Tenure

T = TypeVar("T")
R = TypeVar("R")

logger = logging.getLogger(__name__)

HEARTBEAT = LEASE / 5
"""Seconds after which a worker that has nothing to say says so."""
AGAIN = 0.5
"""Seconds before a board that couldn't be reached is asked again."""
GOODBYE = 5.0
"""Seconds that a worker takes at the most to say goodbye; without it, it is missed after its lease."""


@dataclass(frozen=True)
class Orders(Generic[T]):
    """What the board answers."""

    pieces: list[Piece[T]]
    is_over: bool
    """There will be no more."""
    pace: float
    """Seconds between two words of a worker, at the least."""


class BoardUnreachable(Exception):
    """The board couldn't be asked, or didn't answer. It may have heard what was said."""


class Board(Protocol[T]):
    """Where workers get pieces, and tell what they did."""

    async def join(self, worker: str) -> None:
        """Begin, under a name that nobody had before."""
        ...

    async def exchange(self, worker: str, number: int, done: list[tuple[Key, Any]], want: int) -> Orders[T] | None:
        """Tell what was done, and ask for more. The same `number` again gets the same answer, and counts once.

        None: this worker was lost, and what it has is others'. Raises BoardUnreachable.
        """
        ...

    async def leave(self, worker: str) -> None:
        """Say goodbye. What it has is given to others at once."""
        ...


class Worker(Generic[T]):
    """Carries pieces out, as many at once as there is room for."""

    def __init__(
        self,
        board: Board[T],
        carry_out: Callable[[T], Awaitable[Any]],
        commit: Callable[[str, T, Any], Awaitable[Any]],
        *,
        capacity: int,
        name: str = "worker",
    ) -> None:
        self.board = board
        self.carry_out = carry_out
        self.commit = commit
        self.capacity = capacity
        self._base = name

    async def run(self) -> None:
        """Work until there is nothing left."""
        while True:
            name = f"{self._base}-{uuid4().hex[:8]}"
            try:
                return await _Life(self, name).live()
            except _CutOff:
                logger.warning("%s was cut off for too long. What it had is others' now; it begins anew.", name)


class _CutOff(Exception):
    """The board can't be reached, or has given up on this worker."""


class _Life(Generic[T]):
    """A worker under one name, until it ends or is lost."""

    def __init__(self, worker: Worker[T], name: str) -> None:
        self._worker = worker
        self._name = name
        self._number = 0
        self._tenure = Tenure(time.monotonic())
        self._running: set[asyncio.Task[None]] = set()
        self._committing: set[asyncio.Task[None]] = set()
        self._done: list[tuple[Key, Any]] = []
        self._news = asyncio.Event()
        self._failure: BaseException | None = None

    async def live(self) -> None:
        """Work until there is nothing left. Raises _CutOff."""
        try:
            await self._insist(lambda: self._worker.board.join(self._name))
            while not await self._exchange():
                if self._failure is not None:
                    raise self._failure
        finally:
            await self._wind_up()

    async def _exchange(self) -> bool:
        """Tell what was done, begin what there is to do, and wait for news. Whether all is over."""
        self._news.clear()
        told = list(self._done)
        self._number += 1
        number, want = self._number, self._worker.capacity - len(self._running)
        orders = await self._insist(lambda: self._worker.board.exchange(self._name, number, told, want))
        if orders is None:
            raise _CutOff
        del self._done[: len(told)]  # not before: who is stopped over it says it again
        for piece in orders.pieces:
            task = asyncio.create_task(self._carry(piece))
            self._running.add(task)
            task.add_done_callback(self._end)
        if orders.is_over and not self._running and not self._done:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(HEARTBEAT, orders.pace)):
                await asyncio.sleep(orders.pace)
                await self._news.wait()
        return False

    async def _insist(self, ask: Callable[[], Awaitable[R]]) -> R:
        """Ask until there is an answer, or it is too late for one."""
        while True:
            sent = time.monotonic()
            try:
                async with asyncio.timeout(LEASE):
                    answer = await ask()
            except (BoardUnreachable, TimeoutError) as error:
                logger.debug("%s can't reach the board: %s", self._name, error)
                if not self._tenure.holds(time.monotonic()):
                    raise _CutOff from None
                await asyncio.sleep(AGAIN)
            else:
                self._tenure.renewed(sent)
                return answer

    async def _carry(self, piece: Piece[T]) -> None:
        result = await self._worker.carry_out(piece.work)
        if self._tenure.holds(time.monotonic()):
            task = asyncio.current_task()
            assert task is not None
            self._committing.add(task)
            self._done.append((piece.key, await self._worker.commit(self._name, piece.work, result)))

    def _end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._committing.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._failure = self._failure or error
        self._news.set()

    async def _wind_up(self) -> None:
        """Give up what runs, but end what is being committed: of that the board must know before others begin it."""
        running = list(self._running)
        for task in self._running - self._committing:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        with contextlib.suppress(BoardUnreachable, TimeoutError):
            async with asyncio.timeout(GOODBYE):
                if self._done:
                    await self._worker.board.exchange(self._name, self._number + 1, self._done, 0)
                await self._worker.board.leave(self._name)
