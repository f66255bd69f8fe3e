"""Replay the simulation of a seed, or search for a seed that fails."""

from __future__ import annotations

import argparse
import sys

from .faults import Violation
from .seeds import SIMULATIONS, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("simulation", choices=SIMULATIONS)
    parser.add_argument("seed", type=int, help="first seed")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="number of seeds")
    arguments = parser.parse_args()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        try:
            simulation = simulate(arguments.simulation, seed)
        except Violation as violation:
            print(violation)
            return 1
    print("\n".join(simulation.world.trace) if arguments.count == 1 else f"{arguments.count} seeds passed.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
