"""Write the table of docs/scale.md: resource needs by cluster size, computed from the figures in the documentation.

Usage: python scripts/make_scale.py (`make figures` calls it after it has updated the figures)
"""

import re
from pathlib import Path

from make_figures import read_figures

from toolroll.limiter.ledger import LEASE_TTL_S, RENEWALS_PER_LEASE

DOCS = Path(__file__).parent.parent / "docs"
TABLE = re.compile(r"(<!-- scale -->\n).*?(<!-- end of scale -->)", re.DOTALL)
NODES = (1, 10, 100, 1000)

# The assumed trajectories.
IN_FLIGHT_PER_NODE = 100
TRAJECTORY_DURATION_S = 50
TURNS = 4
CALLS = 3
SAMPLED_TOKENS, TOKENS = 3000, 4000
PROGRAM_CPU_MS = 100
"""CPU time of one program, without the overhead of the sandbox."""


def table() -> str:
    """Return the table of resource needs by number of nodes."""
    measured = read_figures()
    worker_us = TURNS * measured["overhead_us_per_turn"] + 1e6 / measured["trajectories_per_s"]
    record_kb = measured["bytes_per_token"] * TOKENS / 1000
    renewal_interval, max_reports = LEASE_TTL_S / RENEWALS_PER_LEASE, measured["ledger_reports_per_second_asked_for"]
    coordinator_us = measured["coordinator_us_per_trajectory"]

    def coordinator_cores(nodes: int, per_second: float) -> float:
        return measured["coordinator_cores_at_1000_nodes"] if nodes == NODES[-1] else per_second * coordinator_us / 1e6

    rows: list[tuple[str, list[str]]] = [(name, []) for name in ROWS]
    for nodes in NODES:
        per_second = nodes * IN_FLIGHT_PER_NODE / TRAJECTORY_DURATION_S
        calls = per_second * CALLS
        cells = (
            f"{nodes * IN_FLIGHT_PER_NODE:,}",
            f"{per_second:,.0f}",
            f"{per_second * SAMPLED_TOKENS:,.0f}",
            f"{per_second / nodes * worker_us / 1e6:.1%}",
            f"{nodes * 1e6 / worker_us:,.0f}",
            f"{calls:,.0f}",
            f"{calls * (measured['cpu_ms_per_exec'] + PROGRAM_CPU_MS) / 1000:,.1f}",
            f"{min(max_reports, nodes / renewal_interval) + calls * measured['rpcs_per_execution_contended']:,.1f}",
            f"{per_second * record_kb / 1000:,.2f}",
            f"{per_second * record_kb * 86400 / 1e9:,.2f}",
            f"{coordinator_cores(nodes, per_second):.2f}",
        )
        for (_, row), cell in zip(rows, cells, strict=True):
            row.append(cell)
    head = ["| nodes | " + " | ".join(f"{nodes:,}" for nodes in NODES) + " |", "|---" * (len(NODES) + 1) + "|"]
    return "\n".join([*head, *(f"| {name} | {' | '.join(row)} |" for name, row in rows), ""])


ROWS = (
    "trajectories in flight",
    "trajectories per second",
    "sampled tokens per second",
    "worker CPU per node, share of one core",
    "maximum trajectories per second of the workers",
    "tool calls per second",
    "cores for sandboxes",
    "requests to the limiter per second",
    "records, MB per second",
    "records, TB per day",
    "cores for the coordinator",
)


def main() -> None:
    """Update the table in docs/scale.md."""
    page = DOCS / "scale.md"
    page.write_text(TABLE.sub(lambda found: found[1] + table() + found[2], page.read_text()))


if __name__ == "__main__":
    main()
