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
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from toolroll.errors import ConfigError, ToolrollError
from toolroll.records.append_file import AppendFile
from toolroll.records.directory import SUFFIX
from toolroll.records.json_line import encode
from toolroll.records.line import UNKNOWN, Decode, fields_of, foreign_fields

if TYPE_CHECKING:
    from toolroll.rollout.trajectory import Trajectory

AT_ONCE = 64
"""Lines that are written together at the most, where many wait."""
BYTES_AT_ONCE = 4 * 1024 * 1024
"""Nor more than this, but for a single line."""
OPEN_FILES = 8
"""Steps that are written at the same time are few."""


class WriterClosed(ToolrollError):
    """Something was to be written by a RecordWriter that was closed before."""


class _Waiting(NamedTuple):
    """A sample, and who waits for it to be written."""

    sample: Trajectory | Mapping[str, Any]
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
        self._waiting: SimpleQueue[_Waiting | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def write(self, sample: Trajectory | Mapping[str, Any], step: int, *, gts: Any = UNKNOWN) -> None:
        """Write a trajectory, without keeping the event loop from anything else.

        Args:
            sample: A trajectory, or what is to be written of something else: verl's keys, and any others.
            step: The trainer's step.
            gts: The ground truth; by default the prompt's `ground_truth`, or its `reward_model.ground_truth`.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._start()
        self._waiting.put(_Waiting(sample, operator.index(step), gts, loop, done))
        await done

    def append(self, sample: Trajectory | Mapping[str, Any], step: int, *, gts: Any = UNKNOWN) -> None:
        """The same for code that has no event loop: it returns when it was written."""
        line = self._line(sample, operator.index(step), gts)
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

    def _line(self, sample: Trajectory | Mapping[str, Any], step: int, gts: Any) -> bytes:
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

    def _start(self) -> None:
        """Have the thread run. A forked process has none until it writes."""
        with self._starting:
            if self._closed:
                raise WriterClosed(f"The writer of {self.directory} was closed already.")
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name=f"records of {self.directory}", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while (first := self._waiting.get()) is not None:
            ready: list[tuple[_Waiting, bytes]] = []
            one: _Waiting | None = first
            while one is not None:
                try:
                    ready.append((one, self._line(one.sample, one.step, one.gts)))
                except Exception as error:  # of the user's decode, for instance: it is the caller's
                    _settle([(one, error)])
                if len(ready) >= AT_ONCE or sum(len(line) for _, line in ready) >= BYTES_AT_ONCE:
                    break
                try:
                    one = self._waiting.get_nowait()
                except Empty:
                    break
            self._write(ready)
            if one is None:
                return

    def _write(self, ready: list[tuple[_Waiting, bytes]]) -> None:
        by_step: dict[int, list[tuple[_Waiting, bytes]]] = {}
        for waiting, line in ready:
            by_step.setdefault(waiting.step, []).append((waiting, line))
        for step, some in by_step.items():
            with self._writing:
                written, error = self._file(step).append([line for _, line in some])
            _settle([(waiting, None if place < written else error) for place, (waiting, _) in enumerate(some)])


def _settle(results: list[tuple[_Waiting, Exception | None]]) -> None:
    """Tell those who wait, each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Waiting, Exception | None]]] = {}
    for waiting, error in results:
        by_loop.setdefault(waiting.loop, []).append((waiting, error))
    for loop, some in by_loop.items():
        try:
            loop.call_soon_threadsafe(_tell, some)
        except RuntimeError:  # it was closed, and nobody waits any more
            continue


def _tell(results: list[tuple[_Waiting, Exception | None]]) -> None:
    for waiting, error in results:
        if waiting.done.done():
            continue
        if error is None:
            waiting.done.set_result(None)
        elif isinstance(error, OSError):  # each has one of its own to raise
            waiting.done.set_exception(OSError(error.errno, error.strerror, error.filename))
        else:
            waiting.done.set_exception(error)
