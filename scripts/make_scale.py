"""Write the tables of docs/scale.md, computed from the figures in the documentation.

One has the resource needs by cluster size, the other the throughput of a sandbox server by number of cores.

Usage: python scripts/make_scale.py (`make figures` calls it after it has updated the figures)
"""

import math
import re
import textwrap
from pathlib import Path

from make_figures import read_figures

from toolroll.limiter.ledger.ledger import LEASE_TTL_S, RENEWALS_PER_LEASE
from toolroll.sandbox.server.settings import fronts_for

DOCS = Path(__file__).parent.parent / "docs"
TABLE = re.compile(r"(<!-- scale -->\n).*?(<!-- end of scale -->)", re.DOTALL)
SERVER_TABLE = re.compile(r"(<!-- server -->\n).*?(<!-- end of server -->)", re.DOTALL)
NODES = (1, 10, 100, 1000)
CORES = (2, 16, 64, 192)

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
    return _markdown("nodes", NODES, dict(rows))


def server_table() -> str:
    """Return the table of one sandbox server's throughput by number of cores, and when its hub is the bottleneck."""
    measured = read_figures()
    rows: dict[str, list[str]] = {name: [] for name in SERVER_ROWS}
    for cores in CORES:
        fronts = fronts_for(cores)
        hub_ms = measured["hub_cpu_ms_per_request"] if fronts > 1 else 0.0
        cpu_ms = measured["cpu_ms_per_exec"] + hub_ms
        limits = {
            "cores": cores * 1000 / cpu_ms,
            "fronts": fronts * 1000 / measured["front_cpu_ms_per_request"],
            "hub": 1000 / measured["hub_cpu_ms_when_busy"] if fronts > 1 else float("inf"),
        }
        limited_by = min(limits, key=lambda name: limits[name])
        longer = min(cores * 1000 / (cpu_ms + PROGRAM_CPU_MS), limits["fronts"], limits["hub"])
        cells = (
            f"{fronts}",
            f"{limits[limited_by]:,.0f}",
            limited_by,
            f"{longer:,.0f}",
            f"{longer * hub_ms / 1000:.0%}",
        )
        for row, cell in zip(rows.values(), cells, strict=True):
            row.append(cell)
    # CPU time of programs that keep both the cores of the largest machine and the hub busy, rounded up to 10 ms.
    saturating_ms = math.ceil(max(0.0, CORES[-1] * measured["hub_cpu_ms_when_busy"] - cpu_ms) / 10) * 10
    statement = (
        "The hub, which admits the requests of all fronts, is one process. Programs that use less than "
        f"{saturating_ms} ms of CPU time can saturate it on {CORES[-1]} cores. To run such programs there, start "
        "several servers on different ports, each with a part of the `--capacity`, and pass all of them to the client."
    )
    return "\n".join([_markdown("cores", CORES, rows), textwrap.fill(statement, 120), ""])


def _markdown(title: str, columns: tuple[int, ...], rows: dict[str, list[str]]) -> str:
    head = [f"| {title} | " + " | ".join(f"{each:,}" for each in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    return "\n".join([*head, *(f"| {name} | {' | '.join(row)} |" for name, row in rows.items()), ""])


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
SERVER_ROWS = (
    "fronts",
    "programs per second, if they do nothing",
    "limited by",
    f"programs per second, if they use {PROGRAM_CPU_MS} ms of CPU time",
    "CPU of the hub for these, share of one core, at most",
)


def main() -> None:
    """Update the tables in docs/scale.md."""
    page = DOCS / "scale.md"
    text = TABLE.sub(lambda found: found[1] + table() + found[2], page.read_text())
    page.write_text(SERVER_TABLE.sub(lambda found: found[1] + server_table() + found[2], text))


if __name__ == "__main__":
    main()
