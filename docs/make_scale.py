"""Writes the table of docs/scale.md: what some numbers of nodes need, from the figures that stand in the documentation.

python docs/make_scale.py            # `make figures` calls it when the figures are new
"""

import re
from pathlib import Path

from toolroll.limiter.ledger import LEASE_TTL, RENEWALS_PER_LEASE

DOCS = Path(__file__).parent
TABLE = re.compile(r"(<!-- scale -->\n).*?(<!-- end of scale -->)", re.DOTALL)
NODES = (1, 10, 100, 1000)

# The trajectories that are reckoned with.
IN_FLIGHT = 100
"""On each node."""
SECONDS = 50
TURNS = 4
CALLS = 3
SAMPLED, TOKENS = 3000, 4000
PROGRAM_MS = 100
"""Of CPU, that a program of the model's takes itself."""


def figures() -> dict[str, float]:
    """All that the pages have, by name."""
    found: dict[str, float] = {}
    for page in DOCS.glob("*.md"):
        for table in re.findall(r"<!-- figures: \S+ -->\n(.*?)<!-- end of figures -->", page.read_text(), re.DOTALL):
            for name, value in re.findall(r"^\| `(\w+)` \| ([\d,.]+) \|$", table, re.MULTILINE):
                found[name] = float(value.replace(",", ""))
    return found


def table() -> str:
    """Needs by number of nodes."""
    measured = figures()
    worker_us = TURNS * measured["overhead_us_per_turn"] + 1e6 / measured["trajectories_per_s"]
    record_kb = measured["bytes_per_token"] * TOKENS / 1000
    beat, reports = LEASE_TTL / RENEWALS_PER_LEASE, measured["ledger_reports_per_second_asked_for"]
    board_us = measured["board_us_per_trajectory"]

    def board(nodes: int, per_second: float) -> float:
        return measured["board_cores_at_1000_nodes"] if nodes == NODES[-1] else per_second * board_us / 1e6

    rows: list[tuple[str, list[str]]] = [(name, []) for name in ROWS]
    for nodes in NODES:
        per_second = nodes * IN_FLIGHT / SECONDS
        calls = per_second * CALLS
        cells = (
            f"{nodes * IN_FLIGHT:,}",
            f"{per_second:,.0f}",
            f"{per_second * SAMPLED:,.0f}",
            f"{per_second / nodes * worker_us / 1e6:.1%}",
            f"{nodes * 1e6 / worker_us:,.0f}",
            f"{calls:,.0f}",
            f"{calls * (measured['cpu_ms_per_exec'] + PROGRAM_MS) / 1000:,.1f}",
            f"{min(reports, nodes / beat) + calls * measured['rpcs_per_execution_contended']:,.1f}",
            f"{per_second * record_kb / 1000:,.2f}",
            f"{per_second * record_kb * 86400 / 1e9:,.2f}",
            f"{board(nodes, per_second):.2f}",
        )
        for (_, row), cell in zip(rows, cells, strict=True):
            row.append(cell)
    head = ["| nodes | " + " | ".join(f"{nodes:,}" for nodes in NODES) + " |", "|---" * (len(NODES) + 1) + "|"]
    return "\n".join([*head, *(f"| {name} | {' | '.join(row)} |" for name, row in rows), ""])


ROWS = (
    "trajectories in flight",
    "trajectories per second",
    "tokens that engines sample, per second",
    "of one core, on each node: the worker",
    "trajectories per second that the workers could do",
    "tool calls per second",
    "cores for sandboxes",
    "calls to the limiter per second",
    "records, MB per second",
    "records, TB per day",
    "cores for the board",
)


def main() -> None:
    """Write it."""
    page = DOCS / "scale.md"
    page.write_text(TABLE.sub(lambda found: found[1] + table() + found[2], page.read_text()))


if __name__ == "__main__":
    main()
