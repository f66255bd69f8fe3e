"""WorkBoard: hands out the pieces of a source to workers that ask, and gathers what they tell.

It is a `Board` as a worker wants it, in one process with its workers or in an actor of its own. Dispatch decides; here
are the clock, the answers that may have to be given twice, and what is done about workers that are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from toolroll.rollout.dispatch import LEASE, Dispatch, Key, Lost, Piece
from toolroll.rollout.worker import HEARTBEAT, Orders

T = TypeVar("T")

logger = logging.getLogger(__name__)

QUICKEST = 0.02
"""Seconds between two words of one worker, at the least."""
WORDS = 1000
"""Words per second that the board hears at the most, of all workers together. An actor can take several times that."""


class WorkBoard(Generic[T]):
    """One source's board.

    Args:
        source: The pieces.
        heed: What is done with what workers tell of pieces that they did. Called once for each piece.
        done_by: Which pieces a lost worker had committed by then, though it never said so.
        workers: How many are expected.
        stays_open: Whether more work may come (`add`) when all is done.
    """

    def __init__(
        self,
        source: Iterator[Piece[T]],
        heed: Callable[[Key, Any], None],
        done_by: Callable[[Lost[T]], Awaitable[Sequence[tuple[Key, Any]]]] | None = None,
        *,
        workers: int = 1,
        stays_open: bool = False,
    ) -> None:
        self._dispatch = Dispatch(source, workers=workers)
        self._heed = heed
        self._done_by = done_by
        self._answers: dict[str, tuple[int, Orders[T]]] = {}
        self._stays_open = stays_open
        self._news = asyncio.Event()
        self.lost = 0
        """Workers that were lost."""

    async def join(self, worker: str) -> None:
        """Begin, under a name that nobody had before."""
        if worker not in self._dispatch.workers:
            self._dispatch.join(worker, time.monotonic())

    async def exchange(self, worker: str, number: int, done: list[tuple[Key, Any]], want: int) -> Orders[T] | None:
        """What was done, and what is to do. The same `number` again gets the same answer, and counts once."""
        now = time.monotonic()
        if not self._dispatch.heard(worker, now):
            return None
        known = self._answers.get(worker)
        if known is not None and known[0] == number:
            return known[1]
        for key, told in done:
            if self._dispatch.done(worker, key):
                self._heed(key, told)
        pieces = self._pieces(worker, want)
        if want and not pieces and not self._dispatch.holds(worker) and not self._ends:
            with contextlib.suppress(TimeoutError):  # it has nothing to do: it is told at once when there is
                async with asyncio.timeout(HEARTBEAT):
                    await self._news.wait()
            pieces = self._pieces(worker, want)
        pace = max(QUICKEST, len(self._dispatch.workers) / WORDS)
        orders = Orders(pieces, self._ends, pace)
        self._answers[worker] = number, orders
        return orders

    def add(self, pieces: Iterable[Piece[T]]) -> None:
        """More work."""
        self._dispatch.add(pieces)
        self._wake()

    async def leave(self, worker: str) -> None:
        """Say goodbye. What it has is given to others at once."""
        self._dispatch.leave(worker)
        self._answers.pop(worker, None)
        self._wake()

    async def watch(self) -> None:
        """See to workers that are lost, for as long as it runs."""
        while True:
            await asyncio.sleep(LEASE / 10)
            for lost in self._dispatch.lose(time.monotonic()):
                self.lost += 1
                self._answers.pop(lost.worker, None)
                logger.warning("%s was lost; %d pieces of its work go to others.", lost.worker, len(lost.pieces))
                done = await self._done_by(lost) if self._done_by else ()
                for key, told in done:
                    self._heed(key, told)
                self._dispatch.settle(lost.worker, [key for key, _ in done])
                self._wake()

    @property
    def _ends(self) -> bool:
        return self.is_over and not self._stays_open

    def _pieces(self, worker: str, want: int) -> list[Piece[T]]:
        return self._dispatch.take(worker, want, time.monotonic())

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether all was done."""
        return self._dispatch.is_over

    @property
    def in_hand(self) -> int:
        """Pieces that workers have."""
        return self._dispatch.in_hand

    @property
    def workers(self) -> int:
        """How many there are now."""
        return len(self._dispatch.workers)
