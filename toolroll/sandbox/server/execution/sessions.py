"""Sessions: Python interpreters that keep their variables between requests.

- A session runs one cell at a time, in order of arrival. `STOP_DELAY_S` after a cell, its processes are stopped until
  the next one.
- A cell that exceeds its timeout is interrupted, and the session survives. If the interrupt has no effect, the process
  is killed and the session ends.
- The process runs in its own jail. It is killed when it was idle for too long, when another session needs its place, or
  when the server stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import orjson

from toolroll.sandbox.protocol import CommandRunResult, CommandStatus
from toolroll.sandbox.server.execution import job
from toolroll.sandbox.server.execution.output import OutputReader
from toolroll.sandbox.server.execution.process_times import ProcessTimes
from toolroll.sandbox.server.execution.time_limit import TimeLimit, TimeVerdict
from toolroll.sandbox.server.hub.rejections import DeadlineExceeded, SessionBusy
from toolroll.sandbox.server.interpreter.zygote_handle import SandboxProcess, ZygoteHandle
from toolroll.sandbox.server.job_spec import is_supervised

INTERRUPT_TIMEOUT_S = 1.0
"""Time in which an interrupted cell must end."""
STOP_DELAY_S = 0.01
"""Time between the end of a cell and the stop of the session's processes. Cells that follow each other more quickly are
not delayed by stopping and resuming them."""
SUSPENDED_AFTER_S, MAX_SUSPENDED_CPU_S = 1.0, 0.1
"""Time after a cell from which a session is suspended, and the CPU time from which it has resumed itself."""
UNMEASURED_S = 0.01
"""Time of a cell after which the measurement of its CPU time starts. Most cells end earlier."""
MAX_REPLY_BYTES = 64 << 20
"""Maximum size of a reply. Displayed values are limited to 16 million characters of up to four bytes."""
MAX_REPLY_NODES = 4_000_000
"""Approximate limit on the number of JSON values in a reply, which bounds the cost of parsing it."""
MAX_REPLY_DEPTH = 64
"""Maximum nesting of a displayed value or an error."""
MAX_SESSION_WAITERS = 32
"""Maximum number of requests that wait for one session. They are not in the admission queue."""
_RECEIVE_BYTES = 1 << 20
_LENGTH = struct.Struct(">I")


@dataclass
class CellResult:
    """Result of one cell."""

    result: CommandRunResult
    display: list[dict[str, Any]]
    error: dict[str, Any] | None


class Session:
    """One interpreter, which runs one cell at a time. It is started in a child of a zygote.

    Args:
        process: Process of the interpreter.
        output_limit_bytes: Number of bytes to keep of each cell's stdout, and of its stderr.
        zygote: Zygote that starts the interpreter.
    """

    def __init__(self, process: SandboxProcess, output_limit_bytes: int, zygote: ZygoteHandle) -> None:
        self.process = process
        self.last_used = time.monotonic()
        self._is_supervised = is_supervised(zygote.plan, process.spec)
        self.own_time_s = 0.0
        """Own time of the cells of a notebook, which is not measured for other cells."""
        self._started = asyncio.Event()
        readers: list[OutputReader] = []
        try:
            for _ in range(2):
                readers.append(OutputReader(output_limit_bytes))  # noqa: PERF401 (all are closed if one fails)
            readers.append(OutputReader(job.report_limit_bytes(process.spec), watch=False))
            self._channel, child_channel = socket.socketpair()
        except OSError as error:
            for reader in readers:
                reader.close()
            process.failed(f"the interpreter of the session could not be started: {error}")
            raise job.JobFailed(process.failure) from error
        stdout, stderr, self._report = readers
        self._output = stdout, stderr
        self._channel.setblocking(False)
        self._is_receiving = True
        self._is_running_cell = False
        """Also True after a cell whose result reports the end of the session."""
        self._broke_protocol = False
        """Whether the program sent something else than one reply to a cell."""
        self._received = bytearray()
        self._reply: asyncio.Future[dict[str, Any] | None] | None = None
        """Reply to the current cell. None if the process ended or the reply is malformed."""
        self._stop_timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0
        self._idle_times: ProcessTimes | None = None
        """Times since a moment after `_idle_since`, when the session was suspended."""
        process.on_start = self._started.set
        process.exited.add_done_callback(lambda _: self._close())
        with child_channel:
            zygote.submit(process, b"", [*(reader.write_fd for reader in readers), child_channel.fileno()])
        for reader in readers:
            reader.close_write_end()
        asyncio.get_running_loop().add_reader(self._channel, self._receive)

    @property
    def has_ended(self) -> bool:
        """True if the process has exited or is being killed."""
        return self.process.exited.done() or self.process.kill_requested

    @property
    def crashed(self) -> bool:
        """True if the program ended the session between two cells. The end in a cell is part of the cell's result."""
        ended_by_itself = self.process.wait_status is not None and not self.process.kill_requested
        return not self._is_running_cell and (ended_by_itself or self._broke_protocol)

    def end(self) -> None:
        """Kill the interpreter."""
        self._report.resume()  # a supervisor sends the files before it ends, and would block
        self.process.kill()

    async def has_resumed_itself(self) -> bool:
        """Return True if the session has used CPU time since an earlier call, although no cell ran.

        A program can do so with a timer that sends SIGCONT.
        """
        idle_since = self.last_used
        if self.has_ended or time.monotonic() - idle_since < SUSPENDED_AFTER_S:
            return False
        if self._idle_times is None or self._idle_since != idle_since:
            self._idle_since = idle_since
            self._idle_times = await asyncio.to_thread(self._times)
            return False
        sample, _ = await asyncio.to_thread(self._idle_times.sample)
        return sample.cpu_s > MAX_SUSPENDED_CPU_S and self.last_used == idle_since

    def _times(self) -> ProcessTimes:
        return ProcessTimes(self.process, is_supervised=self._is_supervised, is_new=False)

    async def run(
        self,
        code: str,
        mode: str,
        timeout_s: float,
        max_elapsed_s: float | None = None,
        full_own_s: float | None = None,
    ) -> CellResult:
        """Run a cell. If the cell ends the session, that is a result, too. If the server fails, the session ends.

        Args:
            code: Source of the cell.
            mode: "script" or "notebook": how the interpreter reports errors and values.
            timeout_s: Timeout of the cell, which starts when the interpreter has started.
            max_elapsed_s: Maximum elapsed time of the cell.
            full_own_s: Own time from which a cell that reaches `max_elapsed_s` has timed out; see `TimeLimit`.

        Raises:
            JobFailed: If the server failed.
            InvalidProgram: If the interpreter cannot be started because of the content of the request.
        """
        self._is_running_cell = True
        try:
            return await self._run(code, mode, TimeLimit(timeout_s, max_elapsed_s, full_own_s))
        finally:
            self._is_running_cell = self.has_ended

    async def _run(self, code: str, mode: str, limit: TimeLimit) -> CellResult:
        await self._started.wait()
        started = time.monotonic()
        for reader in self._output:
            reader.resume()
        self._resume()
        future = self._reply = asyncio.get_running_loop().create_future()
        sending = self._send({"code": code, "mode": mode})
        try:
            verdict, times = await self._wait_or_interrupt(future, limit)
        finally:
            self._reply = None
            if sending:
                sending.cancel()
            self.last_used = time.monotonic()
            for reader in self._output:
                reader.pause()
        if verdict is TimeVerdict.STARVED:  # a retry runs the cell again, which must not find the changes of this run
            self.end()
            await asyncio.shield(self.process.exited)
            raise job.JobFailed(job.STARVED.format(seconds=time.monotonic() - started))
        is_answered = future.done()
        reply = future.result() if is_answered else None
        if reply is None:
            if is_answered:  # the channel was closed, usually because the interpreter ends by itself
                self._report.resume()
                await asyncio.wait([self.process.exited], timeout=job.KILL_DELAY_S)
            self.end()
            await asyncio.shield(self.process.exited)
            reply = {"exit": self._return_code()}
        else:
            self._stop_timer = asyncio.get_running_loop().call_later(STOP_DELAY_S, self.process.stop)
        run_time_s = time.monotonic() - started
        if mode == "notebook":
            self.own_time_s += times.sample()[0].own_s if times else run_time_s
        return self._cell_result(reply, run_time_s, timed_out=verdict is TimeVerdict.TIMEOUT)

    async def finish(self) -> tuple[dict[str, str], str]:
        """End the interpreter and fetch its files.

        Returns:
            The fetched files in base64, and a note about files that are too large to send.
        """
        if not self.process.spec["fetch"] or self.has_ended:
            self.end()
            return {}, ""
        self._resume()
        self._report.resume()
        with contextlib.suppress(OSError):  # already closed
            self._channel.shutdown(socket.SHUT_WR)
        await asyncio.wait([self.process.exited], timeout=job.FETCH_TIMEOUT_S)
        self.end()
        return job.fetched_files(job.report_messages(self._report.close()))

    async def _wait_or_interrupt(
        self, reply: asyncio.Future[Any], limit: TimeLimit
    ) -> tuple[TimeVerdict, ProcessTimes | None]:
        """Wait for the reply, and interrupt the cell when it exceeds the time limit.

        Returns:
            The verdict, and the times of the cell if they are measured.
        """
        done, _ = await asyncio.wait([reply], timeout=UNMEASURED_S)
        if done:
            return TimeVerdict.WITHIN_LIMIT, None
        times = self._times()
        wait_s = limit.first_check_s
        while True:
            done, _ = await asyncio.wait([reply], timeout=wait_s)
            if done or self.process.has_ended():
                return TimeVerdict.WITHIN_LIMIT, times
            sample, _ = times.sample()
            verdict = limit.check(sample)
            if verdict is not TimeVerdict.WITHIN_LIMIT:
                break
            wait_s = limit.until_next_check(sample)
        deadline = time.monotonic() + INTERRUPT_TIMEOUT_S
        while not done and time.monotonic() < deadline:
            self.process.interrupt()  # repeated, because Python can miss a signal just before a blocking call
            done, _ = await asyncio.wait([reply], timeout=INTERRUPT_TIMEOUT_S / 4)
        return verdict, times

    def _resume(self) -> None:
        """Resume the processes, or cancel their stop."""
        if self._stop_timer:
            self._stop_timer.cancel()
        self.process.resume()

    def _send(self, message: dict[str, Any]) -> asyncio.Task[None] | None:
        """Send a cell. Return the task that sends its rest, if it is larger than the buffer of the socket."""
        content = orjson.dumps(message)
        data, sent = _LENGTH.pack(len(content)) + content, 0
        if not self._is_receiving:  # the process has ended
            self._finish_reply(None)
            return None
        with contextlib.suppress(OSError):  # `_receive` notices the end of the process
            sent = self._channel.send(data)
        return asyncio.create_task(self._send_rest(data[sent:])) if sent < len(data) else None

    async def _send_rest(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(self._channel, data)

    def _receive(self) -> None:
        """Receive a part of the reply. Invariant: at most one reply is held in memory."""
        try:
            chunk = self._channel.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        self._received += chunk
        size = _LENGTH.unpack_from(self._received)[0] if len(self._received) >= _LENGTH.size else 1
        missing = _LENGTH.size + size - len(self._received)
        if not chunk:
            self._stop_receiving()
        elif self._reply is None or size > MAX_REPLY_BYTES or missing < 0:  # something else than one reply to a cell
            self._broke_protocol = True
            self._stop_receiving()
            self.end()
        elif missing == 0:
            content, self._received = bytes(self._received[_LENGTH.size :]), bytearray()
            self._finish_reply(_parse_reply(content))

    def _finish_reply(self, reply: dict[str, Any] | None) -> None:
        if self._reply and not self._reply.done():
            self._reply.set_result(reply)

    def _stop_receiving(self) -> None:
        if self._is_receiving:
            self._is_receiving = False
            asyncio.get_running_loop().remove_reader(self._channel)
            self._received.clear()
            self._finish_reply(None)

    def _return_code(self) -> int:
        """Return the return code of the interpreter after it has ended, from its supervisor if it had one."""
        if self.process.wait_status is None:
            raise job.JobFailed(self.process.failure)
        status = self.process.wait_status
        for message in job.report_messages(self._report.close()):
            if "error" in message:
                job.raise_setup_error(message["error"])
            status = message.get("status", status)
        return os.waitstatus_to_exitcode(status)

    def _cell_result(self, reply: dict[str, Any], run_time_s: float, *, timed_out: bool) -> CellResult:
        """Return the result of a cell. A program can forge the reply, so fields of the wrong type are replaced."""
        exit_code, display, error = reply.get("exit"), reply.get("display"), reply.get("error")
        return_code = exit_code if isinstance(exit_code, int) else int(not reply.get("ok"))
        result = job.command_result(
            *self._output,
            status=CommandStatus.TIME_LIMIT_EXCEEDED if timed_out else CommandStatus.FINISHED,
            execution_time=_duration(reply.get("seconds")) or run_time_s,
            cpu_time=_duration(reply.get("cpu")),
            return_code=None if timed_out else return_code,
            memory_exceeded=self.process.take_oom_kills() > 0 or reply.get("out_of_memory") is True,
        )
        values = display if isinstance(display, list) else []
        return CellResult(
            result,
            display=[value for value in values if isinstance(value, dict) and _is_shallow(value)],
            error=error if isinstance(error, dict) and _is_shallow(error) else None,
        )

    def _close(self) -> None:
        self._started.set()
        self._stop_receiving()
        self._channel.close()
        for reader in (*self._output, self._report):
            reader.close()  # data that is already in the pipe is kept


def _parse_reply(content: bytes) -> dict[str, Any] | None:
    """Return a reply, or None if it is malformed."""
    if sum(content.count(character) for character in (b"{", b"[", b",")) > MAX_REPLY_NODES:
        return None
    try:
        reply = orjson.loads(content)
    except ValueError:
        return None
    return reply if isinstance(reply, dict) else None


def _is_shallow(value: Any, max_depth: int = MAX_REPLY_DEPTH) -> bool:
    """Return True if a JSON value is not nested too deeply to be serialized."""
    items = value.values() if isinstance(value, dict) else value
    nested = [item for item in items if type(item) in (dict, list)]
    return not nested or (max_depth > 0 and all(_is_shallow(item, max_depth - 1) for item in nested))


def _duration(value: Any) -> float | None:
    return value if isinstance(value, float) and 0 <= value < 1e9 else None


class SessionTable:
    """The sessions of a front, by name. The hub decides which sessions may be open.

    Args:
        ttl_s: Idle time after which a session ends.
    """

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.on_closed: Callable[[str, bool], None] = lambda _name, _crashed: None
        """Called with the name of a session that has ended in another way than by `end`, and whether it crashed."""
        self._sessions: dict[str, Session] = {}
        self._starting: set[str] = set()
        """Names of sessions that a request is about to start, and that were not ended since."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._waiting: Counter[str] = Counter()
        """Number of requests that wait for the lock of each session."""

    async def acquire(self, name: str, deadline: float | None) -> asyncio.Lock:
        """Acquire the lock of a session, which a request holds while it is handled and acquires before admission.

        Args:
            name: Name of the session.
            deadline: Unix time after which the request is not run.

        Returns:
            The lock, which the caller releases.

        Raises:
            SessionBusy: If too many other requests wait for it.
            DeadlineExceeded: If the deadline passes.
        """
        lock = self._locks.setdefault(name, asyncio.Lock())
        if not lock.locked() and name not in self._waiting:
            await lock.acquire()
            return lock
        if self._waiting[name] >= MAX_SESSION_WAITERS:
            raise SessionBusy(f"{MAX_SESSION_WAITERS} other requests wait for this session. Retry later.")
        self._waiting[name] += 1
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.time()):
                await lock.acquire()
        except TimeoutError:
            raise DeadlineExceeded("The deadline passed before the previous programs of the session ended.") from None
        finally:
            self._waiting[name] -= 1
            if not self._waiting[name]:
                del self._waiting[name]
        return lock

    @contextlib.contextmanager
    def starting(self, name: str) -> Iterator[None]:
        """Allow the block to start a session, unless `end` is called meanwhile. The caller must hold its lock."""
        self._starting.add(name)
        try:
            yield
        finally:
            self._starting.discard(name)

    def get_or_create(self, name: str, create: Callable[[], Session]) -> tuple[Session, bool]:
        """Return the session of this name and whether it is new. The caller must be in a block of `starting`.

        Args:
            name: Name of the session.
            create: Function that starts a session.

        Raises:
            JobFailed: If `end` was called since the block began.
        """
        if (existing := self._sessions.get(name)) and not existing.has_ended:
            return existing, False
        if name not in self._starting:
            raise job.JobFailed("the session was ended before its interpreter had started")
        session = self._sessions[name] = create()
        session.process.exited.add_done_callback(lambda _: self._forget(name, session))
        return session, True

    def is_open(self, name: str) -> bool:
        """Return True if there is a session of this name."""
        session = self._sessions.get(name)
        return session is not None and not session.has_ended

    def end(self, name: str) -> None:
        """Kill the interpreter of a session, or prevent a request from starting it."""
        self._starting.discard(name)
        if session := self._sessions.pop(name, None):
            session.end()

    def end_idle(self) -> None:
        """End the sessions that were idle for longer than the TTL."""
        latest = time.monotonic() - self.ttl_s
        for name, session in self._sessions.items():
            if session.last_used < latest and not self._is_locked(name):
                session.end()

    async def end_resumed(self) -> None:
        """End the sessions that run although they are suspended between two cells."""
        for name, session in [*self._sessions.items()]:
            if not self._is_locked(name) and await session.has_resumed_itself() and not self._is_locked(name):
                session.end()

    def close(self) -> None:
        """End all sessions."""
        for session in list(self._sessions.values()):
            session.end()

    def _is_locked(self, name: str) -> bool:
        lock = self._locks.get(name)
        return lock is not None and lock.locked()

    def _forget(self, name: str, session: Session) -> None:
        if self._sessions.get(name) is session:
            del self._sessions[name]
            self.on_closed(name, session.crashed)
