"""Alarms of a run, whose samples end in any order.

Samples that end early are short, and those that end last are long, so the samples of the last minutes are not
representative: at the start of a run none is truncated. For this reason the samples are counted in blocks of rows of
the data, and a block counts when all of its samples have ended.

A run that is resumed restores the counts of its complete steps with `BlockCounts.from_state`. A block may be in several
steps; it counts when the samples of all of them have ended.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import astuple, dataclass, field

from toolroll.records.stats.alarms import AlarmCounts, RunAlarms

BLOCK_SAMPLES = 256
"""Minimum number of samples in a block, except for the last block of the data."""
BLOCK_ROWS = 32
"""Minimum number of rows in a block, because the samples of a row resemble each other."""


@dataclass(slots=True)
class _OpenBlock:
    """Samples of one block that have ended."""

    ended: int = 0
    """Number of samples, including those of invalid rows."""
    counts: AlarmCounts = field(default_factory=AlarmCounts)


class BlockCounts:
    """Counts of the samples that have ended, in blocks of rows.

    Args:
        n: Number of samples per row.

    Attributes:
        rows_per_block: Number of rows in each block but the last one.
    """

    def __init__(self, n: int) -> None:
        self.rows_per_block = max(-(-BLOCK_SAMPLES // n), BLOCK_ROWS)
        self._n = n
        self._blocks: dict[int, _OpenBlock] = defaultdict(_OpenBlock)

    def numbers(self) -> list[int]:
        """Return the numbers of all blocks with samples, in ascending order."""
        return sorted(self._blocks)

    def block_of(self, row: int) -> int:
        """Return the block of a row."""
        return row // self.rows_per_block

    def add(self, row: int, counts: AlarmCounts) -> None:
        """Add the counts of a sample."""
        block = self._blocks[self.block_of(row)]
        block.counts.merge(counts)
        block.ended += 1

    def skip_row(self, row: int) -> None:
        """Add an invalid row, which has no samples."""
        self._blocks[self.block_of(row)].ended += self._n

    def merge(self, other: BlockCounts) -> None:
        """Add the counts of other samples."""
        for number, found in other._blocks.items():
            block = self._blocks[number]
            block.ended += found.ended
            block.counts.merge(found.counts)

    def is_complete(self, block: int, rows: int) -> bool:
        """Return True if all samples of a block with this number of rows have ended."""
        return block in self._blocks and self._blocks[block].ended >= rows * self._n

    def pop(self, block: int) -> AlarmCounts:
        """Remove a block and return its counts."""
        return self._blocks.pop(block).counts

    def state(self) -> list[list[int]]:
        """Return the counts as JSON."""
        return [[number, block.ended, *map(int, astuple(block.counts))] for number, block in self._blocks.items()]

    @classmethod
    def from_state(cls, n: int, state: list[list[int]]) -> BlockCounts:
        """Restore an instance from the result of `state()`. Raises TypeError or ValueError."""
        restored = cls(n)
        for number, ended, *counts in state:
            restored._blocks[number] = _OpenBlock(ended, AlarmCounts(*counts))
        return restored


class AlarmBlocks:
    """Counts the samples of a run in blocks of rows, and adds each complete block to the alarms.

    Args:
        n: Number of samples per row.

    Attributes:
        alarms: The alarms.
    """

    def __init__(self, n: int) -> None:
        self.alarms = RunAlarms(n)
        self._open = BlockCounts(n)
        self._rows: int | None = None
        """Number of rows of the data, once known."""

    def add(self, row: int, counts: AlarmCounts) -> None:
        """Add the counts of a sample."""
        self._open.add(row, counts)
        self._close(self._open.block_of(row))

    def skip_row(self, row: int) -> None:
        """Add an invalid row, which has no samples."""
        self._open.skip_row(row)
        self._close(self._open.block_of(row))

    def restore(self, counts: BlockCounts) -> None:
        """Add the counts of samples that an earlier process has recorded."""
        self._open.merge(counts)
        for block in counts.numbers():
            self._close(block)

    def end_data(self, rows: int) -> None:
        """Set the number of rows of the data, so that the last block, which may have fewer rows, can count."""
        self._rows = rows
        if rows:
            self._close(self._open.block_of(rows - 1))

    def _close(self, block: int) -> None:
        """Add a block to the alarms if all of its samples have ended."""
        rows = self._open.rows_per_block
        if self._rows is not None:
            rows = min(rows, self._rows - block * rows)
        if self._open.is_complete(block, rows):
            self.alarms.add(self._open.pop(block))
