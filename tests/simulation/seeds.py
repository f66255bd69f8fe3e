"""The simulations by name, and the report of a seed that fails."""

from __future__ import annotations

import tempfile
from pathlib import Path

from .faults import Simulation, Violation
from .limiter_simulation import LimiterSimulation
from .run_simulation import RunSimulation

SIMULATIONS: dict[str, type[Simulation]] = {"run": RunSimulation, "limiter": LimiterSimulation}
MEMORY = Path("/dev/shm")
"""File system in memory, which is much faster than a disk."""


def simulate(name: str, seed: int) -> Simulation:
    """Run a simulation with random faults. Raises Violation, with the command to replay it, if an invariant fails."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.exists() else None) as directory:
        simulation = SIMULATIONS[name](seed, Path(directory))
        try:
            simulation.run()
        except Violation as violation:
            raise Violation(f"{violation}\nReplay it: python -m tests.simulation {name} {seed}") from None
        return simulation
