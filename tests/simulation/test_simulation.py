"""The distributed parts keep their invariants under faults: random ones, and sequences that broke them before."""

from pathlib import Path
from typing import Any

import pytest

from simulation.faults import Fault
from simulation.limiter_simulation import TTL_S, LimiterSimulation
from simulation.run_simulation import RunSimulation
from simulation.seeds import SIMULATIONS, simulate
from toolroll.rollout.distributed.dispatch import WORKER_LEASE_S

SEEDS_PER_SEQUENCE = 10

RUN_SEQUENCES: dict[str, tuple[list[Fault], dict[str, Any]]] = {
    "process of a local run is paused several times": (
        [Fault(1.2 * WORKER_LEASE_S, "pause", "coordinator", 1.1 * WORKER_LEASE_S)] * 5,
        {"workers": 0, "rows": 30, "max_execution_s": 3.0},
    ),
    "samples block the event loop of a local run": ([], {"workers": 0, "blocking_s": 1.1 * WORKER_LEASE_S}),
    "samples block the event loop for longer than the lease": ([], {"blocking_s": 1.1 * WORKER_LEASE_S}),
    "worker is silent for most of its lease": (
        [Fault(WORKER_LEASE_S, "pause", "worker-0", fraction * WORKER_LEASE_S) for fraction in (0.92, 0.96)],
        {"rows": 20, "max_execution_s": 3.0},
    ),
    "copies of requests arrive late": ([Fault(0.0, "copies", seconds=60.0)], {"rows": 12, "max_execution_s": 3.0}),
    "worker is paused while it writes, and is lost": (
        [Fault(0.0, "pause", "worker-0", 2.0 * WORKER_LEASE_S, point="before write")],
        {},
    ),
    "worker is killed before it reports a record": ([Fault(0.0, "kill", "worker-0", point="after write")], {}),
    "coordinator is killed while a worker is paused in a write": (
        [
            Fault(0.0, "pause", "worker-0", 2.0 * WORKER_LEASE_S, point="in write"),
            Fault(0.5, "kill", "coordinator"),
        ],
        {},
    ),
}

LIMITER_SEQUENCES: dict[str, tuple[list[Fault], dict[str, Any]]] = {
    "process is paused before it sends a request, and the server forgets its fences": (
        [
            Fault(2.0, "pause", "holder-0", 1.9 * TTL_S, point="before send"),
            Fault(1.3 * TTL_S, "kill", "server"),
        ],
        {"holders": 3},
    ),
    "process is paused between grant and use of a slot": (
        [Fault(2.0, "pause", "holder-0", leases * TTL_S, point="after acquire") for leases in (1.3, 1.7, 4.0, 5.0)],
        {"holders": 3},
    ),
    "process is paused, and the server has no fences": (
        [Fault(2.0, "pause", "holder-0", leases * TTL_S, point="after acquire") for leases in (4.0, 5.0, 6.0)],
        {"holders": 3, "has_fences": False},
    ),
    "process is paused before it sends a request": (
        [Fault(2.0, "pause", "holder-0", leases * TTL_S, point="before send") for leases in (1.3, 1.7, 4.0, 5.0)],
        {"holders": 3},
    ),
    "process is killed, then the ledger": ([Fault(6.0, "kill", "holder-0"), Fault(0.5, "kill", "ledger")], {}),
    "there are more processes than slots": ([], {"limit": 1, "holders": 4, "requests": 1}),
    "death of a process is noticed late": ([Fault(6.0, "kill", "holder-0")] * 3, {"max_death_notice_s": 1000.0}),
    "reports are delayed and overtake each other": ([Fault(2.0, "slow", seconds=5.0 * TTL_S)], {"holders": 3}),
}


@pytest.mark.parametrize("name", SIMULATIONS)
def test_invariants_hold_under_random_faults(name: str, pytestconfig: pytest.Config) -> None:
    for seed in range(pytestconfig.getoption("simulation_seeds") // len(SIMULATIONS)):
        simulate(name, seed)


@pytest.mark.parametrize("name", SIMULATIONS)
def test_seed_determines_simulation(name: str) -> None:
    for seed in range(10):
        assert simulate(name, seed).world.trace == simulate(name, seed).world.trace


@pytest.mark.parametrize("name", RUN_SEQUENCES)
def test_run_survives_sequence(name: str, tmp_path: Path) -> None:
    faults, settings = RUN_SEQUENCES[name]
    for seed in range(SEEDS_PER_SEQUENCE):
        directory = tmp_path / str(seed)
        directory.mkdir()
        RunSimulation(seed, directory, faults, **settings).run()


@pytest.mark.parametrize("name", LIMITER_SEQUENCES)
def test_limiter_survives_sequence(name: str) -> None:
    faults, settings = LIMITER_SEQUENCES[name]
    for seed in range(SEEDS_PER_SEQUENCE):
        LimiterSimulation(seed, None, faults, **settings).run()
