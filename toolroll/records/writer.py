"""Write trajectories to disk as they end.

    async with RecordWriter("dumps", decode=tokenizer.decode) as writer:
        async for trajectory in rollout.run(prompts, n=8):
            await writer.write(trajectory, step)

Invariants:

- When `write` or `append` returns, the operating system has the line: it survives the death of the process. A process
  that is killed earlier leaves at most one incomplete line, which all readers skip.
- Any number of coroutines, event loops and threads may write at the same time. Lines are never interleaved.
- The event loop never waits for a tokenizer or a disk: a thread encodes and writes the lines. Callers wait for their
  own samples, so a slow disk slows the callers down and no backlog grows.
- An error that prevents a line from being written (a full disk, a directory that cannot be created) is raised in its
  caller. The next line is tried again.
- A cancelled write is done completely or not at all.

Processes that write at the same time each need a `writer` name, which gives them separate directories.
"""

from __future__ import annotations

import asyncio
import operator
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Union

from toolroll.errors import ConfigError, ToolrollError
from toolroll.images import Image, images_of
from toolroll.records.append_file import AppendFile
from toolroll.records.directory import DUMP_SUFFIX, StrPath
from toolroll.records.image_directory import IMAGES_NAME, ImageDirectory
from toolroll.records.json_line import encode
from toolroll.records.line import NOT_GIVEN, Decode, mapping_fields, trajectory_fields

if TYPE_CHECKING:
    from toolroll.rollout.trajectory import Trajectory

FLUSH_BYTES = 96 * 1024
"""Size of the pending lines at which they are written. The C library returns larger blocks of memory to the system each
time, which takes longer than writing."""
MAX_OPEN_FILES = 8

Sample = Union["Trajectory", Mapping[str, Any]]


class WriterClosed(ToolrollError):
    """Raised when a closed `RecordWriter` is used."""


class RecordWriter:
    r"""Writes trajectories to `{rollout_data_dir}/{step}.jsonl`, or `{rollout_data_dir}/{writer}/{step}.jsonl`.

    Their images are written to `{rollout_data_dir}/images`, each once.

    Use it as a context manager (`with` or `async with`), or call `close` at the end.

    Args:
        rollout_data_dir: Directory to write to. It is created if necessary.
        writer: Name of this process, required if several processes write at the same time.
        decode: Function that converts token ids to text, for example `tokenizer.decode`. Without it, `input` and
            `output` are composed from the messages.
        tokens: Whether to write ids, mask and log-probabilities, which are about half of a line.
        guard: Returns a context manager for each write, for example one that holds a lock. If it raises, nothing is
            written, and the caller gets the exception.

    Raises:
        ConfigError: If the directory cannot be created, or if `writer` is not a valid name.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with RecordWriter(directory) as writer:
        ...         writer.append({"output": "42", "score": 1.0}, step=7)
        ...     Path(directory, "7.jsonl").read_text()
        '{"input":"","output":"42","gts":null,"score":1.0,"step":7}\n'
    """

    def __init__(
        self,
        rollout_data_dir: StrPath,
        *,
        writer: str | None = None,
        decode: Decode | None = None,
        tokens: bool = True,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        if writer and (Path(writer).name != writer or writer.startswith(".") or writer.endswith(DUMP_SUFFIX)):
            raise ConfigError(f"writer={writer!r} is not a valid directory name. Use a name like 'rank-0'.")
        self.directory = Path(rollout_data_dir) / (writer or "")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"Cannot create the rollout_data_dir {self.directory}: {error.strerror}.") from error
        self._images = ImageDirectory(Path(rollout_data_dir) / IMAGES_NAME)
        self._decode = decode
        self._tokens = tokens
        self._guard = guard
        self._files: dict[int, AppendFile] = {}
        self._file_lock = threading.Lock()
        self._state_lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._executor_pid = 0
        self._requests: list[tuple[Callable[[], None], Future[None]]] = []
        self._closed = False

    async def write(self, sample: Sample, step: int, *, gts: Any = NOT_GIVEN) -> None:
        """Write a sample without blocking the event loop.

        Args:
            sample: A trajectory, or a mapping with the fields of another sample: verl's keys and any others.
            step: The trainer's step.
            gts: Ground truth. Defaults to the prompt's `ground_truth`, or its `reward_model.ground_truth`.

        Raises:
            OSError: If the line cannot be written.
            WriterClosed: If the writer is closed.
            Exception: Any exception of `decode`.
        """
        await self._write_in_thread([sample], step, gts)

    async def write_all(self, samples: Sequence[Sample], step: int) -> None:
        """Write several samples, for example the batch of a step, without blocking the event loop.

        Args:
            samples: Trajectories or mappings, as for `write`.
            step: The trainer's step.

        Raises:
            OSError: If a line cannot be written. The lines before it are written.
            WriterClosed: If the writer is closed.
            Exception: Any exception of `decode`. The lines before it are written.
        """
        await self._write_in_thread(samples, step, NOT_GIVEN)

    def append(self, sample: Sample, step: int, *, gts: Any = NOT_GIVEN) -> None:
        """Write a sample in the calling thread, for code without an event loop.

        Args:
            sample: A trajectory or a mapping, as for `write`.
            step: The trainer's step.
            gts: Ground truth, as for `write`.

        Raises:
            OSError: If the line cannot be written.
            WriterClosed: If the writer is closed.
            Exception: Any exception of `decode`.
        """
        step = operator.index(step)
        line, images = self._line(sample, step, gts), _images(sample)
        with self._file_lock, self._guard():
            self._raise_if_closed()
            self._images.add(images)
            file = self._file(step)
            file.close_if_moved()
            file.append([line])

    def close(self) -> None:
        """Wait until all accepted samples are written, and close the files. Does nothing if already closed."""
        with self._state_lock:
            self._closed = True
        if self._executor is not None:
            self._executor.shutdown()
        with self._file_lock:
            while self._files:
                self._files.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.close)

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise WriterClosed(f"The RecordWriter of {self.directory} is closed. Create another one.")

    def _line(self, sample: Sample, step: int, gts: Any) -> bytes:
        if isinstance(sample, Mapping):
            return encode(mapping_fields(sample, step, gts))
        return encode(trajectory_fields(sample, step, gts=gts, decode=self._decode, tokens=self._tokens))

    def _file(self, step: int) -> AppendFile:
        file = self._files.pop(step, None) or AppendFile(self.directory / f"{step}{DUMP_SUFFIX}")
        self._files[step] = file  # the last one is the most recently used
        if len(self._files) > MAX_OPEN_FILES:
            self._files.pop(next(iter(self._files))).close()
        return file

    async def _write_in_thread(self, samples: Sequence[Sample], step: int, gts: Any) -> None:
        write = partial(self._write, samples, operator.index(step), gts)
        done: Future[None] = Future()
        with self._state_lock:
            self._raise_if_closed()
            if self._executor is None or self._executor_pid != os.getpid():  # a forked process does not have the thread
                self._executor = ThreadPoolExecutor(1, f"RecordWriter of {self.directory}")
                self._executor_pid, self._requests = os.getpid(), []
            self._requests.append((write, done))
            if len(self._requests) == 1:
                self._executor.submit(self._handle_requests)
        await asyncio.wrap_future(done)

    def _handle_requests(self) -> None:
        """Write all waiting requests, and only then wake their event loops, which would compete for the interpreter."""
        with self._state_lock:
            requests, self._requests = self._requests, []
        notifications: list[Callable[[], None]] = []
        for write, done in requests:
            if done.set_running_or_notify_cancel():
                try:
                    write()
                    notifications.append(partial(done.set_result, None))
                except Exception as error:  # for example from the user's `decode`
                    notifications.append(partial(done.set_exception, error))
        for notify in notifications:
            notify()

    def _write(self, samples: Sequence[Sample], step: int, gts: Any) -> None:
        lines: list[bytes] = []
        images: list[Image] = []
        size = 0
        self._close_if_moved(step)
        try:
            for sample in samples:
                lines.append(self._line(sample, step, gts))
                images += _images(sample)
                size += len(lines[-1])
                if size >= FLUSH_BYTES:
                    ready, lines, size = lines, [], 0
                    self._append_lines(ready, images, step)
                    images = []
        finally:  # the lines before the one that failed are written
            if lines:
                self._append_lines(lines, images, step)

    def _close_if_moved(self, step: int) -> None:
        """Check the file of a step, once for all samples of a request, as it takes a tenth of the time of a write."""
        with self._file_lock:
            if (file := self._files.get(step)) is not None:
                file.close_if_moved()

    def _append_lines(self, lines: Sequence[bytes], images: Sequence[Image], step: int) -> None:
        with self._file_lock, self._guard():
            self._images.add(images)  # first, so that a line never refers to a file that does not exist
            self._file(step).append(lines)


def _images(sample: Sample) -> list[Image]:
    """Return the images of a trajectory, including those of calls whose responses were not shown."""
    if isinstance(sample, Mapping):
        return []
    return [*images_of(sample.messages), *(image for call in sample.calls for image in call.images)]
