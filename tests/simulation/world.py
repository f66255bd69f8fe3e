"""A deterministic world in which real asyncio code runs: processes, their clocks, a network, and faults.

One seed determines everything: the clock is virtual, and all random numbers come from one generator. Each process is an
event loop. A paused process runs no callback until it is resumed, and then runs all that are due; a killed process runs
none at all. `time.monotonic()` is the clock of the process whose callback runs, which has its own origin and speed.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import logging
import os
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

MAX_DELAY_S = 0.05
"""Maximum delay of a message without a fault."""
MAX_THREAD_DELAY_S = 0.02
MAX_EVENTS = 300_000
"""Number of callbacks after which a simulation that does not end is stopped."""

MAX_CANCELLATIONS = 5
"""Number of times that a task is cancelled. Tasks of killed processes may need more than one."""


class ConnectionLost(Exception):
    """Raised in the caller if a call may not have reached its target, or its answer was lost."""


class WouldBlock(Exception):
    """Raised by `time.sleep`, which would stop all processes."""


class Callback:
    """A scheduled callback of a process, or of the world."""

    __slots__ = ("args", "context", "function", "is_cancelled")

    def __init__(self, function: Callable[..., object], args: tuple[Any, ...], context: Any) -> None:
        self.function, self.args, self.context, self.is_cancelled = function, args, context, False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled


class World:
    """The clock, the processes and the random numbers of one simulation.

    Args:
        seed: Determines the simulation.
        clock_error: Maximum deviation of the speed of a process's clock from the true speed.
    """

    def __init__(self, seed: int, clock_error: float) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.current: Process | None = None
        """The process whose callback runs."""
        self.processes: list[Process] = []
        self.trace: list[str] = []
        """Faults and other events, for the report of a failure."""
        self._clock_error = clock_error
        self._queue: list[tuple[float, float, int, Process | None, Callback]] = []
        self._count = 0
        self._stopped = False

    def log(self, text: str) -> None:
        self.trace.append(f"{self.now:8.3f} {text}")

    def start(self, name: str, main: Callable[[Process], Coroutine[Any, Any, object]]) -> Process:
        """Start a process that runs a coroutine."""
        error = self.random.uniform(-self._clock_error, self._clock_error)
        process = Process(self, name, 1.0 + error, self.random.uniform(0.0, 1e6))
        self.processes.append(process)
        process.call_soon(lambda: process.create_task(main(process)))
        return process

    def at(self, when: float, function: Callable[[], object], process: Process | None = None) -> None:
        """Call a function at a time of the world, in a process if one is given."""
        self.schedule(max(when, self.now), process, Callback(function, (), None))

    def schedule(self, when: float, process: Process | None, callback: Callback) -> None:
        self._count += 1
        heapq.heappush(self._queue, (when, when, self._count, process, callback))

    def stop(self) -> None:
        """End `run()` after the current callback."""
        self._stopped = True

    def run(self, deadline: float) -> bool:
        """Run until `stop()` is called. Return False if it is not called before the deadline."""
        queue, self._stopped = self._queue, False
        for _ in range(MAX_EVENTS):
            if self._stopped or not queue or queue[0][0] > deadline:
                break
            when, due, count, process, callback = heapq.heappop(queue)
            if callback.is_cancelled:
                continue
            if process is not None and not process.alive:
                process.callbacks_after_death.append(callback)
                continue
            if process is not None and process.resumes_at > when:
                heapq.heappush(queue, (process.resumes_at, due, count, process, callback))
                continue
            self.now = when
            if process is not self.current:
                self._switch_to(process)
            if callback.context is None:
                callback.function(*callback.args)
            else:
                callback.context.run(callback.function, *callback.args)
        self._switch_to(None)
        return self._stopped

    def _switch_to(self, process: Process | None) -> None:
        self.current = process
        asyncio._set_running_loop(process)

    def monotonic(self) -> float:
        return self.now if self.current is None else self.current.time()

    def close(self) -> list[BaseException]:
        """Cancel all tasks, so that none is destroyed while it is pending, and return exceptions that were ignored."""
        for process in self.processes:
            process.alive, process.resumes_at = True, 0.0
            for callback in process.callbacks_after_death:
                self.schedule(self.now, process, callback)
        for _ in range(MAX_CANCELLATIONS):
            pending = [task for process in self.processes for task in process.tasks if not task.done()]
            for task in pending:
                task.cancel()
            if pending:
                self.run(self.now + 10.0)
        for process in self.processes:
            process.resources.close()
        tasks = [task for process in self.processes for task in process.tasks if task.done() and not task.cancelled()]
        return [task.exception() for task in tasks if task._log_traceback]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the clock and the random numbers of this Python process by those of the world."""

        def sleep(_: float) -> None:
            raise WouldBlock

        rng = random.Random(self.random.random())
        disabled = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            with (
                mock.patch.object(time, "monotonic", self.monotonic),
                mock.patch.object(time, "sleep", sleep),
                mock.patch.object(os, "urandom", rng.randbytes),
                mock.patch.object(random, "random", rng.random),
            ):
                yield
        finally:
            self._switch_to(None)
            logging.disable(disabled)


class Process(asyncio.AbstractEventLoop):
    """A process: an event loop that can be paused and killed. Created by `World.start()`."""

    def __init__(self, world: World, name: str, clock_speed: float, clock_origin: float) -> None:
        self.world, self.name = world, name
        self.alive = True
        self.resumes_at = 0.0
        """Time of the world until which the process is paused."""
        self.tasks: list[asyncio.Task[Any]] = []
        self.resources = ExitStack()
        """Files and locks, which the operating system closes when the process ends."""
        self.on_kill: list[Callable[[], object]] = []
        self.callbacks_after_death: list[Callback] = []
        self._clock_speed, self._clock_origin = clock_speed, clock_origin

    def pause(self, seconds: float) -> None:
        self.world.log(f"{self.name} is paused for {seconds:.2f} s")
        self.resumes_at = max(self.resumes_at, self.world.now + seconds)

    def kill(self) -> None:
        if self.alive:
            self.world.log(f"{self.name} is killed")
            self.alive = False
            self.resources.close()
            for function in self.on_kill:
                function()

    # The part of the interface of event loops that is used

    def time(self) -> float:
        return self._clock_origin + self._clock_speed * self.world.now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        scheduled = Callback(callback, args, context or contextvars.copy_context())
        self.world.schedule(self.world.now, self, scheduled)
        return scheduled

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        scheduled = Callback(callback, args, context or contextvars.copy_context())
        due = (when - self._clock_origin) / self._clock_speed
        self.world.schedule(max(due, self.world.now), self, scheduled)
        return scheduled

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    call_soon_threadsafe = call_soon

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self.tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Call a function after a short delay. A thread of a paused process is paused too."""
        answer = self.create_future()

        def call() -> None:
            try:
                result = func(*args)
            except Exception as error:
                answer.cancelled() or answer.set_exception(error)
            else:
                answer.cancelled() or answer.set_result(result)

        self.call_later(self.world.random.uniform(0.0, MAX_THREAD_DELAY_S), call)
        return answer

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        pass  # World.close() finds the exceptions of tasks


class Network:
    """Calls between processes, as Ray makes them.

    A message is delayed and can overtake others. A message to or from an isolated process is lost, or arrives after the
    process is connected again. If the target dies, its callers notice it after some time.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.max_delay_s = MAX_DELAY_S
        self.copy_probability = 0.0
        """Probability that a request arrives a second time."""
        self.max_copy_delay_s = 30.0
        self.max_death_notice_s = 1.0
        self._services: dict[str, tuple[Process, object]] = {}
        self._isolated_until: dict[str, float] = {}
        self._closed = False

    def serve(self, process: Process, service: object) -> None:
        """Make an object callable under the name of its process, in place of an earlier process of that name."""
        self._services[process.name] = process, service

    def isolate(self, name: str, seconds: float) -> None:
        """Cut the connection of a process to all others."""
        self.world.log(f"{name} is isolated for {seconds:.2f} s")
        self._isolated_until[name] = max(self._isolated_until.get(name, 0.0), self.world.now + seconds)

    def close(self) -> None:
        """Fail all further calls."""
        self._closed = True

    def call(self, target: str, method: str, *args: Any, may_repeat: bool = True) -> asyncio.Future[Any]:
        """Call a method of another process. The result raises ConnectionLost if it cannot be obtained.

        Args:
            target: Name of the process.
            method: Name of the method.
            args: Arguments of the method.
            may_repeat: Whether the request may arrive twice.
        """
        caller, rng = self.world.current, self.world.random
        assert caller is not None
        answer = caller.create_future()
        if self._closed:
            answer.set_exception(ConnectionLost("closed"))
            return answer
        self._send(caller.name, target, lambda: self._arrive(caller, answer, target, method, args))
        if may_repeat and rng.random() < self.copy_probability:
            delay = rng.uniform(0.0, self.max_copy_delay_s)
            self.world.at(self.world.now + delay, lambda: self._arrive(caller, answer, target, method, args))
        return answer

    def _send(self, source: str, target: str, deliver: Callable[[], object]) -> None:
        """Deliver a message after a delay, unless it is lost."""
        world = self.world
        connected_at = max(self._isolated_until.get(name, 0.0) for name in (source, target))
        delay = world.random.uniform(0.0, self.max_delay_s)
        if connected_at > world.now + delay and world.random.random() < 0.5:
            return
        world.at(max(world.now, connected_at) + delay, deliver)

    def _arrive(self, caller: Process, answer: Any, target: str, method: str, args: tuple[Any, ...]) -> None:
        process, service = self._services.get(target, (None, None))
        if process is None or not process.alive:
            self._fail(caller, answer)
            return

        def serve() -> None:
            process.on_kill.append(lambda: self._fail(caller, answer))
            task = process.create_task(getattr(service, method)(*args))
            task.add_done_callback(lambda task: self._respond(process, caller, answer, task))

        self.world.at(self.world.now, serve, process)

    def _respond(self, process: Process, caller: Process, answer: Any, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            return
        if error := task.exception():
            self._send(process.name, caller.name, lambda: self._settle(caller, answer, error=error))
        else:
            self._send(process.name, caller.name, lambda: self._settle(caller, answer, result=task.result()))

    def _fail(self, caller: Process, answer: Any) -> None:
        if not answer.done():
            notice = self.world.random.uniform(0.0, self.max_death_notice_s)
            error = ConnectionLost("the process is dead")
            self.world.at(self.world.now + notice, lambda: self._settle(caller, answer, error=error))

    def _settle(self, caller: Process, answer: Any, result: Any = None, error: Any = None) -> None:
        def settle() -> None:
            if not answer.done():
                answer.set_result(result) if error is None else answer.set_exception(error)

        self.world.at(self.world.now, settle, caller)
