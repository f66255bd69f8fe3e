"""Access to a result store from coroutines: in this process, or in an actor that a Ray cluster shares.

Without Ray, the processes of one machine open the same file. On a cluster, one actor on the head node opens it, so that
the file need not be visible to the nodes, and may be on a network file system.

Invariants of the actor:

- It exits after `IDLE_TIMEOUT_S` without calls, which unlocks the file and frees its memory.
- A caller that arrives while it exits gets a new actor. No result in the file is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from toolroll.errors import ToolrollError
from toolroll.tools.cache.store import IN_MEMORY, ResultStore

logger = logging.getLogger(__name__)

STORE_TIMEOUT_S = 5.0
"""Timeout of one access to the store. A call whose store does not answer is made without the cache."""
ACTOR_START_TIMEOUT_S = 30.0
NO_ANSWER = f"no answer within {STORE_TIMEOUT_S:g} s"
STORE_ERRORS = (sqlite3.Error, OSError, RuntimeError, ValueError)
"""Errors of SQLite and the file system, a closed store, and text that SQLite cannot contain."""
ACTOR_PREFIX = "tool-cache:"
IDLE_TIMEOUT_S = 600.0
"""Time without calls after which the actor exits."""
ACTOR_RETRY_INTERVAL_S = 0.1


class StoreUnavailable(ToolrollError):
    """Raised when the store cannot be used at the moment. The tool is then called without it."""


class StoreService:
    """A `ResultStore` with a clock. Opened on first use.

    Args:
        path: File, or `IN_MEMORY`.
        exclusive: Let no other process open the file.
    """

    def __init__(self, path: str, *, exclusive: bool) -> None:
        self._path, self._exclusive = path, exclusive
        self._store: ResultStore | None = None

    def claim(self, key: str, owner: str, ttl: float | None, waited: float) -> tuple[Any, ...]:
        """Call `ResultStore.claim`."""
        return tuple(self._open().claim(key, owner, time.time(), ttl=ttl, waited=waited))

    def renew(self, keys: list[str], owner: str) -> None:
        """Call `ResultStore.renew`."""
        self._open().renew(keys, owner, time.time())

    def land(self, key: str, owner: str, value: bytes, origin: str, max_bytes: int) -> None:
        """Call `ResultStore.land`."""
        self._open().land(key, owner, value, origin, time.time(), max_bytes=max_bytes)

    def abandon(self, key: str, owner: str, failure: str | None) -> None:
        """Call `ResultStore.abandon`."""
        self._open().abandon(key, owner, time.time(), failure)

    def close(self) -> None:
        """Close the file."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _open(self) -> ResultStore:
        if self._store is None:
            self._store = ResultStore(self._path, exclusive=self._exclusive)
        return self._store


class StoreActor(StoreService):
    """A `StoreService` in a Ray actor, which exits when it is not used.

    Args:
        path: File, or `IN_MEMORY`.
        idle_timeout_s: Time without calls after which it exits.
    """

    def __init__(self, path: str, idle_timeout_s: float) -> None:
        super().__init__(path, exclusive=True)
        self._idle_timeout_s = idle_timeout_s
        self._used_at = time.monotonic()
        threading.Thread(target=self._exit_when_idle, name="tool-cache-idle", daemon=True).start()

    def _open(self) -> ResultStore:
        self._used_at = time.monotonic()
        return super()._open()

    def _exit_when_idle(self) -> None:
        import ray

        while (remaining_s := self._used_at + self._idle_timeout_s - time.monotonic()) > 0:
            time.sleep(remaining_s)
        # A call that has just begun fails and is repeated: SQLite undoes its transaction.
        ray.kill(ray.get_runtime_context().current_actor)


class StoreBackend(Protocol):
    """Calls methods of a `StoreService`."""

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method. Raises StoreUnavailable."""

    def call_sync(self, method: str, *args: Any) -> Any:
        """Call a method from a thread. Raises StoreUnavailable."""

    def close(self) -> None:
        """Close the store."""


class LocalStore:
    """Runs the store in a thread of this process.

    Args:
        path: File, or `IN_MEMORY`.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._service = StoreService(path, exclusive=False)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tool-cache")

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method in the thread."""
        call: Callable[..., Any] = getattr(self._service, method)
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                return await asyncio.get_running_loop().run_in_executor(self._executor, call, *args)
        except STORE_ERRORS as error:
            raise self._unavailable(error) from error

    def call_sync(self, method: str, *args: Any) -> Any:
        """Call a method in the thread, and wait for it."""
        try:
            return self._executor.submit(getattr(self._service, method), *args).result(STORE_TIMEOUT_S)
        except STORE_ERRORS as error:
            raise self._unavailable(error) from error

    def close(self) -> None:
        """Wait for the calls, and close the file."""
        self._executor.submit(self._service.close)
        self._executor.shutdown()

    def _unavailable(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(f"{self._path}: {NO_ANSWER if isinstance(error, TimeoutError) else error}")


class ClusterStore:
    """Runs the store in a detached actor on the head node of the Ray cluster.

    Args:
        path: File on the head node, or `IN_MEMORY` for a store of this job.
        idle_timeout_s: Time without calls after which the actor exits.
    """

    def __init__(self, path: str, idle_timeout_s: float = IDLE_TIMEOUT_S) -> None:
        self._path = path
        self._idle_timeout_s = idle_timeout_s
        self._actor: Any = None

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the actor."""
        from ray.exceptions import RayActorError

        ends = time.monotonic() + STORE_TIMEOUT_S
        while True:
            try:
                return await self._call_actor(method, *args)
            except Exception as error:
                unavailable = self._unavailable(error)
                # The actor was stopped, exits, or is being restarted. Its name may lead to it for another moment.
                if not isinstance(error, RayActorError) or time.monotonic() > ends:
                    raise unavailable from error
                logger.debug("%s: %s", self._path, error)
            await asyncio.sleep(ACTOR_RETRY_INTERVAL_S)

    def call_sync(self, method: str, *args: Any) -> Any:
        """Call a method of the actor, and wait for it."""
        import ray

        try:
            actor = self._actor or self._find_actor()
            return ray.get(getattr(actor, method).remote(*args), timeout=STORE_TIMEOUT_S)
        except Exception as error:
            raise self._unavailable(error) from error

    def close(self) -> None:
        """Do nothing: other processes may use the actor."""

    async def _call_actor(self, method: str, *args: Any) -> Any:
        if self._actor is None:
            self._actor = await asyncio.to_thread(self._find_actor)
        reference = getattr(self._actor, method).remote(*args)
        return await asyncio.wait_for(asyncio.wrap_future(reference.future()), STORE_TIMEOUT_S)

    def _find_actor(self) -> Any:
        import ray

        from toolroll.limiter.token_bucket import shared_actor

        on_head = {"resources": {"node:__internal_head__": 0.001}}
        job = ray.get_runtime_context().get_job_id() if self._path == IN_MEMORY else ""
        actor_class = shared_actor(StoreActor, f"{ACTOR_PREFIX}{job}{self._path}", **on_head)
        actor: Any = actor_class.remote(self._path, self._idle_timeout_s)
        ray.get(actor.__ray_ready__.remote(), timeout=ACTOR_START_TIMEOUT_S)
        return actor

    def _unavailable(self, error: Exception) -> StoreUnavailable:
        """Forget the actor, and return the exception to raise."""
        self._actor = None
        lines = str(error).strip().splitlines() or [NO_ANSWER]
        return StoreUnavailable(f"{self._path}: {lines[-1]}")


def stop_cluster_store(path: str) -> None:
    """Stop the actor of a file, if there is one. A process that still uses it starts it again.

    Args:
        path: The file.
    """
    import ray
    from ray.exceptions import RayError

    from toolroll.limiter.token_bucket import RAY_NAMESPACE

    with contextlib.suppress(RayError, ValueError):
        ray.kill(ray.get_actor(ACTOR_PREFIX + path, RAY_NAMESPACE))
