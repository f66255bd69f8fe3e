"""RecordWriter: puts trajectories on disk as they end.

    async with RecordWriter("dumps", decode=tokenizer.decode) as writer:
        async for trajectory in rollout.run(prompts, n=8):
            await writer.write(trajectory, step)

It promises:

- When `write` or `append` returns, the line was handed to the operating system: killed then, the process leaves it
  whole. Killed before, it leaves at most one half line, which every reader here steps over.
- Any number of coroutines, of any number of event loops, and threads may write at once. No line is mixed with another.
- The event loop never waits for a tokenizer or a disk: a thread makes and writes the lines. What waits for it is held
  by those who wait, so a slow disk slows the callers down, and no backlog grows beside them.
- What keeps a line from being written (a full disk, a directory that can't be made) is raised to whoever wrote it, and
  the next one is tried anew.
- A write that is cancelled may be there or not; it isn't half.

Processes that write at the same time each name a `writer`, and have a directory of their own.
"""

from __future__ import annotations

import asyncio
import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Union

from toolroll.errors import ConfigError, ToolrollError
from toolroll.records.append_file import AppendFile
from toolroll.records.directory import SUFFIX
from toolroll.records.json_line import encode
from toolroll.records.line import UNKNOWN, Decode, fields_of, foreign_fields

if TYPE_CHECKING:
    from toolroll.rollout.trajectory import Trajectory

AT_ONCE = 64
"""Of those who wait, whose lines are written together at the most."""
BYTES_AT_ONCE = 96 * 1024
"""Then it is time to write. The C library gives larger memory back to the system each time, which takes longer than
writing."""
OPEN_FILES = 8
"""Steps that are written at the same time are few."""


Sample = Union["Trajectory", Mapping[str, Any]]
_Lines = list[tuple[int, bytes]]
"""Each with the place of whom it is from."""


class WriterClosed(ToolrollError):
    """Something was to be written by a RecordWriter that was closed before."""


class _Batch(NamedTuple):
    """Samples, and who waits for them to be written."""

    samples: Sequence[Sample]
    step: int
    gts: Any
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]


class RecordWriter:
    """Writes to `{rollout_data_dir}/{step}.jsonl`, or to `{rollout_data_dir}/{writer}/{step}.jsonl`.

    Args:
        rollout_data_dir: Where to. It is made if it isn't there.
        writer: This process's name among several that write at the same time.
        decode: What makes text of ids, e.g. `tokenizer.decode`. Without it the text is put together from the messages.
        tokens: Whether ids, mask and log-probabilities are written, which is about half of a line.
    """

    def __init__(
        self,
        rollout_data_dir: str | os.PathLike[str],
        *,
        writer: str | None = None,
        decode: Decode | None = None,
        tokens: bool = True,
    ) -> None:
        if writer is not None and (Path(writer).name != writer or writer.startswith(".") or writer.endswith(SUFFIX)):
            raise ConfigError(f"writer={writer!r} can't be the name of a directory. Take one like 'rank-0'.")
        self.directory = Path(rollout_data_dir) / (writer or "")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"The rollout_data_dir {self.directory} can't be made: {error.strerror}.") from error
        self._decode = decode
        self._tokens = tokens
        self._files: OrderedDict[int, AppendFile] = OrderedDict()
        self._writing = threading.Lock()
        self._starting = threading.Lock()
        self._waiting: SimpleQueue[_Batch | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def write(self, sample: Sample, step: int, *, gts: Any = UNKNOWN) -> None:
        """Write a trajectory, without keeping the event loop from anything else.

        Args:
            sample: A trajectory, or what is to be written of something else: verl's keys, and any others.
            step: The trainer's step.
            gts: The ground truth; by default the prompt's `ground_truth`, or its `reward_model.ground_truth`.
        """
        await self._write_in_thread([sample], step, gts)

    async def write_all(self, samples: Sequence[Sample], step: int) -> None:
        """The same for many at once, e.g. a step's whole batch. Where one fails, those before it are written."""
        await self._write_in_thread(samples, step, UNKNOWN)

    def append(self, sample: Sample, step: int, *, gts: Any = UNKNOWN) -> None:
        """The same for code that has no event loop: it returns when it was written."""
        step = operator.index(step)
        line = self._line(sample, step, gts)
        with self._writing:
            if self._closed:
                raise WriterClosed(f"The writer of {self.directory} was closed already.")
            _, error = self._file(step).append([line])
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait until what was begun is written, and close the files."""
        with self._starting:
            closed, self._closed = self._closed, True
            if self._thread is not None and not closed:
                self._waiting.put(None)
        if self._thread is not None:
            self._thread.join()
        with self._writing:
            while self._files:
                self._files.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *why: object) -> None:
        await asyncio.to_thread(self.close)

    def _line(self, sample: Sample, step: int, gts: Any) -> bytes:
        if isinstance(sample, Mapping):
            return encode(foreign_fields(sample, step, gts))
        return encode(fields_of(sample, step, gts=gts, decode=self._decode, tokens=self._tokens))

    def _file(self, step: int) -> AppendFile:
        if step in self._files:
            self._files.move_to_end(step)
        else:
            self._files[step] = AppendFile(self.directory / f"{step}{SUFFIX}")
            if len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)[1].close()
        return self._files[step]

    # The thread

    async def _write_in_thread(self, samples: Sequence[Sample], step: int, gts: Any) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        batch = _Batch(samples, operator.index(step), gts, loop, done)
        with self._starting:
            if self._closed:
                raise WriterClosed(f"The writer of {self.directory} was closed already.")
            if self._thread is None or not self._thread.is_alive():  # a forked process has none
                self._thread = threading.Thread(target=self._work, name=f"records of {self.directory}", daemon=True)
                self._thread.start()
            self._waiting.put(batch)
        await done

    def _work(self) -> None:
        """What waits is written together: one write, and one word to each event loop, for all of it."""
        last = False
        while not last:
            batches = [self._waiting.get()]
            while len(batches) < AT_ONCE and batches[-1] is not None and not self._waiting.empty():
                batches.append(self._waiting.get())
            last = batches[-1] is None
            some = [batch for batch in batches if batch is not None]
            try:
                _settle(some, self._write(some))
            except Exception as error:  # no fault of ours may leave them waiting
                _settle(some, [error] * len(some))

    def _write(self, batches: list[_Batch]) -> list[Exception | None]:
        """What kept each of them from being written."""
        failed: list[Exception | None] = [None] * len(batches)
        lines: dict[int, _Lines] = {}
        size = 0
        for place, (samples, step, gts, *_) in enumerate(batches):
            try:
                for sample in samples:
                    line = self._line(sample, step, gts)
                    lines.setdefault(step, []).append((place, line))
                    size += len(line)
                    if size >= BYTES_AT_ONCE:
                        self._flush(lines, failed)
                        size = 0
                        if failed[place]:
                            break
            except Exception as error:  # of the user's decode, for instance: it is the caller's
                failed[place] = failed[place] or error
        self._flush(lines, failed)
        return failed

    def _flush(self, lines: dict[int, _Lines], failed: list[Exception | None]) -> None:
        """Write these lines, and note whose weren't."""
        for step, some in lines.items():
            with self._writing:
                written, error = self._file(step).append([line for _, line in some])
            for place, _ in some[written:]:
                failed[place] = failed[place] or error
        lines.clear()


def _settle(batches: list[_Batch], failed: Sequence[Exception | None]) -> None:
    """Tell those who wait, each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Batch, Exception | None]]] = {}
    for batch, error in zip(batches, failed, strict=True):
        by_loop.setdefault(batch.loop, []).append((batch, error))
    for loop, some in by_loop.items():
        try:
            loop.call_soon_threadsafe(_tell, some)
        except RuntimeError:  # it was closed, and nobody waits any more
            continue


def _tell(results: list[tuple[_Batch, Exception | None]]) -> None:
    for batch, error in results:
        if batch.done.done():
            continue
        if error is None:
            batch.done.set_result(None)
        elif isinstance(error, OSError):  # each has one of its own to raise
            batch.done.set_exception(OSError(error.errno, error.strerror, error.filename))
        else:
            batch.done.set_exception(error)
