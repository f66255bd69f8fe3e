"""Run coroutines from blocking code, on an event loop in a background thread.

The loop runs until it is closed, so connections and other state that belong to it stay open between calls.

Invariants:

- A caller that is interrupted while it waits, for example by Ctrl+C, cancels its coroutine.
- A coroutine that raises SystemExit or KeyboardInterrupt ends its own call and not the loop.
- A forked process never uses or closes an event loop of its parent, and never destroys a shared one. Both processes
  share the epoll descriptor, so destroying the copy would unregister the parent's sockets.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0
"""Timeout for cancelled tasks to finish when a thread is closed."""


class EventLoopThread:
    """An event loop in a daemon thread, which starts at once.

    Args:
        name: Name of the thread.
        loop_factory: Function that creates the event loop, for example `uvloop.new_event_loop`.

    Example:
        >>> async def add(a: int, b: int) -> int:
        ...     return a + b
        >>> thread = EventLoopThread("adder")
        >>> thread.run(add(1, 2))
        3
        >>> thread.close()
    """

    def __init__(self, name: str, loop_factory: Callable[[], AbstractEventLoop] = asyncio.new_event_loop) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # orders submit() and close(): a submitted coroutine runs or is cancelled
        self._closed = False
        self._runner = asyncio.Runner(loop_factory=loop_factory)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result.

        Must not be called from the loop's thread, which would wait for itself.

        Args:
            coroutine: Coroutine to run.

        Returns:
            The coroutine's result.

        Raises:
            RuntimeError: If the thread is closed or belongs to the parent process.
            BaseException: Any exception of the coroutine. If the caller is interrupted instead, the coroutine is
                cancelled.
        """
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop without waiting for it.

        Args:
            coroutine: Coroutine to run.

        Returns:
            A future of the result. Cancelling it cancels the coroutine.

        Raises:
            RuntimeError: If the thread is closed or belongs to the parent process.
        """
        thread = f"Event loop thread {self._thread.name!r}"
        if self._pid != os.getpid():
            coroutine.close()
            raise RuntimeError(
                f"{thread} belongs to the parent process {self._pid}. Create another one after the fork."
            )
        with self._lock:
            if self._closed:
                coroutine.close()
                raise RuntimeError(f"{thread} is closed. Create another one.")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> None:
        """Call a function on the loop's thread. May be called from any thread.

        Args:
            callback: Function without arguments. It must not block.

        Raises:
            RuntimeError: If the thread is closed.
        """
        self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        """Cancel all tasks, close the loop and wait for the thread to end, for at most `CLOSE_TIMEOUT_S`.

        Does nothing if the thread is already closed or belongs to the parent process.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run_loop(self) -> None:
        with self._runner:
            while not self._closed:
                # A task that raises one of these stops the loop, but its exception still reaches the caller.
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    self._loop.run_forever()


_shared_threads: dict[tuple[int, str], EventLoopThread] = {}
"""Shared threads by process id and name. A forked process keeps those of its parent: their event loops must not be
destroyed."""
_lock = threading.Lock()
# A forked process must not inherit a lock that another thread of the parent holds.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def shared_event_loop_thread(name: str, *, close_at_exit: bool = False) -> EventLoopThread:
    """Return this process's event loop thread of the given name, starting it if necessary.

    May be called from any thread. A forked process starts its own thread.

    Args:
        name: Name of the thread. Callers with the same name share the thread; work that must not be delayed by other
            work, such as renewing a lease, needs its own name.
        close_at_exit: Close the thread when the interpreter exits. Only the call that starts the thread decides.
    """
    key = os.getpid(), name
    with _lock:
        if key not in _shared_threads:
            _shared_threads[key] = EventLoopThread(name)
            if close_at_exit:
                atexit.register(_shared_threads[key].close)
        return _shared_threads[key]
