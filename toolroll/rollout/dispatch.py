"""Dispatch: who works on what, of a stream of work without end. Pure: time is passed in.

Workers pull. Each says now and then what it has done and how much it could take, and is given that; no piece waits in a
worker's queue, so a slow one holds up nothing but what it works on itself. Promises:

- Pieces go out in the order of the source. What a lost worker had goes out again before anything new.
- A piece is one worker's at a time, and counts once: what comes from a worker that it isn't any more is refused.
- A worker that hasn't been heard of for a lease is lost. It may still run, cut off: it commits nothing after `STOP_AT`
  of the lease since it last asked successfully (`Tenure`), so nothing that it does later meets what others do.
- When the source is at its end, no worker takes more than its share of what is left.
- Of the source no more is read than was asked for, and `AHEAD` pieces to see its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

LEASE = 10.0
"""Seconds without a word after which a worker is lost."""
AHEAD = 10_000
"""Pieces that are read ahead at the most, to see whether the source ends."""
STOP_AT = 0.9
"""The part of a lease after which a worker commits nothing: the rest is for clocks that don't run alike."""

Key = Hashable
T = TypeVar("T")


@dataclass(frozen=True)
class Piece(Generic[T]):
    """A piece of work. Its key is its own."""

    key: Key
    work: T


@dataclass(frozen=True)
class Lost(Generic[T]):
    """A worker that was lost, and what it had. Who finds out what it had done by then says so by `settle`."""

    worker: str
    pieces: list[Piece[T]]


@dataclass
class _Worker(Generic[T]):
    heard: float
    holds: dict[Key, Piece[T]] = field(default_factory=dict)


class Dispatch(Generic[T]):
    """Hands out the pieces of a source.

    >>> dispatch = Dispatch(iter([Piece(1, "one"), Piece(2, "two")]))
    >>> dispatch.join("a", now=0.0)
    >>> [piece.work for piece in dispatch.take("a", 2, now=0.0)]
    ['one', 'two']
    >>> dispatch.done("a", 1), dispatch.done("a", 1), dispatch.is_over
    (True, False, False)
    """

    def __init__(self, source: Iterator[Piece[T]], *, workers: int = 1, lease: float = LEASE) -> None:
        self._source = source
        self._expected = workers
        self._lease = lease
        self._ahead: deque[Piece[T]] = deque()
        """Read, and nobody's: what was lost, then what was read to see whether the source ends."""
        self._is_read = False
        self._workers: dict[str, _Worker[T]] = {}
        self._unsettled: dict[str, list[Piece[T]]] = {}
        self.in_hand = 0
        """Pieces that workers have."""

    @property
    def is_over(self) -> bool:
        """Whether all was done, and nothing can come back."""
        return self._is_read and not (self._ahead or self._unsettled or self.in_hand)

    @property
    def workers(self) -> list[str]:
        """Those that aren't lost."""
        return list(self._workers)

    def add(self, pieces: Iterable[Piece[T]]) -> None:
        """More work, behind what is there."""
        self._ahead.extend(pieces)

    def holds(self, worker: str) -> int:
        """How many pieces a worker has."""
        return len(self._workers[worker].holds) if worker in self._workers else 0

    def join(self, worker: str, now: float) -> None:
        """A new worker, under a name that nobody had before."""
        self._workers[worker] = _Worker(now)

    def heard(self, worker: str, now: float) -> bool:
        """A worker has said something. False: it is lost, and must begin anew under another name."""
        if worker not in self._workers:
            return False
        self._workers[worker].heard = now
        return True

    def take(self, worker: str, most: int, now: float) -> list[Piece[T]]:
        """Give a worker so many pieces, or as many as there are for it."""
        if not self.heard(worker, now):
            return []
        holds = self._workers[worker].holds
        self._read_ahead(most)
        if self._is_read:
            most = min(most, self._share() - len(holds))
        taken = [self._ahead.popleft() for _ in range(min(most, len(self._ahead)))]
        holds.update((piece.key, piece) for piece in taken)
        self.in_hand += len(taken)
        return taken

    def done(self, worker: str, key: Key) -> bool:
        """A worker has done a piece. False: it wasn't its own, and mustn't count."""
        if worker not in self._workers or self._workers[worker].holds.pop(key, None) is None:
            return False
        self.in_hand -= 1
        return True

    def leave(self, worker: str) -> None:
        """A worker says goodbye: what it has is nobody's."""
        if left := self._workers.pop(worker, None):
            self._ahead.extendleft(reversed(left.holds.values()))
            self.in_hand -= len(left.holds)

    def lose(self, now: float) -> list[Lost[T]]:
        """Those that have been silent for too long are lost from here on."""
        late = [name for name, worker in self._workers.items() if now - worker.heard > self._lease]
        lost = [Lost(name, list(self._workers.pop(name).holds.values())) for name in late]
        self._unsettled |= {one.worker: one.pieces for one in lost}
        self.in_hand -= sum(len(one.pieces) for one in lost)
        return lost

    def settle(self, worker: str, done: Iterable[Key]) -> None:
        """Of what a lost worker had, this was done after all. The rest goes to others."""
        known = set(done)
        again = [piece for piece in self._unsettled.pop(worker, []) if piece.key not in known]
        self._ahead.extendleft(reversed(again))

    def _share(self) -> int:
        """What each worker has at the most, of all that is left, when the end is in sight."""
        workers = max(self._expected, len(self._workers))
        return -(-(len(self._ahead) + self.in_hand) // workers)

    def _read_ahead(self, most: int) -> None:
        """Read what may be taken, and so much that the end is in sight before one worker has taken all that is left."""
        enough = max(most, min(most * max(self._expected, len(self._workers)), AHEAD))
        while not self._is_read and len(self._ahead) < enough:
            piece = next(self._source, None)
            if piece is None:
                self._is_read = True
            else:
                self._ahead.append(piece)


class Tenure:
    """A worker's side of its lease: whether what it does still counts."""

    def __init__(self, sent: float, lease: float = LEASE) -> None:
        self._lasts = lease * STOP_AT
        self._until = sent + self._lasts

    def renewed(self, sent: float) -> None:
        """It was heard, by what it sent then."""
        self._until = max(self._until, sent + self._lasts)

    def holds(self, now: float) -> bool:
        """Whether it may commit something now."""
        return now < self._until
