"""The server's view of zygotes and of the programs that they start.

Invariants:

- A submitted program ends in exactly one way: with its wait status, which the zygote gets from the kernel and the
  program cannot forge; or with a failure, because the program did not start or its status is unknown.
- A program that is killed ends within `ZYGOTE_RESPONSE_TIMEOUT_S`, if necessary together with its zygote.

A zygote may die at any moment, and all programs that it has started die with it. The pool then replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import marshal
import os
import select
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from toolroll.sandbox.server.interpreter import supervisor, zygote
from toolroll.sandbox.server.isolation.cgroup import Cgroup
from toolroll.sandbox.server.job_spec import SPEC_MARSHAL_VERSION, JailPlan, JobSpec

logger = logging.getLogger(__name__)

ZYGOTE_RESPONSE_TIMEOUT_S = 30.0
"""Timeout for a job to start, and to end after it is killed. A zygote that exceeds it is replaced."""
ZYGOTE_SEND_RETRY_S = 0.01
"""Interval between two attempts to send a request when the socket is full."""
ZYGOTE_START_TIMEOUT_S = 60.0
"""Timeout for a zygote to import its modules, on a busy machine."""
START_BACKOFF_S = (0.0, 0.1, 1.0, 5.0)
"""Delays before the first start of a zygote and the following attempts; the last one repeats."""
_F_ADD_SEALS, _ALL_SEALS = 1033, 0b1111
_IMPORT_ROOT = str(Path(__file__).parents[4])
"""Directory that contains the package `toolroll`."""
_BOOT = (
    "import sys; sys.path.append(sys.argv[2]); "
    "from toolroll.sandbox.server.interpreter.zygote import main; "
    "sys.path.pop(); main()"
)


class ZygoteStartError(Exception):
    """Raised when a zygote cannot be started. The message is the reason that it reported."""


class SandboxProcess:
    """The process of one program, as the server sees it: started, signalled, killed, exited.

    Its resources (a cgroup, a scratch directory) must not be assigned to another program before `exited` is done: until
    then, processes of the program may still run.

    Args:
        spec: The program.
        cgroup: Cgroup of the program, if it has one.
    """

    def __init__(self, spec: JobSpec, cgroup: Cgroup | None = None) -> None:
        self.spec = spec
        self.cgroup = cgroup
        self.on_start: Callable[[], None] = lambda: None
        """Called when the process starts, unless it is to be killed."""
        self.wait_status: int | None = None
        """Wait status; None while the process runs, and if it was lost."""
        self.cpu_time_s = 0.0
        self.run_time_s = 0.0
        self.failure = ""
        """Reason why the process was not started or was lost. It is never the fault of the program."""
        self.is_lost = False
        """Whether the end of the process was not reported, so that its descendants may still be running."""
        self.kill_requested = False
        self.exited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when no process of the program is left."""
        self._start_time = 0.0
        self._pidfds: Sequence[int] = ()
        """The process and, with namespaces, the first process of its pid namespace, which adopts orphans."""
        self._send_order: Callable[[bytes], None] | None = None
        self._is_stopped = False
        self._oom_kills = 0
        self._count_oom_kills()  # of the programs that used the cgroup before
        self._reported_oom_kills = self._oom_kills

    def started(self, pidfds: Sequence[int], send_order: Callable[[bytes], None]) -> None:
        """Handle the start of the process.

        Args:
            pidfds: File descriptors of the process and, with namespaces, of the first process of its pid namespace.
                This object closes them.
            send_order: Function that sends an order for this process to its zygote: KILL, STOP or CONTINUE.
        """
        self._pidfds, self._send_order = pidfds, send_order
        if self.exited.done():
            send_order(zygote.KILL)
            self._close()
            return
        self._start_time = time.monotonic()  # the event loop's clock may be coarse
        if self.kill_requested:
            self.kill()
        else:
            self.on_start()

    def ended(self, wait_status: int, cpu_time_s: float) -> None:
        """Handle the end of the process."""
        self.wait_status, self.cpu_time_s = wait_status, cpu_time_s
        self._close()

    def failed(self, reason: str, *, is_lost: bool = False) -> None:
        """Handle a process that could not be started or was lost."""
        self.failure, self.is_lost = reason, is_lost
        self._close()

    def interrupt(self) -> None:
        """Send SIGINT to the process."""
        if self._pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfds[0], signal.SIGINT)

    def kill(self) -> None:
        """Kill the process and its descendants, as soon as it has started."""
        self.kill_requested = True
        if self._send_order:
            send_order, self._send_order = self._send_order, None
            send_order(zygote.KILL)

    def roots(self) -> list[int]:
        """Return the process ids whose descendants are the program: its process, and the one that adopts orphans."""
        return [_pid_of(pidfd) for pidfd in self._pidfds]

    async def wait(self) -> None:
        """Wait until no process of the program is left, even if this task is cancelled meanwhile."""
        cancelled = False
        while not self.exited.done():
            try:
                await asyncio.shield(self.exited)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError

    def stop(self) -> None:
        """Suspend the process and its descendants until `resume()`."""
        if self._send_order and not self._is_stopped:
            self._is_stopped = True
            self._send_order(supervisor.STOP)

    def resume(self) -> None:
        """Resume the process and its descendants."""
        if self._send_order and self._is_stopped:
            self._is_stopped = False
            self._send_order(supervisor.CONTINUE)

    @property
    def elapsed_s(self) -> float:
        """Time since the start of the process."""
        return time.monotonic() - self._start_time if self._start_time else 0.0

    def has_ended(self) -> bool:
        """Return True if the process has ended, even if the zygote has not reported it yet."""
        if not self._pidfds:
            return True
        poll = select.poll()
        poll.register(self._pidfds[0], select.POLLIN)
        return bool(poll.poll(0))

    def take_oom_kills(self) -> int:
        """Return how many processes the kernel killed for lack of memory since the last call."""
        self._count_oom_kills()
        new, self._reported_oom_kills = self._oom_kills - self._reported_oom_kills, self._oom_kills
        return new

    def _count_oom_kills(self) -> None:
        if self.cgroup and not self.exited.done():  # afterwards the cgroup may belong to another program
            with contextlib.suppress(OSError):  # the cgroup was removed from outside
                self._oom_kills = self.cgroup.oom_kills()

    def _close(self) -> None:
        self.run_time_s = self.elapsed_s
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds, self._send_order = (), None
        if not self.exited.done():
            self._count_oom_kills()
            self.exited.set_result(None)


class ZygoteHandle:
    """One zygote process.

    Args:
        plan: How programs are isolated.
        python: Interpreter to run.
        preload: Modules to import before the zygote accepts jobs.
    """

    def __init__(self, plan: JailPlan, python: str, preload: Sequence[str]) -> None:
        self.plan = plan
        self.python = python
        self.preload = preload
        self.preloaded: list[str] = []
        """Modules that were found and imported."""
        self.runs: dict[int, SandboxProcess] = {}
        """Programs that have not ended, by the number of their job."""
        self.closed = asyncio.Event()
        """Set when the zygote was closed or has died."""
        self._last_number = 0
        self._response_timers: dict[int, asyncio.TimerHandle] = {}
        """Jobs for which the zygote has to send an event soon."""
        self._orders: deque[tuple[bytes, int]] = deque()
        """Orders that are not sent yet, with the number of their job."""
        self._socket: socket.socket
        self._process: subprocess.Popen[bytes]

    async def start(self) -> None:
        """Start the zygote and wait until it is ready.

        Raises:
            ZygoteStartError: If it cannot be started or is not ready in time.
        """
        config = json.dumps({"plan": self.plan, "preload": list(self.preload)})
        # The environment contains nothing of the server's, because programs can read it. Libraries start no threads,
        # because threads do not exist in a clone.
        environment = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment |= {"PATH": self.plan["path"], "LANG": "C.UTF-8", "MPLBACKEND": "Agg", **zygote.START_ENVIRONMENT}
        try:
            self._socket, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with zygote_end:
                self._process = subprocess.Popen(  # noqa: ASYNC220 (returns at once)
                    [self.python, "-I", "-X", "utf8", "-c", _BOOT, config, _IMPORT_ROOT],
                    stdin=zygote_end.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise ZygoteStartError(f"Cannot start {self.python}: {error.strerror}") from error
        self._socket.setblocking(False)
        try:
            async with asyncio.timeout(ZYGOTE_START_TIMEOUT_S):
                packet = await asyncio.get_running_loop().sock_recv(self._socket, 65536)
            kind, message = packet[:1], packet[zygote.EVENT.size :]
            if kind != zygote.READY:
                raise ZygoteStartError(message.decode(errors="replace") or "the process ended while it started")
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise ZygoteStartError(f"not ready within {ZYGOTE_START_TIMEOUT_S:g} s") from None
            raise
        self.preloaded = json.loads(message)
        asyncio.get_running_loop().add_reader(self._socket, self._read_event)

    @property
    def pid(self) -> int:
        """Process id. With namespaces, the zygote itself is a child of this process."""
        return self._process.pid

    def submit(self, process: SandboxProcess, stdin: bytes, output_fds: Sequence[int]) -> None:
        """Start a program. If that is not possible, its process has failed.

        Args:
            process: Process of the program, which receives the events.
            stdin: Standard input of the program.
            output_fds: Descriptors for stdout, stderr and the supervisor's report, then those of a compiler or of a
                session's channel. The caller may close them at once.
        """
        self._last_number += 1
        cgroups = process.cgroup.descriptors if process.cgroup else []
        packet = zygote.REQUEST.pack(zygote.RUN, self._last_number, len(cgroups))
        spec = marshal.dumps(dict(process.spec), SPEC_MARSHAL_VERSION)
        inputs: list[int] = []
        try:
            inputs.append(_input_file(stdin))
            inputs.append(_input_file(spec))
            stdin_fd, spec_fd = inputs
            # The order of ChildSetup.
            descriptors = [stdin_fd, *output_fds[:2], spec_fd, *output_fds[2:], *cgroups]
            socket.send_fds(self._socket, [packet], descriptors)
        except OSError as error:
            process.failed(f"the program could not be sent to a zygote: {error}")
        else:
            self.runs[self._last_number] = process
            self._expect_event(self._last_number)
        finally:
            for fd in inputs:
                os.close(fd)

    def close(self) -> None:
        """Kill the zygote and every program that it has started."""
        if self.closed.is_set():
            return
        self.closed.set()
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        loop.run_in_executor(None, self._process.wait)
        for timer in self._response_timers.values():
            timer.cancel()
        self._response_timers.clear()
        for run in list(self.runs.values()):
            run.failed("the zygote that ran the program died", is_lost=True)
        self.runs.clear()

    def _order(self, number: int, order: bytes) -> None:
        """Send an order after the orders that are waiting, so that the zygote receives them in this order."""
        if number not in self.runs:
            return
        if order == zygote.KILL and number not in self._response_timers:
            self._expect_event(number)
        self._orders.append((order, number))
        if len(self._orders) == 1:
            self._send_orders()

    def _send_orders(self) -> None:
        while self._orders and not self.closed.is_set():
            order, number = self._orders[0]
            try:
                if number in self.runs:
                    self._socket.send(zygote.REQUEST.pack(order, number, 0))
            except BlockingIOError:
                asyncio.get_running_loop().call_later(ZYGOTE_SEND_RETRY_S, self._send_orders)
                return
            except OSError as error:
                self._replace(f"accepts no requests: {error.strerror}")
                return
            self._orders.popleft()

    def _expect_event(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        self._response_timers[number] = loop.call_later(ZYGOTE_RESPONSE_TIMEOUT_S, self._replace, "does not respond")

    def _replace(self, reason: str) -> None:
        """Close a zygote that cannot end its programs. The pool starts another one."""
        logger.error("Replacing zygote (pid %d): it %s.", self._process.pid, reason)
        self.close()

    def _read_event(self) -> None:
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._socket, 65536, 2)
        except BlockingIOError:
            return
        except OSError:
            packet, descriptors = b"", []
        if packet:
            self._handle_event(packet, descriptors)
        else:
            logger.warning("A zygote died (pid %d) and its programs are lost.", self._process.pid)
            self.close()

    def _handle_event(self, packet: bytes, descriptors: list[int]) -> None:
        kind, number = zygote.EVENT.unpack_from(packet)
        if timer := self._response_timers.pop(number, None):
            timer.cancel()
        if kind == zygote.STARTED:
            if descriptors:
                self.runs[number].started(descriptors, partial(self._order, number))
            else:
                self._replace("sent no pidfd: too many open files. Raise the limit of open files (ulimit -n)")
            return
        run = self.runs.pop(number)
        if kind == zygote.EXITED:
            _, _, status, cpu = zygote.EXIT_EVENT.unpack(packet)
            run.ended(status, cpu)
        else:
            run.failed(packet[zygote.EVENT.size :].decode(errors="replace"))


class ZygotePool:
    """A fixed number of zygotes with the same preloaded modules. Each is replaced when it dies.

    Args:
        plan: How programs are isolated.
        python: Interpreter to run.
        preload: Modules to import.
        size: Number of zygotes.
    """

    def __init__(self, plan: JailPlan, python: str, preload: Sequence[str], size: int) -> None:
        self.plan = plan
        self.python = python
        self.preload = preload
        self.size = size
        self.restarts = 0
        """Number of zygotes that have died and were replaced."""
        self._alive: list[ZygoteHandle] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._any_alive = asyncio.Event()

    def start(self) -> None:
        """Start all zygotes in the background, and replace them when they die until the pool is closed."""
        self._tasks = [asyncio.create_task(self._keep_one_alive()) for _ in range(self.size)]

    async def get_zygote(self) -> ZygoteHandle:
        """Return the zygote with the fewest programs, waiting until one is ready."""
        while not self._alive:
            await self._any_alive.wait()
        return min(self._alive, key=lambda zygote: len(zygote.runs))

    @property
    def is_up(self) -> bool:
        """True if at least one zygote is ready."""
        return bool(self._alive)

    async def close(self) -> None:
        """Kill all zygotes and their programs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_one_alive(self) -> None:
        failures = 0
        while True:
            zygote = ZygoteHandle(self.plan, self.python, self.preload)
            try:
                await asyncio.sleep(START_BACKOFF_S[min(failures, len(START_BACKOFF_S) - 1)])
                await zygote.start()
            except ZygoteStartError as error:
                failures += 1
                logger.error("Cannot start a zygote (attempt %d): %s", failures, error)
                continue
            failures = 0
            self._alive.append(zygote)
            self._any_alive.set()
            try:
                await zygote.closed.wait()
            finally:
                zygote.close()
                self._alive.remove(zygote)
                if not self._alive:
                    self._any_alive.clear()
            self.restarts += 1


def _pid_of(pidfd: int) -> int:
    """Return the process id, or -1 if the process has ended."""
    return int(Path(f"/proc/self/fdinfo/{pidfd}").read_text().rpartition("\nPid:")[2].split()[0])


def _input_file(content: bytes) -> int:
    """Return a descriptor from which `content` can be read. The file cannot be written."""
    if not content:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    fd = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        written = 0
        while written < len(content):
            written += os.pwrite(fd, memoryview(content)[written:], written)
        fcntl.fcntl(fd, _F_ADD_SEALS, _ALL_SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd
