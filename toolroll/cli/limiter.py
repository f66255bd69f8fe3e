"""The `toolroll limiter` command: show and change the limits of a running cluster."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from math import inf
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table

from toolroll._internal.ray_cluster import connect
from toolroll.cli import output
from toolroll.errors import ConfigError, ToolrollError, unknown_name
from toolroll.limiter.ledger.policy import REQUESTS, TOKENS, UNLIMITED, LimitPolicy, rename_calls

if TYPE_CHECKING:
    from toolroll.limiter.ledger.ledger import LimiterStatus

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
    """Show every limited resource with its limits and its use.

    The numbers of slots in use and of waiters are the last ones that the processes reported. They are up to 50 ms old
    while slots are contended, and up to a few seconds otherwise. Quarantined slots belong to dead processes whose work
    may still run. Below the table: why an adaptive limit changed last, the credit of rates, and the rest of budgets.
    A limiter that does not answer is shown as unreachable, with `null` in JSON.
    """
    statuses = _statuses(address)
    if as_json:
        output.print_json({resource: now and now._asdict() for resource, now in statuses.items()}, indent=2)
    elif watch:
        with Live(_view(statuses), console=output.SafeConsole(), refresh_per_second=4) as live:
            while True:
                time.sleep(0.5)
                live.update(_view(_statuses(address)))
    else:
        output.SafeConsole().print(_view(statuses))


@app.command("set")
def set_(
    resource: Resource,
    limit: Annotated[
        int | None,
        typer.Argument(min=0, help="New limit, or maximum of a limit that adapts. With 0, no further work starts."),
    ] = None,
    minimum: Annotated[
        int | None,
        typer.Option("--min", min=1, help="New minimum. Below the limit, it adapts; at the limit, it is fixed."),
    ] = None,
    rpm: Annotated[float | None, typer.Option(help="New number of requests per minute.")] = None,
    tpm: Annotated[float | None, typer.Option(help="New number of tokens per minute.")] = None,
    rate: Annotated[
        list[str] | None, typer.Option(metavar="UNIT=PER_SECOND", help="New rate of another unit, per second.")
    ] = None,
    budget: Annotated[
        list[str] | None, typer.Option(metavar="UNIT=TOTAL", help="New total of a unit, including what is spent.")
    ] = None,
    address: Address = "auto",
) -> None:
    """Change limits for the whole cluster. Slots in use beyond the new limit are kept until they are released."""
    rates = _parse_amounts(rate or [], "--rate")
    rates |= {unit: amount / 60 for unit, amount in ((REQUESTS, rpm), (TOKENS, tpm)) if amount is not None}
    budgets = _parse_amounts(budget or [], "--budget")
    if limit is None and minimum is None and not rates and not budgets:
        raise ConfigError("Nothing to change. Pass a limit, --min, --rpm, --tpm, --rate or --budget.")
    for unit, amount in (*rates.items(), *budgets.items()):
        if not 0 < amount < inf:
            raise ConfigError(f"Invalid amount of {unit}: {amount:g}. Expected more than 0.")
    known = _statuses(address)
    from toolroll.limiter.token_bucket import set_limit

    _check_known(resource, known)
    before = known[resource]
    if before is None:
        raise ToolrollError(f"The limiter of {resource!r} is unreachable. Try again later.")
    LimitPolicy(before.min, before.max).changed(limit, minimum, rates, budgets)  # raises if they are invalid
    set_limit(resource, limit, minimum=minimum, rates=rates, budgets=budgets)
    if limit is not None:
        output.echo(f"{resource}: {before.max} → {limit}")
    if minimum is not None:
        output.echo(f"{resource}: minimum {before.min} → {minimum}")
    for unit, amount in rates.items():
        output.echo(f"{resource}: {_per_minute(before.rates.get(unit))} → {_per_minute(amount)} {unit} per minute")
    for unit, amount in budgets.items():
        output.echo(f"{resource}: budget {_number(before.budgets.get(unit))} → {_number(amount)} {unit}")


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


def _statuses(address: str) -> dict[str, LimiterStatus | None]:
    """Return the status of each resource, or None if its limiter does not answer."""
    connect(address)  # before the import, which needs Ray
    from toolroll.limiter.token_bucket import limiter_statuses

    return limiter_statuses()


def _parse_amounts(pairs: list[str], option: str) -> dict[str, float]:
    """Return the amounts of options such as tokens=1000, by unit."""
    amounts = {}
    for pair in pairs:
        unit, _, amount = pair.partition("=")
        try:
            amounts[unit or pair] = float(amount if unit else "")
        except ValueError:
            raise ConfigError(f"Invalid {option} {pair!r}. Expected UNIT=NUMBER, e.g. tokens=1000.") from None
    return rename_calls(amounts)


def _table(statuses: Mapping[str, LimiterStatus | None]) -> Table:
    table = Table(Column("resource", overflow="fold"))
    for name in ("limit", "in use", "waiting", "holders", "quarantined"):
        table.add_column(name, justify="right", no_wrap=True)
    for resource, now in statuses.items():
        if now is None:
            table.add_row(escape(resource) + "\n[dim]unreachable[/dim]", *5 * "–")
            continue
        note = "\n[dim]restarted: learning the existing leases[/dim]" if now.learning else ""
        counts = (now.in_use, now.waiting, now.holders, now.quarantined)
        limit = "–" if now.min == UNLIMITED else str(now.limit)
        table.add_row(escape(resource) + note, limit, *map(str, counts))
    if not statuses:
        table.caption = "No limited resources. A resource is listed after its first use."
    return table


def _view(statuses: Mapping[str, LimiterStatus | None]) -> Group:
    """Return the table of all resources, and below it what its columns do not show."""
    details = Table.grid(padding=(0, 2))
    for resource, now in statuses.items():
        for number, note in enumerate(_notes(now) if now else ()):
            details.add_row(escape(resource) if number == 0 else "", escape(note))
    return Group(_table(statuses), details) if details.row_count else Group(_table(statuses))


def _notes(now: LimiterStatus) -> Iterator[str]:
    """Return the state of a resource's adaptive limit, rates and budgets, one line each."""
    if now.min < now.max:
        yield f"adapts from {now.min} to {now.max}; {now.reason} ({_ago(now.changed_s)} ago)"
    if now.rejected:
        yield f"{now.rejected:,} of {now.rejected + now.succeeded:,} uses rejected"
    for unit, rate in now.rates.items():
        yield f"{_per_minute(rate)} {unit} per minute; {_number(now.credit.get(unit))} available now"
    for unit, total in now.budgets.items():
        yield f"budget: {_number(max(0.0, total - now.spent.get(unit, 0.0)))} of {_number(total)} {unit} left"


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _per_minute(rate: float | None) -> str:
    return _number(None if rate is None else 60 * rate)


def _number(value: float | None) -> str:
    """Return a number with separators of thousands, and with decimals only if it is small."""
    if value is None:
        return "none"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.4g}"
