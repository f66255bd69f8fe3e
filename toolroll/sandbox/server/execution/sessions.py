"""Sessions: Python interpreters that keep their variables between requests.

- A session runs one cell at a time, in order of arrival. Between cells, its processes are stopped.
- A cell that exceeds its timeout is interrupted, and the session survives. If the interrupt has no effect, the process
  is killed and the session ends.
- The process runs in its own jail. It is killed when it was idle for too long, when another session needs its place, or
  when the server stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import orjson

from toolroll.sandbox.protocol import CommandRunResult, CommandStatus
from toolroll.sandbox.server.execution import job
from toolroll.sandbox.server.execution.output import OutputReader
from toolroll.sandbox.server.execution.process_times import ProcessTimes
from toolroll.sandbox.server.execution.time_limit import TimeLimit, TimeVerdict
from toolroll.sandbox.server.interpreter.zygote_handle import SandboxProcess, ZygoteHandle
from toolroll.sandbox.server.job_spec import is_supervised

INTERRUPT_TIMEOUT_S = 1.0
"""Time in which an interrupted cell must end."""
MAX_REPLY_BYTES = 64 << 20
"""Maximum size of a reply. Displayed values are limited to 16 million characters of up to four bytes."""
MAX_REPLY_NODES = 4_000_000
"""Approximate limit on the number of JSON values in a reply, which bounds the cost of parsing it."""
MAX_REPLY_DEPTH = 64
"""Maximum nesting of a displayed value or an error."""
MIN_IDLE_S = 1.0
"""Idle time before a session can be evicted. Prevents two active sessions from evicting each other in turn."""
MAX_REMEMBERED_NAMES = 10_000
"""Number of deleted, and of crashed, sessions whose names are remembered."""
_LENGTH = struct.Struct(">I")


class SessionEnded(Exception):
    """Raised when a request names a session that was deleted."""


class SessionLimitReached(Exception):
    """Raised when a new session is requested and all sessions are in use."""


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
        self._started = asyncio.Event()
        self._output = OutputReader(output_limit_bytes), OutputReader(output_limit_bytes)
        self._report = OutputReader(job.report_limit_bytes(process.spec))
        self._channel, child_channel = socket.socketpair()
        self._channel.setblocking(False)
        process.on_start = self._started.set
        process.exited.add_done_callback(lambda _: self._close())
        readers = (*self._output, self._report)
        with child_channel:
            zygote.submit(process, b"", [*(reader.write_fd for reader in readers), child_channel.fileno()])
        for reader in readers:
            reader.close_write_end()

    @property
    def has_ended(self) -> bool:
        """True if the process has exited or is being killed."""
        return self.process.exited.done() or self.process.kill_requested

    def end(self) -> None:
        """Kill the interpreter."""
        self.process.kill()

    async def run(self, code: str, mode: str, timeout_s: float, max_elapsed_s: float | None = None) -> CellResult:
        """Run a cell. If the cell ends the session, that is a result, too.

        Args:
            code: Source of the cell.
            mode: "script" or "notebook": how the interpreter reports errors and values.
            timeout_s: Timeout of the cell, which starts when the interpreter has started.
            max_elapsed_s: Maximum elapsed time of the cell.

        Raises:
            JobFailed: If the server failed.
            InvalidProgram: If the interpreter cannot be started because of the content of the request.
        """
        await self._started.wait()
        started = time.monotonic()
        times = ProcessTimes(self.process, is_supervised=self._is_supervised, is_new=False)
        for reader in self._output:
            reader.resume()
        self.process.resume()
        exchange = asyncio.ensure_future(self._exchange({"code": code, "mode": mode}))
        try:
            verdict = await self._wait_or_interrupt(exchange, TimeLimit(timeout_s, max_elapsed_s), times)
            is_answered = exchange.done()
            reply = exchange.result() if is_answered else None
        finally:
            exchange.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await exchange
            self.last_used = time.monotonic()
            for reader in self._output:
                reader.pause()
        if reply is None:
            if is_answered:  # the channel was closed, usually because the interpreter ends by itself
                await asyncio.wait([self.process.exited], timeout=job.KILL_DELAY_S)
            self.end()
            await asyncio.shield(self.process.exited)
            reply = {"exit": self._return_code()}
        else:
            self.process.stop()
        run_time_s = time.monotonic() - started
        if verdict is TimeVerdict.STARVED:
            raise job.JobFailed(job.STARVED.format(seconds=run_time_s))
        return self._cell_result(reply, run_time_s, timed_out=verdict is TimeVerdict.TIMEOUT)

    async def finish(self) -> tuple[dict[str, str], str]:
        """End the interpreter and fetch its files.

        Returns:
            The fetched files in base64, and a note about files that are too large to send.
        """
        if not self.process.spec["fetch"] or self.has_ended:
            self.end()
            return {}, ""
        self.process.resume()
        self._channel.shutdown(socket.SHUT_WR)
        await asyncio.wait([self.process.exited], timeout=job.FETCH_TIMEOUT_S)
        self.end()
        return job.fetched_files(job.report_messages(self._report.close()))

    async def _wait_or_interrupt(
        self, exchange: asyncio.Future[Any], limit: TimeLimit, times: ProcessTimes
    ) -> TimeVerdict:
        """Wait for the reply, and interrupt the cell when it exceeds the time limit."""
        wait_s = limit.first_check_s
        while True:
            done, _ = await asyncio.wait([exchange], timeout=wait_s)
            if done or self.process.has_ended():
                return TimeVerdict.WITHIN_LIMIT
            sample, _ = times.sample()
            verdict = limit.check(sample)
            if verdict is not TimeVerdict.WITHIN_LIMIT:
                break
            wait_s = limit.until_next_check(sample)
        deadline = time.monotonic() + INTERRUPT_TIMEOUT_S
        while not done and time.monotonic() < deadline:
            self.process.interrupt()  # repeated, because Python can miss a signal just before a blocking call
            done, _ = await asyncio.wait([exchange], timeout=INTERRUPT_TIMEOUT_S / 4)
        return verdict

    async def _exchange(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Send a cell and receive the reply. Return None if the process ended or the reply is malformed."""
        data = json.dumps(message).encode()
        try:
            await asyncio.get_running_loop().sock_sendall(self._channel, _LENGTH.pack(len(data)) + data)
            (size,) = _LENGTH.unpack(await self._receive(_LENGTH.size))
            body = await self._receive(size) if size <= MAX_REPLY_BYTES else b""
            if sum(body.count(character) for character in (b"{", b"[", b",")) > MAX_REPLY_NODES:
                return None
            reply = orjson.loads(body)
        except (OSError, ValueError, EOFError):
            return None
        return reply if isinstance(reply, dict) else None

    async def _receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = await asyncio.get_running_loop().sock_recv(self._channel, min(size - len(data), 1 << 20))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)

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
        self._channel.close()
        for reader in (*self._output, self._report):
            reader.close()  # data that is already in the pipe is kept


def _is_shallow(value: Any, max_depth: int = MAX_REPLY_DEPTH) -> bool:
    """Return True if a JSON value is not nested too deeply to be serialized."""
    items = value.values() if isinstance(value, dict) else value
    nested = [item for item in items if type(item) in (dict, list)]
    return not nested or (max_depth > 0 and all(_is_shallow(item, max_depth - 1) for item in nested))


def _duration(value: Any) -> float | None:
    return value if isinstance(value, float) and 0 <= value < 1e9 else None


class SessionTable:
    """The sessions of a server, by name.

    Args:
        max_sessions: Maximum number of sessions. The session that was idle longest is evicted.
        ttl_s: Idle time after which a session ends.
    """

    def __init__(self, max_sessions: int, ttl_s: float) -> None:
        self.max_sessions = max_sessions
        self.ttl_s = ttl_s
        self._sessions: dict[str, Session] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._deleted: OrderedDict[str, bool] = OrderedDict()
        self._crashed: OrderedDict[str, bool] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def lock(self, name: str) -> asyncio.Lock:
        """Return the lock of a session, which a request holds while it is handled and acquires before admission."""
        return self._locks.setdefault(name, asyncio.Lock())

    def get_or_create(self, name: str, create: Callable[[], Session]) -> tuple[Session, bool]:
        """Return the session of this name and whether it is new. The caller must hold the session's lock.

        Args:
            name: Name of the session.
            create: Function that starts a session.

        Raises:
            SessionEnded: If the session was deleted.
            SessionLimitReached: If all other sessions are in use.
        """
        if name in self._deleted:
            raise SessionEnded(f"Session {name} was deleted. Use a new session_id.")
        if (existing := self._sessions.get(name)) and not existing.has_ended:
            return existing, False
        self._evict_if_full()
        session = self._sessions[name] = create()
        session.process.exited.add_done_callback(lambda _: self._forget(name, session))
        return session, True

    def pop_crashed(self, name: str) -> bool:
        """Return True if a session of this name was ended by its own program. The next call returns False."""
        return self._crashed.pop(name, False)

    def end(self, name: str) -> bool:
        """Delete a session and kill its interpreter. Return True if there was one.

        The name is remembered, so that a request that waits for the session does not create it again.
        """
        _remember(self._deleted, name)
        if session := self._sessions.pop(name, None):
            session.end()
        return session is not None

    def end_idle(self) -> None:
        """End the sessions that were idle for longer than the TTL."""
        for _, name in self._idle_for(self.ttl_s):
            self._sessions[name].end()

    def close(self) -> None:
        """End all sessions."""
        for session in list(self._sessions.values()):
            session.end()

    def _idle_for(self, idle_s: float) -> list[tuple[float, str]]:
        """Return the time of the last use and the name of each session that was idle for longer than this."""
        latest = time.monotonic() - idle_s
        return [
            (session.last_used, name)
            for name, session in self._sessions.items()
            if session.last_used < latest and not self.lock(name).locked()
        ]

    def _evict_if_full(self) -> None:
        if len(self._sessions) < self.max_sessions:
            return
        idle = self._idle_for(MIN_IDLE_S)
        if not idle:
            raise SessionLimitReached(f"All {self.max_sessions} sessions are in use (server option --sessions).")
        _, name = min(idle)
        self._sessions.pop(name).end()

    def _forget(self, name: str, session: Session) -> None:
        if session.process.wait_status is not None and not session.process.kill_requested:
            _remember(self._crashed, name)
        if self._sessions.get(name) is session:
            del self._sessions[name]


def _remember(names: OrderedDict[str, bool], name: str) -> None:
    names[name] = True
    if len(names) > MAX_REMEMBERED_NAMES:
        names.popitem(last=False)
