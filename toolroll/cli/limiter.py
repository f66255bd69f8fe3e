"""`toolroll limiter status | set`: the limits of the running cluster, seen and changed."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from toolroll.errors import ConfigError, did_you_mean
from toolroll.ray_cluster import connect

if TYPE_CHECKING:
    from toolroll.limiter.ledger import Standing

app = typer.Typer(help="See and change the limits of the running Ray cluster.", no_args_is_help=True)

Address = Annotated[str, typer.Option(help="The Ray cluster: host:port, or auto for the one on this machine.")]

COLUMNS = ("limit", "in use", "waiting", "holders", "quarantined", "note")


@app.command()
def status(
    address: Address = "auto",
    watch: Annotated[bool, typer.Option("--watch", help="Go on showing it, until interrupted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show every limited resource: its limit, what is in use, who waits.

    What is in use and waiting is what the processes last reported: while slots are short within 50 ms, else within
    seconds. Quarantined slots are those of processes that died, until their work must have ended.
    """
    connect(address)
    if as_json:
        typer.echo(json.dumps({resource: standing._asdict() for resource, standing in _standings().items()}, indent=2))
    elif watch:
        with Live(_table(_standings()), refresh_per_second=4) as live:
            while True:
                time.sleep(0.5)
                live.update(_table(_standings()))
    else:
        Console().print(_table(_standings()))


@app.command("set")
def set_(
    resource: Annotated[str, typer.Argument(help="The resource, as `status` names it.")],
    limit: Annotated[int, typer.Argument(min=0, help="How many at once. 0 stops everything that isn't running yet.")],
    address: Address = "auto",
) -> None:
    """Change a limit for the whole cluster, at once. What is in use beyond a lower one is let finish."""
    connect(address)
    from toolroll.limiter.token_bucket import set_limit

    known = _standings()
    if resource not in known:
        raise ConfigError(f"No resource {resource!r} is limited on this cluster{did_you_mean(resource, known)}.")
    set_limit(resource, limit)
    typer.echo(f"{resource}: {known[resource].limit} → {limit}")


def _standings() -> dict[str, Standing]:
    from toolroll.limiter.token_bucket import resources, standing

    return {resource: standing(resource) for resource in resources()}


def _table(standings: dict[str, Standing]) -> Table:
    table = Table("resource", *COLUMNS)
    for resource, now in standings.items():
        note = "just restarted: nothing new is given out yet" if now.learning else ""
        counts = (now.limit, now.in_use, now.waiting, now.holders, now.quarantined)
        table.add_row(escape(resource), *map(str, counts), note)
    if not standings:
        table.caption = "Nothing is limited on this cluster yet: a resource appears when it is first used."
    return table
