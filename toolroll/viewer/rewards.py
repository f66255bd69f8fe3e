"""What a sample earned and what it took: rewards by component, turns, calls, as a document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolroll.records.record import Record, number
from toolroll.viewer import figures
from toolroll.viewer.document import Block, Document, Kind
from toolroll.viewer.fields import as_text
from toolroll.viewer.harmless import harmless, one_line

KNOWN = {"input", "output", "gts", "score", "step", "uid", "request_id"}


def rewards(record: Record, clean: Callable[[str], str] = harmless) -> Document:
    """The document."""
    blocks = [Block(Kind.FIELD, "score", figures.score(record.score))]
    if record.gts is not None:
        blocks.append(Block(Kind.FIELD, "ground truth", clean(as_text(record.gts))))
    given = record.rewards
    blocks += _numbers("rewards by function", given.get("functions"))
    blocks += _numbers("rewards by tool", given.get("tools"))
    steps = given.get("steps")
    if isinstance(steps, list) and steps:
        rows = [(f"turn {turn}", _figure(value)) for turn, value in enumerate(steps, 1)]
        blocks.append(Block(Kind.FIELD, "rewards by turn", table([("turn", "reward"), *rows])))
    if not record.is_ours:  # verl puts what the reward function gave right into the line
        beside = {key: value for key, value in record.fields.items() if key not in KNOWN}
        blocks += _numbers("beside the score", {key: value for key, value in beside.items() if _is_number(value)})
    if record.turns:
        blocks.append(Block(Kind.FIELD, "turns", _turns(record.turns)))
    if record.calls:
        blocks.append(Block(Kind.FIELD, "tool calls", _calls(record.calls)))
    if len(blocks) == 1:
        blocks.append(Block(Kind.NOTE, "Nothing but the score is known."))
    return Document(blocks)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns, numbers at the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _numbers(title: str, values: Any) -> list[Block]:
    if not isinstance(values, Mapping) or not values:
        return []
    rows = [(one_line(str(name), 40), _figure(value)) for name, value in values.items()]
    return [Block(Kind.FIELD, title, table(rows))]


def _turns(turns: Sequence[Mapping[str, Any]]) -> str:
    rows = [("turn", "tokens", "finish", "weights", "time", "queue", "cached", "attempts")]
    for turn in turns:
        found = turn.get("timings")
        timings = found if isinstance(found, Mapping) else {}
        number = turn.get("turn")
        rows.append(
            (
                str(number + 1) if isinstance(number, int) else "?",
                _figure(turn.get("tokens")),
                one_line(str(turn.get("finish") or figures.UNKNOWN), 20),
                one_line(str(turn.get("weight_version") or figures.UNKNOWN), 20),
                _seconds(timings.get("total")),
                _seconds(timings.get("queue")),
                _figure(timings.get("cached_tokens")),
                _figure(timings.get("attempts")),
            )
        )
    return table(rows)


def _calls(calls: Sequence[Mapping[str, Any]]) -> str:
    rows = [("tool", "turn", "fault", "time", "waited", "ran", "attempts", "reward")]
    for call in calls:
        found = call.get("metrics")
        metrics = found if isinstance(found, Mapping) else {}
        number = call.get("turn")
        rows.append(
            (
                one_line(str(call.get("tool") or "none named"), 24),
                str(number + 1) if isinstance(number, int) else "?",
                one_line(str(call.get("fault") or figures.UNKNOWN), 10),
                _seconds(call.get("seconds")),
                _seconds(metrics.get("queue_wait")),
                _seconds(metrics.get("execution_time")),
                _figure(metrics.get("attempts")),
                _figure(call.get("reward")),
            )
        )
    return table(rows)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _figure(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    known = number(value)
    if known is None:
        return figures.UNKNOWN
    return str(value) if isinstance(value, int) else f"{known:.4g}"


def _seconds(value: Any) -> str:
    return figures.seconds(number(value))
