"""Cache of the results of pure tools: single flight, shared by all processes that use the same store.

    memory of this process → store of the machine or cluster → the tool

Invariants:

- While a call is in flight, all other callers of the same key wait for it, also in other processes.
- A result is stored if the tool returned it, or raised a `PolicyFault`. Other exceptions are never stored.
- An outcome that depends on the caller's deadline is neither stored nor shared: a `CallTimeout`, a result whose metrics
  have `ended_by_deadline`, or an infra fault with `depends_on_deadline`.
- Any other infra fault reaches all callers that waited for the call, so that they do not fail one after another. Each
  of them raises its own copy. Only `BudgetExhausted` is not shared: the limiter's refusal costs nothing.
- If a call ends without an outcome to share (another exception, a fault or a result that is not shared), all callers
  that waited for it make their own calls at once, and not one after another.
- If the caller that makes the call is cancelled or killed, one of the others makes it.
- A failure of the cache fails no call: the tool is called without it. A store that has failed is not used for
  `STORE_PAUSE_S`, so that it delays few calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeGuard
from uuid import uuid4

from toolroll._internal.text import replace_lone_surrogates
from toolroll.errors import BudgetExhausted, CallTimeout, InfraFault, PolicyFault
from toolroll.tools.base_tool import ToolResult
from toolroll.tools.cache.backend import StoreBackend, StoreUnavailable
from toolroll.tools.cache.encoding import NotStorable, decode_outcome, encode_outcome
from toolroll.tools.cache.store import FLIGHT_LEASE_S, NO_OWNER, NOT_SHARED, Claim, StoredResult
from toolroll.tools.cache_settings import CacheSettings

logger = logging.getLogger(__name__)

MEMORY_BYTES = 64 * 1024**2
"""Maximum size of the results that a process keeps in memory."""
ENTRY_OVERHEAD_BYTES = 400
"""Memory that a result in memory takes besides the encoded result: its key, origin, time and containers."""
MIN_POLL_INTERVAL_S = 0.005
"""First interval at which a process asks for the result of another one."""
MAX_POLL_INTERVAL_S = 0.25
RENEWAL_INTERVAL_S = FLIGHT_LEASE_S / 5
STORE_PAUSE_S = 30.0
"""Time for which a store that has failed is not used."""

Call = Callable[[], Awaitable[ToolResult]]


class ResultMemory:
    """The results that were used last, in memory. Thread-safe.

    Args:
        max_bytes: Maximum size of the results and their keys.
    """

    def __init__(self, max_bytes: int = MEMORY_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._results: OrderedDict[str, StoredResult] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str, now: float, ttl: float | None) -> StoredResult | None:
        """Return a result that is younger than `ttl`, or None."""
        with self._lock:
            result = self._results.get(key)
            if result is None or (ttl is not None and now - result.stored_at >= ttl):
                return None
            self._results.move_to_end(key)
            return result

    def put(self, key: str, result: StoredResult) -> None:
        """Add a result, and remove those that were used least recently."""
        with self._lock:
            if key in self._results:
                self._bytes -= _size(self._results.pop(key))
            self._results[key] = result
            self._bytes += _size(result)
            while self._bytes > self._max_bytes:
                self._bytes -= _size(self._results.popitem(last=False)[1])


class ResultCache:
    """Results in one store. All tools, event loops and threads of a process that use the store share it.

    Args:
        backend: Access to the store.
        name: Name of the store, for messages.
    """

    def __init__(self, backend: StoreBackend, name: str) -> None:
        self._backend = backend
        self._name = name
        self._owner = uuid4().hex
        self._memory = ResultMemory()
        self._flights: dict[tuple[int, str], asyncio.Future[Exception | None]] = {}
        """Calls that an event loop makes or waits for. The result is the exception because of which there is no stored
        outcome, or None if there is one or the caller was cancelled."""
        self._held = HeldFlights(lambda keys: backend.call_sync("renew", keys, self._owner))
        self._paused_until = 0.0
        """Time on the clock of `time.monotonic()` until which the store is not used."""
        self._has_warned = False

    async def fetch(self, key: str, call: Call, settings: CacheSettings, origin: str) -> ToolResult:
        """Return the result of a key. Make the call unless its result is stored or another caller is making it.

        Args:
            key: Key of the call.
            call: Makes the call.
            settings: Cache of the tool.
            origin: Id of the trajectory.

        Returns:
            The result. If it is that of another call, its metrics contain `cache`, with its age and origin.

        Raises:
            PolicyFault: If the call raised one.
            InfraFault: If the call raised one, or another one did for which this caller waited.
            Exception: Any other exception of the call.
        """
        loop = asyncio.get_running_loop()
        while True:
            if (result := self._memory.get(key, time.time(), settings.ttl)) is not None:
                return _hit(result)
            flight = self._flights.get((id(loop), key))
            if flight is None:
                return await self._lead(key, call, settings, origin)
            if (error := await asyncio.shield(flight)) is not None:
                return await self._follow(error, key, call, settings, origin)

    def close(self) -> None:
        """Close the store. Its file keeps the results."""
        self._held.close()
        self._backend.close()

    async def _lead(self, key: str, call: Call, settings: CacheSettings, origin: str) -> ToolResult:
        """Get the result from the store or by a call, for all callers in this event loop."""
        loop = asyncio.get_running_loop()
        flight = self._flights[id(loop), key] = loop.create_future()
        try:
            claim = await self._claim(key, settings)
            if claim.result is not None:
                self._memory.put(key, claim.result)
                return _hit(claim.result)
            if claim.failure is None:
                return await self._call(key, call, settings, origin, flight)
            is_shared = claim.failure != NOT_SHARED
            error = InfraFault(claim.failure) if is_shared else NotStorable("The outcome of the call is not shared.")
            flight.set_result(error)
        finally:
            del self._flights[id(loop), key]
            if not flight.done():
                flight.set_result(None)
        return await self._follow(error, key, call, settings, origin)

    async def _follow(self, error: Exception, key: str, call: Call, settings: CacheSettings, origin: str) -> ToolResult:
        """Raise the infra fault of a flight, or make the call if its exception is not shared."""
        if _is_shared(error):
            raise _copy_of(error) from error
        return await self._call(key, call, settings, origin)

    async def _call(
        self,
        key: str,
        call: Call,
        settings: CacheSettings,
        origin: str,
        flight: asyncio.Future[Exception | None] | None = None,
    ) -> ToolResult:
        """Make the call, store its outcome, and end its flight, if it has one, unless the caller is cancelled."""
        outcome: ToolResult | Exception | None = None
        if flight is not None:
            self._held.add(key)
        try:
            outcome = await call()
            return outcome
        except Exception as error:
            outcome = error
            raise
        finally:
            if flight is not None:
                self._held.remove(key)
            owner = NO_OWNER if flight is None else self._owner
            # A cancellation of the caller does not prevent it.
            unstored = await asyncio.shield(asyncio.ensure_future(self._end(key, outcome, settings, origin, owner)))
            if flight is not None:
                flight.set_result(unstored)

    async def _claim(self, key: str, settings: CacheSettings) -> Claim:
        """Wait until there is a result or a failure, or this process owns the flight or cannot use the store."""
        began, interval = time.monotonic(), MIN_POLL_INTERVAL_S
        waited = 0.0
        while True:
            try:
                answer = await self._access("claim", key, self._owner, settings.ttl, waited)
            except StoreUnavailable:
                return Claim(is_owner=True)
            claim = Claim(answer[0] and StoredResult(*answer[0]), *answer[1:])
            if claim != Claim():
                return claim
            await asyncio.sleep(interval)
            interval = min(1.5 * interval, MAX_POLL_INTERVAL_S)
            waited = time.monotonic() - began

    async def _end(
        self, key: str, outcome: ToolResult | Exception | None, settings: CacheSettings, origin: str, owner: str
    ) -> Exception | None:
        """Store the outcome, or end the flight without one. Return the exception because of which it is not stored."""
        encoded = await self._encode(outcome)
        with contextlib.suppress(StoreUnavailable):
            if isinstance(encoded, bytes):
                origin = replace_lone_surrogates(origin)
                self._memory.put(key, StoredResult(encoded, origin, time.time()))
                await self._access("land", key, owner, encoded, origin, settings.max_mb * 1024**2)
            elif owner != NO_OWNER:
                await self._access("abandon", key, owner, None if encoded is None else _failure_of(encoded))
        return None if isinstance(encoded, bytes) else encoded

    async def _encode(self, outcome: ToolResult | Exception | None) -> bytes | Exception | None:
        """Return the bytes of an outcome, the exception because of which it is not stored, or None without outcome."""
        if isinstance(outcome, CallTimeout) or not isinstance(outcome, ToolResult | PolicyFault):
            return outcome
        if isinstance(outcome, ToolResult) and outcome.metrics.get("ended_by_deadline") is True:
            return NotStorable("The deadline ended the call.")
        try:
            if isinstance(outcome, ToolResult) and outcome.response.image:
                return await asyncio.to_thread(encode_outcome, outcome)  # encoding an image takes long
            return encode_outcome(outcome)
        except Exception as error:  # metrics may contain anything, and the call itself has succeeded
            logger.warning("A result cannot be cached: %s: %s", type(error).__name__, error)
            return NotStorable(f"{type(error).__name__}: {error}")

    async def _access(self, method: str, *args: Any) -> Any:
        """Call a method of the store.

        Raises:
            StoreUnavailable: If the store has failed, now or during the last `STORE_PAUSE_S`.
        """
        if time.monotonic() < self._paused_until:
            raise StoreUnavailable(f"{self._name}: failed a moment ago")
        try:
            return await self._backend.call(method, *args)
        except StoreUnavailable as error:
            self._paused_until = time.monotonic() + STORE_PAUSE_S
            if not self._has_warned:
                self._has_warned = True
                logger.warning("Tools are called without the cache: %s", error)
            raise


class HeldFlights:
    """Renews the leases of the flights of this process, in a thread, which no busy event loop delays.

    Args:
        renew: Renews the leases of keys.
    """

    def __init__(self, renew: Callable[[list[str]], Any]) -> None:
        self._renew = renew
        self._keys: list[str] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, key: str) -> None:
        """Renew the lease of a key from now on."""
        with self._changed:
            self._keys.append(key)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tool-cache-leases", daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, key: str) -> None:
        """Stop renewing the lease of a key."""
        with self._changed:
            self._keys.remove(key)

    def close(self) -> None:
        """Stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._keys or self._closed)
                self._changed.wait_for(lambda: self._closed, timeout=RENEWAL_INTERVAL_S)
                if self._closed:
                    return
                keys = list(self._keys)
            if keys:
                try:
                    self._renew(keys)
                except StoreUnavailable as error:
                    logger.info("Cannot renew the leases of %d calls: %s", len(keys), error)


def _size(result: StoredResult) -> int:
    return len(result.value) + ENTRY_OVERHEAD_BYTES


def _hit(result: StoredResult) -> ToolResult:
    age = max(0.0, time.time() - result.stored_at)
    return decode_outcome(result.value, {"age_s": round(age, 3), "origin": result.origin})


def _is_shared(error: Exception) -> TypeGuard[InfraFault]:
    return isinstance(error, InfraFault) and not (error.depends_on_deadline or isinstance(error, BudgetExhausted))


def _failure_of(error: Exception) -> str:
    """Return the failure that those who wait for the flight in other processes get."""
    if not _is_shared(error):
        return NOT_SHARED
    return replace_lone_surrogates(str(error)) or type(error).__name__


def _copy_of(fault: InfraFault) -> InfraFault:
    """Return a fault of the same class without the traceback and the metrics, which are those of another call."""
    copied = type(fault).__new__(type(fault), *fault.args)  # __init__ may have other parameters
    vars(copied).update({name: value for name, value in vars(fault).items() if name != "metrics"})
    return copied
