"""What came of a run, as it is shown at its end. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from toolroll.cli.run_display import clock, counted, part
from toolroll.run.status import Status

SPREADS = {"seconds": "a trajectory", "tool_seconds": "its tool calls", "queue_wait": "their wait for a slot"}


def summary(status: Status) -> RenderableType:
    """A table of what came of it, and one of how long it took."""
    tally = status.tally
    title = f"{tally['trajectories']:,} trajectories of {tally['prompts']:,} prompts in {clock(status.seconds)}"
    if status.resumed:
        title += f", {status.resumed:,} of them before"
    facts = Table(title=escape(title), title_justify="left", title_style="bold", show_header=False)
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(status, tally):
        facts.add_row(name, escape(value))
    return Group(facts, _times(tally))


def _facts(status: Status, tally: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if tally["pass_at_k"]:
        yield "pass@k", " · ".join(f"pass@{k} {100 * chance:.1f} %" for k, chance in tally["pass_at_k"].items())
    if tally["mean_reward"] is not None:
        solved = f"solved {tally['solved']:,} of {tally['scored']:,} ({part(tally['solved'], tally['scored'])})"
        yield "reward", f"mean {tally['mean_reward']:.3f} · {solved}"
    unscored = tally["trajectories"] - tally["scored"]
    if unscored:
        yield "no reward", f"{unscored:,} trajectories"
    yield "ended by", counted(tally["finish_reasons"])
    if any(tally["faults"].values()):
        yield "faults", counted(tally["faults"])
    for error, count in tally["errors"].items():
        yield "", f"{count:,} × {error}"
    yield "per trajectory", _per_trajectory(tally)
    if tally["sampled_tokens"] or tally["tokens"]:  # a chat server may tell none
        yield "tokens", f"{tally['sampled_tokens']:,} sampled · {tally['tokens']:,} in all"
    if set(tally["fidelity"]) - {"exact"}:
        yield "fidelity", counted(tally["fidelity"])
    if status.lost_workers:
        yield "workers", f"{status.lost_workers} lost, and what they had was done by others"
    if status.bad_rows:
        yield "bad rows", f"{status.bad_rows:,} that can't be used"


def _per_trajectory(tally: Mapping[str, Any]) -> str:
    each = {"turns": tally["turns"], "calls": tally["calls"], "tokens sampled": tally["sampled_tokens"]}
    told = {name: count / max(1, tally["trajectories"]) for name, count in each.items() if count}
    return " · ".join(f"{count:,.1f} {name}" for name, count in told.items())


def _times(tally: Mapping[str, Any]) -> Table:
    table = Table("seconds", *(name for name in ("mean", "p50", "p90", "p99", "max")))
    for column in table.columns[1:]:
        column.justify = "right"
    for key, name in SPREADS.items():
        if key == "seconds" or tally["calls"]:
            table.add_row(name, *(f"{value:,.2f}" for value in tally[key].values()))
    return table
