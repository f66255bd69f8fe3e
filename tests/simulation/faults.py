"""Simulations of several processes under faults: single faults, pairs and triples, which often overlap."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from .world import Network, Process, World

MAX_FAULTS = 3
MAX_RESTART_DELAY_S = 3.0
TRACE_LINES = 40
"""Number of events in the report of a failure."""


class Violation(AssertionError):
    """Raised when an invariant does not hold in a simulation."""


class Fault(NamedTuple):
    """A fault."""

    after: float
    """Time since the fault before this one, or since the start."""
    kind: str
    """`pause`, `kill` or `isolate` a process; or `slow` (all messages are delayed) or `copies` (requests arrive again
    later)."""
    target: str = ""
    """Name of the process."""
    seconds: float = 0.0
    point: str = ""
    """Point of the code (`Simulation.reach()`) at which the fault begins; if empty, it begins anywhere."""


class Simulation:
    """Processes that are restarted when they are killed, under faults.

    Args:
        seed: Determines the simulation.
        lease_s: Lifetime of the leases in the simulated system. Faults last for about as long.
        deadline: Time of the world at which the simulation must have ended.
        clock_error: Maximum deviation of the speed of a process's clock.
    """

    POINTS: tuple[str, ...] = ()
    """Points of the code at which faults may begin."""

    def __init__(self, seed: int, lease_s: float, deadline: float, clock_error: float) -> None:
        self.world = World(seed, clock_error)
        self.network = Network(self.world)
        self.lease_s = lease_s
        self.processes: dict[str, Process] = {}
        """The current process of each name."""
        self.targets: list[str] = []
        """Names of processes that random faults affect; more than once for those that are affected more often."""
        self.faults_end_at = 0.0
        """Time of the world at which all faults so far have ended."""
        self._deadline = deadline
        self._armed: dict[tuple[str, str], Sequence[Fault]] = {}
        """Faults that wait for a process to reach a point, each with those that follow it."""

    async def main(self, process: Process) -> None:
        """Run a process."""
        raise NotImplementedError

    def check(self, ended: bool) -> None:
        """Raise Violation if an invariant does not hold after the simulation."""
        raise NotImplementedError

    def run(self) -> None:
        """Run the simulation. Raises Violation if an invariant does not hold."""
        try:
            with self.world.installed():
                ended = self.world.run(self._deadline)
                self.network.close()
                ignored = self.world.close()
            self.check(ended)
            if ignored:
                raise Violation(f"A task failed: {ignored[0]!r}.")
        except Violation as violation:
            raise Violation("\n".join([str(violation), *self.world.trace[-TRACE_LINES:]])) from None

    def start(self, name: str) -> None:
        """Start the process of a name, and again each time after it was killed."""
        process = self.processes[name] = self.world.start(name, self.main)
        process.on_kill.append(lambda: self._restart(name))

    async def reach(self, point: str) -> None:
        """Let a fault that waits for this point begin in the current process."""
        process = self.world.current
        assert process is not None
        if faults := self._armed.pop((process.name, point), None):
            self.world.log(f"{process.name} reaches {point!r}")
            self._apply(faults)
            await asyncio.sleep(0)  # a process that was paused continues here, and one that was killed never

    def add_faults(self, faults: Sequence[Fault]) -> None:
        """Add faults, each a time after the one before."""
        if faults:
            self.world.at(self.world.now + faults[0].after, lambda: self._begin(faults))

    def add_random_faults(self) -> None:
        """Add one to three faults. A later one is likely to begin during or soon after the one before."""
        rng, lease_s = self.world.random, self.lease_s
        faults, after = [], rng.uniform(0.0, 1.5 * lease_s)
        for _ in range(rng.randint(1, MAX_FAULTS)):
            kind = rng.choice(["pause", "pause", "kill", "isolate", "slow", "copies"])
            seconds = lease_s * rng.choice([rng.uniform(0.0, 0.5), rng.uniform(0.8, 1.2), rng.uniform(1.0, 4.0)])
            point = rng.choice(["", *self.POINTS])
            faults.append(Fault(after, kind, rng.choice(self.targets), seconds, point))
            after = rng.choice([rng.uniform(0.0, 0.1 * lease_s), rng.uniform(0.0, seconds), rng.uniform(0.0, lease_s)])
        self.add_faults(faults)
        self.network.copy_probability = rng.choice([0.0, 0.0, 0.3])
        self.network.max_copy_delay_s = lease_s * rng.choice([0.1, 1.0, 3.0])

    def _begin(self, faults: Sequence[Fault]) -> None:
        if faults[0].point:
            self._armed[faults[0].target, faults[0].point] = faults
        else:
            self._apply(faults)

    def _apply(self, faults: Sequence[Fault]) -> None:
        fault, network = faults[0], self.network
        duration = MAX_RESTART_DELAY_S if fault.kind == "kill" else fault.seconds
        self.faults_end_at = max(self.faults_end_at, self.world.now + duration)
        if fault.kind == "pause":
            self.processes[fault.target].pause(fault.seconds)
        elif fault.kind == "kill":
            self.processes[fault.target].kill()
        elif fault.kind == "isolate":
            network.isolate(fault.target, fault.seconds)
        else:
            self.world.log(f"{fault.kind} for {fault.seconds:.2f} s")
            name, value = ("max_delay_s", 0.4 * self.lease_s) if fault.kind == "slow" else ("copy_probability", 0.9)
            normal = getattr(network, name)
            setattr(network, name, value)
            self.world.at(self.world.now + fault.seconds, lambda: setattr(network, name, normal))
        self.add_faults(faults[1:])

    def _restart(self, name: str) -> None:
        delay = self.world.random.uniform(0.0, MAX_RESTART_DELAY_S)
        self.world.at(self.world.now + delay, lambda: self.start(name))
