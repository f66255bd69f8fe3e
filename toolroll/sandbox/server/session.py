"""A Python interpreter that keeps its variables from one request to the next.

One cell at a time, in the order in which they came. A cell over its time is interrupted, which keeps the session; one
that won't be is killed, and the session with it. The process runs in a jail of its own all the while; it is ended when
it was idle too long, when others need its place, or when the server ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import os
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import orjson

from toolroll.sandbox.protocol import CommandRunResult, CommandStatus
from toolroll.sandbox.server.cgroup import Cgroup
from toolroll.sandbox.server.interpreter import Interpreter
from toolroll.sandbox.server.job import (
    FETCHED_WITHIN,
    BadRequest,
    JobFailed,
    fetched,
    report_lines,
    report_size,
)
from toolroll.sandbox.server.output import Output
from toolroll.sandbox.server.process import Process, file_of
from toolroll.sandbox.server.spec import SPEC_FORMAT, Plan, Spec

INTERRUPTED_WITHIN = 1.0
"""Seconds in which an interrupted cell must end."""
_LENGTH = struct.Struct(">I")
MOST_ANSWERED = 64 << 20
"""Bytes of an answer: what is displayed is limited to 16 million characters, of up to four bytes."""
MOST_PARTS = 4_000_000
"""Of an answer's JSON, about: a bound on what it takes to read it."""
IN_USE = 1.0
"""Seconds after a cell for which a session counts as in use: one that others need at once would go to and fro."""
MOST_ENDED = 10_000
"""Names of ended sessions that are remembered."""
_DEEPEST = 64


@dataclass
class Cell:
    """What one cell did."""

    result: CommandRunResult
    display: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None


class Session:
    """One such interpreter. One cell at a time."""

    def __init__(self, plan: Plan, spec: Spec, output: int, cgroup: Cgroup | None) -> None:
        self.spec = spec
        self.cgroup = cgroup
        self.last_used = time.monotonic()
        self._begun = asyncio.Event()
        self.process = Process(begun=self._begun.set)
        self._stdout, self._stderr, self._report = Output(output), Output(output), Output(report_size(spec))
        self._channel, self._theirs = socket.socketpair()
        self._channel.setblocking(False)
        self._memory_kills = self._kills_told = cgroup.memory_kills() if cgroup else 0
        self.process.gone.add_done_callback(lambda _: self._close())

    @property
    def is_over(self) -> bool:
        """Whether its process has ended, or is about to."""
        return self.process.gone.done() or self.process.is_to_end

    def begin(self, interpreter: Interpreter) -> None:
        """Have it started. A cell may be sent at once."""
        with contextlib.ExitStack() as opened, self._theirs:
            try:
                stdin, spec = file_of(b""), file_of(marshal.dumps(dict(self.spec), SPEC_FORMAT))
            except OSError as error:
                self.process.failed(f"it could not be given to an interpreter: {error}")
                raise JobFailed(self.process.failure) from error
            for descriptor in (stdin, spec):
                opened.callback(os.close, descriptor)
            writing = [self._stdout.writing, self._stderr.writing]
            cgroups = self.cgroup.descriptors if self.cgroup else []
            more = [spec, self._report.writing, self._theirs.fileno()]
            interpreter.give(self.process, [stdin, *writing, *more], cgroups)
        for stream in (self._stdout, self._stderr, self._report):
            if stream.writing >= 0:  # else it has failed already
                stream.give_away()

    def end(self) -> None:
        """End it."""
        self.process.kill()

    async def run(self, code: str, mode: str, seconds: float) -> Cell:
        """Run a cell. Raises JobFailed where the session can't be used; a cell that ends it is a result."""
        await self._begun.wait()  # its time doesn't run before it does
        began = time.monotonic()
        timed_out = False
        for stream in (self._stdout, self._stderr):
            stream.resume()
        asking = asyncio.ensure_future(self._ask({"code": code, "mode": mode}))
        try:
            done, _ = await asyncio.wait([asking], timeout=seconds)
            ends = time.monotonic() + INTERRUPTED_WITHIN
            while not done and time.monotonic() < ends:
                timed_out = True
                self.process.interrupt()  # more than once: Python may miss one that comes just before it begins to wait
                done, _ = await asyncio.wait([asking], timeout=INTERRUPTED_WITHIN / 4)
            answer = asking.result() if done else None
        finally:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
            self.last_used = time.monotonic()
            for stream in (self._stdout, self._stderr):
                stream.pause()  # what goes on between cells is not listened to
        if answer is None:
            self.end()
            await asyncio.shield(self.process.gone)
            self._check_failure()
        return self._cell(answer, time.monotonic() - began, timed_out=timed_out)

    async def finish(self) -> tuple[dict[str, str], list[str]]:
        """End it in peace, and take the files that it was to leave: those, and the names of those too large."""
        if not self.spec["fetch"] or self.is_over:
            self.end()
            return {}, []
        self._channel.shutdown(socket.SHUT_WR)
        await asyncio.wait([self.process.gone], timeout=FETCHED_WITHIN)
        self.end()
        return fetched(report_lines(self._report.close()))

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Send a cell and read the answer; None if the process ended, or answers what no interpreter would."""
        loop = asyncio.get_running_loop()
        data = json.dumps(message).encode()
        try:
            await loop.sock_sendall(self._channel, _LENGTH.pack(len(data)) + data)
            (size,) = _LENGTH.unpack(await self._receive(_LENGTH.size))
            body = await self._receive(size) if size <= MOST_ANSWERED else b""
            # What the interpreter itself sends has no such number of parts; a program might send it in its name.
            if sum(body.count(sign) for sign in (b"{", b"[", b",")) > MOST_PARTS:
                return None
            answer = orjson.loads(body)
        except (OSError, ValueError, EOFError):
            return None
        return answer if isinstance(answer, dict) else None

    async def _receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = await asyncio.get_running_loop().sock_recv(self._channel, min(size - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def _check_failure(self) -> None:
        if self.process.status is None:
            raise JobFailed(self.process.failure)
        report = self._report.so_far()[0]
        if report.startswith(b'{"error"'):
            error = str(json.loads(report)["error"])
            if error.startswith("BadFile: "):
                raise BadRequest(error.removeprefix("BadFile: "))
            raise JobFailed(f"the jail could not be made: {error}")

    def _cell(self, answer: dict[str, Any] | None, seconds: float, *, timed_out: bool) -> Cell:
        (stdout, cut_out), (stderr, cut_err) = self._stdout.so_far(), self._stderr.so_far()
        errors = stderr.decode(errors="replace")
        if answer is None:
            return_code = os.waitstatus_to_exitcode(self.process.status or 0)
        else:
            exit_code = answer.get("exit")
            return_code = exit_code if isinstance(exit_code, int) else int(not answer.get("ok"))
        if not self.process.gone.done():
            self._look_at_memory()
        killed, self._kills_told = self._memory_kills > self._kills_told, self._memory_kills
        result = CommandRunResult(
            status=CommandStatus.TIME_LIMIT_EXCEEDED if timed_out else CommandStatus.FINISHED,
            execution_time=_number(answer, "seconds", seconds),
            cpu_time=_number(answer, "cpu", None),
            return_code=None if timed_out else return_code,
            stdout=stdout.decode(errors="replace"),
            stderr=errors,
            stdout_truncated=cut_out,
            stderr_truncated=cut_err,
            memory_exceeded=killed or (answer is not None and answer.get("out_of_memory") is True),
        )
        display = answer.get("display") if answer else None
        error = answer.get("error") if answer else None
        return Cell(
            result,
            [one for one in display if isinstance(one, dict) and _is_flat(one)] if isinstance(display, list) else [],
            error if isinstance(error, dict) and _is_flat(error) else None,
        )

    def _look_at_memory(self) -> None:
        with contextlib.suppress(OSError):  # somebody has cleared it away
            self._memory_kills = self.cgroup.memory_kills() if self.cgroup else 0

    def _close(self) -> None:
        self._look_at_memory()  # a moment later the cgroup may be another's
        self._begun.set()
        self._channel.close()
        for stream in (self._stdout, self._stderr, self._report):
            stream.close()  # what is there is kept


def _is_flat(value: Any, deepest: int = _DEEPEST) -> bool:
    """Whether a value doesn't nest deeper than can be sent on."""
    inside = value.values() if isinstance(value, dict) else value
    nested = [one for one in inside if type(one) in (dict, list)]
    return not nested or (deepest > 0 and all(_is_flat(one, deepest - 1) for one in nested))


def _number(answer: dict[str, Any] | None, name: str, otherwise: float | None) -> float | None:
    """A number of an answer, if it is one: a program might have written it."""
    value = answer.get(name) if answer else None
    return value if isinstance(value, float) and 0 <= value < 1e9 else otherwise


class Sessions:
    """The sessions of this server, by name."""

    def __init__(self, most: int, ttl: float, make: Callable[[int], Session]) -> None:
        self.most = most
        self.ttl = ttl
        self._make = make
        self._sessions: dict[str, Session] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._died: OrderedDict[str, None] = OrderedDict()

    def turn(self, name: str) -> asyncio.Lock:
        """To be held while a request of this session is dealt with, and before it takes a place of others."""
        if (lock := self._turns.get(name)) is None:
            lock = self._turns[name] = asyncio.Lock()
        return lock

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, name: str, memory: int) -> tuple[Session, bool]:
        """The session of this name, and whether it is new. To be used while its turn is held.

        `memory` is the limit of a new one, in megabytes; −1 for the server's own.
        """
        if name in self._ended:
            raise Ended(f"The session {name} was ended by request. Its name can't be used again so soon.")
        session = self._sessions.get(name)
        if session is None or session.is_over:
            return self._begin(name, memory), True
        return session, False

    def had_died(self, name: str) -> bool:
        """Whether a session of this name had ended by itself: its programs did that. Asked again, it hasn't."""
        return self._died.pop(name, False) is None

    def end(self, name: str) -> bool:
        """End the session of this name, and whatever runs in it. Whether there was one.

        The name is remembered, so that a request of the same session which waits for its turn doesn't begin it anew.
        """
        _remember(self._ended, name)
        session = self._sessions.pop(name, None)
        if session is not None:
            session.end()
        return session is not None

    def _begin(self, name: str, memory: int) -> Session:
        self._make_room()
        session = self._sessions[name] = self._make(memory)
        session.process.gone.add_done_callback(lambda _: self._forget(name, session))
        return session

    def end_idle(self) -> None:
        """End those that nobody has used for too long."""
        now = time.monotonic()
        for name, session in list(self._sessions.items()):
            if not self.turn(name).locked() and now - session.last_used > self.ttl:
                session.end()

    def close(self) -> None:
        """End all."""
        for session in list(self._sessions.values()):
            session.end()

    def _make_room(self) -> None:
        if len(self._sessions) < self.most:
            return
        last = time.monotonic() - IN_USE
        idle = [
            (one.last_used, name)
            for name, one in self._sessions.items()
            if not self.turn(name).locked() and one.last_used < last
        ]
        if not idle:
            raise NoRoom(f"All {self.most} sessions are in use (option --sessions).")
        _, name = min(idle)
        self._sessions.pop(name).end()

    def _forget(self, name: str, session: Session) -> None:
        if session.process.status is not None and not session.process.is_to_end:
            _remember(self._died, name)
        if self._sessions.get(name) is session:
            del self._sessions[name]


def _remember(names: OrderedDict[str, None], name: str) -> None:
    names[name] = None
    if len(names) > MOST_ENDED:
        names.popitem(last=False)


class Ended(Exception):
    """The session was ended on purpose."""


class NoRoom(Exception):
    """No more sessions can be kept, and all are busy."""
