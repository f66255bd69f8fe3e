"""The `toolroll records rescore` command: compute rewards of recorded trajectories again."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from toolroll._internal.ray_cluster import connect
from toolroll.cli import output
from toolroll.errors import BudgetExhausted, ConfigError
from toolroll.viewer.formatting import plural

if TYPE_CHECKING:
    from toolroll.records.rescoring.changes import ScoreChanges
    from toolroll.records.rescoring.rescore import OnProgress, Rescorer
    from toolroll.records.rescoring.result import RescoreProgress, RescoreResult
    from toolroll.run.config import RewardsConfig

CONFIG_SUFFIXES = (".yaml", ".yml")
PROGRESS_LINE_INTERVAL_S = 5.0
"""Interval between lines with the progress if stderr is not a terminal."""
EXIT_BUDGET_SPENT = 3
EXIT_INTERRUPTED = 130


def rescore(
    directory: Annotated[Path, typer.Argument(help="The rollout_data_dir, or one of its files.")],
    rewards: Annotated[
        list[str],
        typer.Option(help="Reward function as module.function or NAME=module.function, or the YAML file of a run."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Directory for the copies with new scores. Default: {directory}-rescored.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Number of records that are scored at the same time.")] = 64,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Share the limits of a Ray cluster: host:port, or auto for the cluster of this machine. "
            "Default: the limits apply to this process alone.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compute rewards of recorded trajectories again, and compare them with the recorded ones.

    The records are not changed: their copies have the new scores in the field `rescored`. Run the same command again
    to resume an interrupted re-scoring, and to score records that could not be scored. The exit status is 1 if some
    could not, and 3 if a budget is spent; spent amounts count when the re-scoring is resumed.
    """
    import uvloop

    from toolroll.rollout.gc_tuning import infrequent_full_gc

    base = directory.parent if directory.is_file() else directory
    base = base if base.name.strip(".") else base.resolve()
    target = base.with_name(f"{base.name}-rescored") if out is None else out
    rescorer = _make_rescorer(rewards, concurrency)
    try:
        with _connected(cluster), _shown_progress() as show, infrequent_full_gc():
            result = uvloop.run(rescorer.run(directory, target, show))
    except BudgetExhausted as error:
        output.echo(f"{error} Then run the same command again to resume.", err=True)
        raise typer.Exit(EXIT_BUDGET_SPENT) from None
    except KeyboardInterrupt:
        output.echo("Stopped; the scores so far are saved. Run the same command again to resume.", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        output.print_json({"out": str(target), **result.as_dict()})
    else:
        _print_result(result, target)
    if result.unscored:
        raise typer.Exit(1)


def _make_rescorer(rewards: list[str], concurrency: int) -> Rescorer:
    """Import the reward functions that the options name, or those of a run's config."""
    from toolroll.records.rescoring.rescore import Rescorer
    from toolroll.run.config import RewardsConfig, load_rewards_config
    from toolroll.run.sample_worker import make_reward_rule

    files = [Path(one) for one in rewards if one.endswith(CONFIG_SUFFIXES)]
    if files and len(rewards) > 1:
        raise ConfigError(
            f"--rewards: Cannot combine {files[0]} with other functions. Pass one file, or functions only."
        )
    # Functions are found in the working directory, as for `python -m`, and next to a config, as for `toolroll run`.
    import_paths = [str(Path.cwd()), *(str(file.resolve().parent) for file in files)]
    sys.path[:0] = [path for path in import_paths if path not in sys.path]
    if files:
        config = load_rewards_config(files[0])
    else:
        functions = dict(_name_and_path(one) for one in rewards)
        if len(functions) < len(rewards):
            raise ConfigError(f"--rewards: Two functions have the same name in {rewards}. Write NAME=module.function.")
        config = RewardsConfig(functions=dict(functions))
    rule = make_reward_rule(config)
    return Rescorer(rule.functions, rule=rule if files else None, concurrency=concurrency, rewards=_identity(config))


def _identity(config: RewardsConfig) -> dict[str, str]:
    """Return the path of each function, and a hash of the settings, which may contain credentials.

    Limits do not change scores, so a re-scoring can be resumed with a larger budget.
    """
    paths = {name: one if isinstance(one, str) else one.path for name, one in config.functions.items()}
    settings = config.model_dump(mode="json")
    for function in settings["functions"].values():
        if isinstance(function, dict):
            function["limits"] = None
    return {**paths, "settings": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]}


def _name_and_path(text: str) -> tuple[str, str]:
    name, has_name, path = text.rpartition("=")
    return (name if has_name else path.rpartition(".")[2]), path


@contextmanager
def _connected(cluster: str | None) -> Iterator[None]:
    """Connect this process to a Ray cluster while the block runs, if an address is given."""
    if cluster is None:
        yield
        return
    from toolroll.limiter.registry import close_limiters

    is_owned = connect(cluster)
    try:
        yield
    finally:
        close_limiters()
        if is_owned:
            import ray

            ray.shutdown()


@contextmanager
def _shown_progress() -> Iterator[OnProgress]:
    """Yield a function that shows the progress on stderr: a bar in a terminal, else a line every few seconds."""
    if not sys.stderr.isatty():
        yield _ProgressLines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=output.SafeConsole(stderr=True), transient=True) as progress:
        task = progress.add_task("scoring", total=None)

        def show(state: RescoreProgress) -> None:
            progress.update(task, description=_counts(state), completed=state.bytes_done, total=state.total_bytes)

        yield show


class _ProgressLines:
    """Prints a line with the progress every few seconds."""

    def __init__(self) -> None:
        self._started_at = time.monotonic()
        self._next_at = self._started_at + PROGRESS_LINE_INTERVAL_S

    def __call__(self, state: RescoreProgress) -> None:
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + PROGRESS_LINE_INTERVAL_S
            share = state.bytes_done / max(1, state.total_bytes)
            rate = state.records / (now - self._started_at)
            output.echo(f"{share:.0%} · {_counts(state)} · {rate:,.0f} records/s", err=True)


def _counts(state: RescoreProgress) -> str:
    unscored = f", {state.unscored:,} without a score" if state.unscored else ""
    return f"{plural(state.records, 'record')}{unscored}"


def _print_result(result: RescoreResult, target: Path) -> None:
    console = output.SafeConsole()
    reused = f", {result.reused:,} of them scored before" if result.reused else ""
    bad = f", {plural(result.bad_lines, 'unreadable line')}" if result.bad_lines else ""
    summary = f"{plural(result.records, 'record')} in {escape(str(target))}{reused}{bad}"
    console.print(summary, highlight=False, soft_wrap=True)
    for name, reasons in result.changes.by_reason.items():
        console.print(_change_table(name, {**reasons, "total": result.changes.total(name)}))
    for count, error in result.errors.values():
        console.print(f"{count:,} × {escape(error)}", highlight=False, soft_wrap=True)
    if result.unscored:
        missing = f"{plural(result.unscored, 'record')} without a score. Run the same command again to score them."
        console.print(missing, highlight=False, soft_wrap=True)


def _change_table(name: str, rows: dict[str, ScoreChanges]) -> Table:
    table = Table(title=f"\n{escape(name)}", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    header: dict[str, Any] = {"header_style": "dim"}
    table.add_column("finish reason", **header)
    for column in ("records", "old", "new", "changed", "improved", "worse", "no score"):
        table.add_column(column, justify="right", no_wrap=True, **header)
    for reason, changes in rows.items():
        means = (changes.old_sum, changes.new_sum)
        shown = (f"{total / changes.compared:.3f}" if changes.compared else "" for total in means)
        counts = (changes.changed, changes.improved, changes.worse, changes.unscored)
        table.add_row(escape(reason), f"{changes.records:,}", *shown, *(f"{count:,}" for count in counts))
    return table
