"""Row: a sample as one line of the list, in columns.

Which columns there are follows from the width: the last ones of the order of importance are left out first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.cells import cell_len

from toolroll.records.summary import Summary
from toolroll.viewer import figures
from toolroll.viewer.harmless import one_line

Piece = tuple[str, str]
"""A text, and the name of its style."""


class Column(NamedTuple):
    """One column."""

    name: str
    """As Summary and the order name it."""
    title: str
    width: int
    left: bool = False
    """Aligned at the left."""


ROW = Column("row", "#", 6)
STEP = Column("step", "step", 6)
SCORE = Column("score", "score", 7)
TURNS = Column("turns", "turns", 5)
CALLS = Column("calls", "calls", 5)
FAULTS = Column("faults", "faults", 6)
TOKENS = Column("tokens", "tokens", 7)
SECONDS = Column("seconds", "time", 6)
FINISH = Column("finish_reason", "finish", 9, left=True)
GROUP = Column("group", "group", 12, left=True)
SAMPLE = Column("sample", "of it", 5)

COLUMNS = (ROW, STEP, SCORE, TURNS, CALLS, FAULTS, TOKENS, SECONDS, FINISH, GROUP, SAMPLE)
"""From left to right."""
IMPORTANCE = (ROW, STEP, SCORE, CALLS, FAULTS, FINISH, TURNS, TOKENS, SECONDS, GROUP, SAMPLE)


def columns_for(width: int, *, with_step: bool) -> list[Column]:
    """The columns that have room, from left to right."""
    left = width - 1
    chosen = []
    for column in IMPORTANCE:
        if column is STEP and not with_step:
            continue
        if left < column.width + 1:
            break
        chosen.append(column)
        left -= column.width + 1
    return [column for column in COLUMNS if column in chosen]


def header(columns: Sequence[Column], order: str, descending: bool) -> list[Piece]:
    """The titles, with an arrow at the one that is sorted by."""
    pieces: list[Piece] = [(" ", "header")]
    for column in columns:
        sorted_by = column.name == order
        arrow = ("↓" if descending else "↑") if sorted_by else ""
        title = column.title if len(column.title) + len(arrow) <= column.width else column.title[: column.width - 1]
        pieces.append((f"{_aligned(title + arrow, column)} ", "header.sorted" if sorted_by else "header"))
    return pieces


def cells(summary: Summary, number: int, columns: Sequence[Column]) -> list[Piece]:
    """One sample. `number` is its row in the file, from 1."""
    pieces: list[Piece] = [(" ", "")]
    for column in columns:
        text, style = _CELLS[column.name](summary) if column.name != "row" else (str(number), "dim")
        pieces += [(_aligned(text, column), style), (" ", "")]
    return pieces


def score_style(score: float | None) -> str:
    """Good, bad, or neither."""
    if score is None:
        return "dim"
    return "good" if score > 0 else "bad" if score < 0 else "zero"


def finish_style(reason: str | None) -> str:
    """How a finish reason looks: as it should be, cut short, or broken."""
    if reason in ("infra", "aborted"):
        return "bad"
    return "" if reason in ("stop", "tool_stop") else "warn" if reason else "dim"


def _aligned(text: str, column: Column) -> str:
    over = cell_len(text) - column.width
    if over > 0:
        text = f"{text[: max(0, len(text) - over - 1)]}…"
    space = " " * (column.width - cell_len(text))
    return text + space if column.left else space + text


def _faults(summary: Summary) -> Piece:
    policy, infra = summary.policy_faults or 0, summary.infra_faults or 0
    if not policy and not infra:
        return "·", "dim"
    return f"{policy}+{infra}i" if infra else str(policy), "bad" if infra else "warn"


def _count(value: int | None) -> Piece:
    return (figures.UNKNOWN, "dim") if value is None else (str(value), "" if value else "dim")


_CELLS: dict[str, Callable[[Summary], Piece]] = {
    "step": lambda summary: _count(summary.step),
    "score": lambda summary: (figures.score(summary.score), score_style(summary.score)),
    "turns": lambda summary: _count(summary.turns),
    "calls": lambda summary: _count(summary.calls),
    "faults": _faults,
    "tokens": lambda summary: _count(summary.tokens),
    "seconds": lambda summary: (figures.seconds(summary.seconds), "dim"),
    "finish_reason": lambda summary: (
        one_line(summary.finish_reason or figures.UNKNOWN, 40),
        finish_style(summary.finish_reason),
    ),
    "group": lambda summary: (one_line(summary.group or "", 40), "dim"),
    "sample": lambda summary: _count(summary.sample),
}
