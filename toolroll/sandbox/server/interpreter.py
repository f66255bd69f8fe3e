"""The front's handle on a warm interpreter: started, given jobs, heard from, replaced when it dies.

A job given to an interpreter ends in exactly one way: `ended` is called with its wait status, which comes from the
kernel through the interpreter and not from the program; or `failed` is called with the reason for which it never began
or its end will never be known. One that is told to end does so soon, or with its interpreter. Nothing else is promised
of an interpreter: it may die at any moment, and takes with it every program that it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import toolroll
from toolroll.sandbox.server import warm
from toolroll.sandbox.server.spec import Plan

logger = logging.getLogger(__name__)

ANSWER_WITHIN = 30.0
"""Seconds for a job to begin, and to end once it is told to. An interpreter that doesn't answer is replaced."""
AGAIN_AFTER = 0.01
"""Seconds until an order is sent again that there was no room for: it has hundreds to read before."""
START_WITHIN = 60.0
"""Seconds for an interpreter to import what it preloads, on a busy machine."""
_BOOT = (
    "import sys; sys.path.append(sys.argv[2]); from toolroll.sandbox.server.warm import main; sys.path.pop(); main()"
)


class StartError(Exception):
    """A warm interpreter couldn't be started; the message says what it had to say."""


class Run(Protocol):
    """Who is told of a job."""

    def started(self, process: int, end: Callable[[], None]) -> None:
        """It runs. The pidfd of its process, and what ends it with all that it has started."""

    def ended(self, status: int, cpu: float) -> None:
        """It ended, with this wait status, after so many seconds on a CPU."""

    def failed(self, reason: str) -> None:
        """It wasn't started, or was lost. Not the program's fault."""


class Interpreter:
    """One warm interpreter."""

    def __init__(self, plan: Plan, python: str, preload: Sequence[str]) -> None:
        self.plan = plan
        self.python = python
        self.preload = preload
        self.preloaded: list[str] = []
        self.runs: dict[int, Run] = {}
        self.ended = asyncio.Event()
        self._number = 0
        self._awaited: dict[int, asyncio.TimerHandle] = {}
        """Jobs of which the interpreter must say something soon."""
        self._front: socket.socket
        self._process: subprocess.Popen[bytes]

    async def start(self) -> None:
        """Start it, and wait until it is ready. Raises StartError."""
        try:
            self._front, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise StartError(f"no socket: {error.strerror}") from error
        orders = json.dumps({"plan": self.plan, "preload": list(self.preload)})
        # An environment of its own: nothing of the server's can be read by a program. One thread: others wouldn't be
        # there in a clone.
        environment = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment |= {"PATH": self.plan["path"], "LANG": "C.UTF-8", "MPLBACKEND": "Agg"}
        package = str(Path(toolroll.__file__).parent.parent)
        try:
            with theirs:
                self._process = subprocess.Popen(  # noqa: ASYNC220 (it returns at once)
                    [self.python, "-I", "-X", "utf8", "-c", _BOOT, orders, package],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise StartError(f"{self.python}: {error.strerror}") from error
        self._front.setblocking(False)
        packet = await self._first_packet()
        if packet[:1] != warm.READY:
            self.close()
            raise StartError(packet[warm.JOB.size :].decode(errors="replace") or "it ended while it started")
        self.preloaded = json.loads(packet[warm.JOB.size :])
        asyncio.get_running_loop().add_reader(self._front, self._hear)

    @property
    def pid(self) -> int:
        """The process; a child of it is the interpreter itself, where there are namespaces."""
        return self._process.pid

    def give(self, run: Run, descriptors: Sequence[int], cgroups: Sequence[int]) -> None:
        """Have a job run. Its descriptors stay the caller's, and may be closed at once."""
        self._number += 1
        packet = warm.ORDER.pack(warm.RUN, self._number, len(cgroups))
        try:
            socket.send_fds(self._front, [packet], [*descriptors, *cgroups])
        except OSError as error:
            run.failed(f"the interpreter takes no jobs: {error.strerror}")
            return
        self.runs[self._number] = run
        self._await(self._number)

    def _end(self, number: int) -> None:
        """End a job, if it hasn't ended."""
        if number not in self.runs:
            return
        if number not in self._awaited:
            self._await(number)
        try:
            self._front.send(warm.ORDER.pack(warm.END, number, 0))
        except BlockingIOError:
            asyncio.get_running_loop().call_later(AGAIN_AFTER, self._end, number)
        except OSError as error:
            logger.error("A warm interpreter (pid %d) takes no orders: %s.", self._process.pid, error.strerror)
            self.close()  # a program that can't be ended must not run

    def close(self) -> None:
        """End it, and every program that it has started."""
        if self.ended.is_set():
            return
        self.ended.set()
        asyncio.get_running_loop().remove_reader(self._front)
        self._front.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        asyncio.get_running_loop().run_in_executor(None, self._process.wait)
        for timer in self._awaited.values():
            timer.cancel()
        self._awaited.clear()
        for run in list(self.runs.values()):
            run.failed("the interpreter that ran the program died")
        self.runs.clear()

    def _await(self, number: int) -> None:
        self._awaited[number] = asyncio.get_running_loop().call_later(ANSWER_WITHIN, self._replace)

    def _replace(self) -> None:
        logger.error("A warm interpreter (pid %d) is stuck, and is replaced.", self._process.pid)
        self.close()

    async def _first_packet(self) -> bytes:
        try:
            async with asyncio.timeout(START_WITHIN):
                return await asyncio.get_running_loop().sock_recv(self._front, 65536)
        except TimeoutError:
            self.close()
            raise StartError(f"it wasn't ready within {START_WITHIN:g} s") from None
        except BaseException:
            self.close()
            raise

    def _hear(self) -> None:
        while not self.ended.is_set():
            try:
                packet, descriptors, _, _ = socket.recv_fds(self._front, 65536, 1)
            except BlockingIOError:
                return
            except OSError:
                packet, descriptors = b"", []
            if not packet:
                logger.warning("A warm interpreter died (pid %d); its programs are lost.", self._process.pid)
                self.close()
                return
            self._take(packet, descriptors)

    def _take(self, packet: bytes, descriptors: list[int]) -> None:
        kind, number = warm.JOB.unpack_from(packet)
        if timer := self._awaited.pop(number, None):
            timer.cancel()
        if kind == warm.STARTED:
            if descriptors:
                self.runs[number].started(descriptors[0], partial(self._end, number))
                return
            logger.error("No descriptors are left for a program. Raise the limit of open files (ulimit -n).")
            self.close()  # a program that can't be ended must not run
            return
        run = self.runs.pop(number)
        if kind == warm.FINISHED:
            _, _, status, cpu = warm.ENDED.unpack(packet)
            run.ended(status, cpu)
        else:
            run.failed(packet[warm.JOB.size :].decode(errors="replace"))
