"""The `toolroll limiter` command: show and change the limits of a running cluster."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table

from toolroll._internal.ray_cluster import connect
from toolroll.cli import output
from toolroll.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from toolroll.limiter.ledger import LimiterStatus

app = typer.Typer(help="Show and change the limits of a running Ray cluster.", no_args_is_help=True)

Address = Annotated[
    str, typer.Option(help="Address of the Ray cluster: host:port, or auto for the cluster of this machine.")
]

Resource = Annotated[str, typer.Argument(help="Name of the resource, as shown by `status`.")]


@app.command()
def status(
    address: Address = "auto",
    watch: Annotated[bool, typer.Option("--watch", help="Update the table until interrupted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show every limited resource with its limit and its use.

    The numbers of slots in use and of waiters are the last ones that the processes reported. They are up to 50 ms old
    while slots are contended, and up to a few seconds otherwise. Quarantined slots belong to dead processes whose work
    may still run.
    """
    statuses = _statuses(address)
    if as_json:
        output.print_json({resource: now._asdict() for resource, now in statuses.items()}, indent=2)
    elif watch:
        with Live(_table(statuses), console=output.SafeConsole(), refresh_per_second=4) as live:
            while True:
                time.sleep(0.5)
                live.update(_table(_statuses(address)))
    else:
        output.SafeConsole().print(_table(statuses))


@app.command("set")
def set_(
    resource: Resource,
    limit: Annotated[int, typer.Argument(min=0, help="New limit. With 0, no further work starts.")],
    address: Address = "auto",
) -> None:
    """Change a limit for the whole cluster. Slots in use beyond the new limit are kept until they are released."""
    known = _statuses(address)
    from toolroll.limiter.token_bucket import set_limit

    _check_known(resource, known)
    set_limit(resource, limit)
    output.echo(f"{resource}: {known[resource].limit} → {limit}")


@app.command()
def remove(resource: Resource, address: Address = "auto") -> None:
    """Remove a limiter that no process uses, with its saved limit.

    If a process uses the resource again, the limiter is created with the limit of this process.
    """
    _check_known(resource, _statuses(address))
    from toolroll.limiter.registry import remove_limiter

    remove_limiter(resource)
    output.echo(f"{resource}: removed")


def _check_known(resource: str, known: Collection[str]) -> None:
    if resource not in known:
        raise ConfigError(unknown_name("resource", resource, known))


def _statuses(address: str) -> dict[str, LimiterStatus]:
    connect(address)  # before the import, which needs Ray
    from toolroll.limiter.token_bucket import limited_resources, limiter_status

    return {resource: limiter_status(resource) for resource in limited_resources()}


def _table(statuses: dict[str, LimiterStatus]) -> Table:
    table = Table(Column("resource", overflow="fold"))
    for name in ("limit", "in use", "waiting", "holders", "quarantined"):
        table.add_column(name, justify="right", no_wrap=True)
    for resource, now in statuses.items():
        note = "\n[dim]restarted: learning the existing leases[/dim]" if now.learning else ""
        counts = (now.limit, now.in_use, now.waiting, now.holders, now.quarantined)
        table.add_row(escape(resource) + note, *map(str, counts))
    if not statuses:
        table.caption = "No limited resources. A resource is listed after its first use."
    return table
