"""Simulation of the limiter: the real ledger's actor, slot queues and lease fences, and a server that counts requests.

Invariants:

- The server never runs more requests than the limit.
- Soon after the last fault, all slots are in use again, and every process gets some: none starves.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from toolroll.limiter import cluster, leased_limiter, token_bucket
from toolroll.limiter.ledger import ledger
from toolroll.limiter.ledger.policy import LimitPolicy
from toolroll.sandbox.client import CLOCK_REFRESH_INTERVAL_S
from toolroll.sandbox.server.hub.fencing import LeaseFences, LeaseToken
from toolroll.sandbox.server.hub.rejections import LeaseLost
from toolroll.sandbox.server_clock import ServerClock

from .faults import Fault, Simulation, Violation
from .world import ConnectionLost, Process

LEDGER, SERVER, WATCHER = "ledger", "server", "watcher"
RESOURCE = "sandbox"
TTL_S = 4.0
TICK_INTERVAL_S = 0.8
"""Interval of ticks and reports while slots are contended. Longer than the real one, which would take too long here."""
MAX_EXECUTION_S = 3.0
MAX_QUEUE_S = 2.0 * TTL_S
FENCE_TIMEOUT_S = 5.0
RETRY_DELAY_S = 0.2
MAX_CLOCK_ERROR = 0.0002
RECOVERY_S = 2 * TTL_S + MAX_QUEUE_S + MAX_EXECUTION_S + 2.0
"""Time after the last fault in which all slots must be available: a ledger may learn for a lease and a hold."""
OBSERVATION_S = 60.0
"""Time in which every process must be served at least once. Slots rotate, and a new process waits for its turn."""
OBSERVED_FRACTION = 0.1
"""Fraction of the random simulations that are observed after the faults, which takes most of the time."""


class LimiterSimulation(Simulation):
    """Processes that share a limit.

    Args:
        seed: Determines the simulation.
        directory: Not used.
        faults: Faults. Default: random faults, and random values of all other arguments.
        limit: Limit of the resource.
        holders: Number of processes that use the resource.
        requests: Number of concurrent requests of each process.
        max_death_notice_s: Maximum time until the ledger is notified of the death of a process.
        has_fences: Whether the server can fence leases. It always rejects requests whose slot has expired.
    """

    POINTS = ("before acquire", "after acquire", "before send", "after answer")

    def __init__(
        self,
        seed: int,
        directory: Path | None = None,
        faults: Sequence[Fault] | None = None,
        *,
        limit: int = 2,
        holders: int = 2,
        requests: int = 2,
        max_death_notice_s: float = 1.0,
        has_fences: bool = True,
    ) -> None:
        super().__init__(seed, TTL_S, 1000.0, MAX_CLOCK_ERROR)
        rng = self.world.random
        if faults is None:
            limit, holders, requests = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 2)
            max_death_notice_s, has_fences = rng.choice([0.1, 1.0, 2 * TTL_S]), rng.random() < 0.7
        self._is_observed = faults is not None or rng.random() < OBSERVED_FRACTION
        self._limit, self._requests, self._max_death_notice_s = limit, requests, max_death_notice_s
        self._has_fences = has_fences
        self._saved: dict[str, str] = {}
        """Ray's key-value store, which survives all faults."""
        self._holders = [f"holder-{index}" for index in range(holders)]
        self._bucket: token_bucket.TokenBucketWorker | None = None
        self.in_flight = 0
        self._max_in_flight = 0
        self._served: Counter[str] = Counter()
        self._violation = ""
        for name in (LEDGER, SERVER, WATCHER, *self._holders):
            self.start(name)
        if faults is None:
            self.targets = [LEDGER, SERVER, *2 * self._holders]
            self.add_random_faults()
        else:
            self.add_faults(faults)
        self.world.at(TTL_S, self._observe_when_recovered)

    def run(self) -> None:
        """Run the simulation. Raises Violation if an invariant does not hold."""
        with self._patched():
            super().run()

    def check(self, ended: bool) -> None:
        if self._violation:
            raise Violation(self._violation)
        if not ended:
            raise Violation("The simulation has not ended.")
        if not self._is_observed:
            return
        expected = min(self._limit, len(self._holders) * self._requests)
        if self._max_in_flight < expected:
            raise Violation(f"Slots are lost: at most {self._max_in_flight} of {expected} are in use after the faults.")
        if starved := [name for name in self._holders if not self._served[name]]:
            raise Violation(f"Processes starve: {starved}.")

    async def main(self, process: Process) -> None:
        """Run the ledger's actor, the server, the node watcher, or a process that uses the resource."""
        if process.name == LEDGER:
            self._bucket = token_bucket.TokenBucketWorker(RESOURCE, LimitPolicy.fixed(self._limit), TTL_S, self._fence)
            self.network.serve(process, self._bucket)
        elif process.name == SERVER:
            self.network.serve(process, Server(self, process))
        elif process.name in self._holders:
            limiter = cluster.ClusterLimiter(RESOURCE, self._limit, TTL_S)
            process.on_kill.append(lambda: self._on_death(limiter.holder))
            clock = ServerClock()
            for _ in range(self._requests):
                process.create_task(self._send_requests(process, limiter, clock))

    def count_request(self, change: int) -> None:
        """Count a request that starts or ends at the server, and stop the simulation if there are too many."""
        self.in_flight += change
        self._max_in_flight = max(self._max_in_flight, self.in_flight)
        if self.in_flight > self._limit:
            self._violation = self._violation or f"{self.in_flight} requests are in flight, the limit is {self._limit}."
            self.world.stop()

    def _observe_when_recovered(self) -> None:
        recovered_at = self.faults_end_at + (RECOVERY_S if self._is_observed else TTL_S + MAX_QUEUE_S)
        if recovered_at > self.world.now:
            self.world.at(recovered_at, self._observe_when_recovered)
            return
        if not self._is_observed:
            self.world.stop()
            return
        self.world.log("all faults have ended")
        self._armed.clear()
        self._served.clear()
        self._max_in_flight = self.in_flight
        self.world.at(self.world.now + OBSERVATION_S, self.world.stop)

    async def _send_requests(self, process: Process, limiter: cluster.ClusterLimiter, clock: ServerClock) -> None:
        """Send requests one after another, each in a slot, like `LimitedSandbox`."""
        while True:
            await self.reach("before acquire")
            async with limiter.slot(hold=MAX_QUEUE_S + MAX_EXECUTION_S) as slot:
                await self.reach("after acquire")
                start_by = slot.expires_at - MAX_EXECUTION_S
                await self.reach("before send")
                try:
                    async with asyncio.timeout_at(slot.expires_at):
                        if time.monotonic() - clock.measured_at > CLOCK_REFRESH_INTERVAL_S:
                            sent_at = time.monotonic()
                            clock.measure(await self._call_server("time"), sent_at, time.monotonic())
                        if start_by > time.monotonic():
                            await self._call_server(
                                "execute", slot.lease, clock.at(start_by), clock.at(slot.granted_at)
                            )
                            self._served[process.name] += 1
                            await self.reach("after answer")
                except (TimeoutError, LeaseLost):
                    pass
            await asyncio.sleep(self.world.random.uniform(0.0, 0.2))

    async def _call_server(self, method: str, *args: Any) -> Any:
        """Call the server, and again after its death, with which all its requests end."""
        while True:
            try:
                return await self.network.call(SERVER, method, *args, may_repeat=False)
            except ConnectionLost:
                await asyncio.sleep(RETRY_DELAY_S)

    async def _fence(self, holder: str, lease: int) -> int | None:
        if not self._has_fences:
            return None
        try:
            async with asyncio.timeout(FENCE_TIMEOUT_S):
                running: int = await self._call_server("fence", holder, lease)
                return running
        except TimeoutError:
            return None

    def _on_death(self, holder: str) -> None:
        """Let the node watcher notify the ledger of the death of a process."""
        notice = self.world.random.uniform(0.0, self._max_death_notice_s)

        async def notify() -> None:
            while True:
                try:
                    async with asyncio.timeout(TTL_S):
                        return await self.network.call(LEDGER, "mark_dead", holder)
                except (ConnectionLost, TimeoutError):
                    await asyncio.sleep(0.2)

        watcher = self.processes[WATCHER]
        self.world.at(self.world.now + notice, lambda: watcher.create_task(notify()), watcher)

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """Replace Ray by the simulated network."""
        world, network = self.world, self.network

        def method(name: str) -> Any:
            return SimpleNamespace(remote=lambda *args: network.call(LEDGER, name, *args))

        async def watch(*args: Any) -> bool:
            return True

        def thread(_: str) -> Any:
            process = world.current
            assert process is not None
            return SimpleNamespace(submit=process.create_task, call_soon_threadsafe=process.call_soon)

        bucket = SimpleNamespace(report=method("report"), deregister=method("deregister"))
        watcher = SimpleNamespace(watch=SimpleNamespace(remote=watch))
        patches: list[tuple[Any, str, Any]] = [
            (os, "getpid", lambda: 1),
            (ledger, "CONTENDED_TICK_INTERVAL_S", TICK_INTERVAL_S),
            (ledger, "MIN_CHANGE_REPORT_INTERVAL_S", TICK_INTERVAL_S),
            (token_bucket, "LimiterMetrics", mock.MagicMock()),
            (token_bucket, "_internal_kv_get", lambda key, namespace: self._saved.get(key)),
            (token_bucket, "_internal_kv_put", lambda key, value, namespace: self._saved.update({key: value})),
            (cluster, "connected_cluster", lambda: "the cluster"),
            (cluster, "get_or_create_token_bucket", lambda *args: bucket),
            (cluster, "get_node_watcher", lambda: watcher),
            (cluster, "process_start_time", lambda pid: "0"),
            (leased_limiter, "shared_event_loop_thread", thread),
        ]
        with ExitStack() as stack:
            for target, name, value in patches:
                stack.enter_context(mock.patch.object(target, name, value))
            yield


class Server:
    """A sandbox server, which counts the requests that run and rejects those whose slot has expired or was fenced."""

    def __init__(self, simulation: LimiterSimulation, process: Process) -> None:
        self._simulation, self._process = simulation, process
        self._fences = LeaseFences(simulation.world.now)
        self._running = 0
        process.on_kill.append(lambda: simulation.count_request(-self._running))

    async def time(self) -> float:
        return self._simulation.world.now

    async def execute(self, lease: str, start_by: float, granted_at: float) -> None:
        if self._simulation.world.now > start_by:
            raise LeaseLost("The request arrived after its deadline.")
        token = LeaseToken.parse(lease)
        self._fences.start(token, granted_at)
        self._count(1)
        try:
            await asyncio.sleep(self._simulation.world.random.uniform(1.0, MAX_EXECUTION_S))
        finally:
            self._count(-1)
            self._fences.end(token)

    async def fence(self, holder: str, lease: int) -> int:
        return self._fences.fence(holder, lease)

    def _count(self, change: int) -> None:
        self._running += change
        self._simulation.count_request(change)
