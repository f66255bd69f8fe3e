"""Records as one Parquet file, for pandas, DuckDB and the like.

A row is a record. What every tool understands is a column of its own: numbers, texts, lists of token ids, and lists of
messages, turns and calls with named fields. What has no fixed form is JSON in a column of text: ground truth,
arguments, metrics, rewards, and under `extra` whatever else a line had. Half characters, which Parquet can't hold,
become "�".

It is written in parts, so that a directory of any size can be converted, and appears under its name when it is whole.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolroll.errors import ConfigError, MissingExtra
from toolroll.records.json_line import BadLine, encode
from toolroll.records.packed import Tokens
from toolroll.records.record import Record, number
from toolroll.records.schema import Line

logger = logging.getLogger(__name__)

ROWS = 1000
"""In a row group, at the most."""
BYTES = 16 * 1024 * 1024
"""Of lines, in a row group, about."""
HALF = re.compile("[\ud800-\udfff]")

KEPT = frozenset(Line.model_fields) - {"uid", "written_at"}
"""Fields that have columns."""


def convert(records: Iterable[Record], path: Path) -> int:
    """Write records to a Parquet file; how many there were."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtra("pyarrow", "records") from error
    schema, count = _schema(pa), 0
    with _in_place(path) as part, pq.ParquetWriter(part, schema, compression="zstd") as file:
        for rows in _groups(records):
            try:
                table = pa.Table.from_pylist(rows, schema)
            except UnicodeEncodeError:
                table = pa.Table.from_pylist(_scrubbed(rows), schema)
            file.write_table(table)
            count += len(rows)
    return count


@contextmanager
def _in_place(path: Path) -> Iterator[Path]:
    """A file beside `path`, which takes its place in the end, or is gone."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        os.replace(part, path)  # noqa: PTH105 (it says more plainly that another is replaced)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {os.strerror(error.errno) if error.errno else error}.") from error
    finally:
        part.unlink(missing_ok=True)


def _groups(records: Iterable[Record]) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    size = 0
    for record in records:
        rows.append(_row(record))
        size += 2 * (len(record.input) + len(record.output))
        if len(rows) >= ROWS or size >= BYTES:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _schema(pa: Any) -> Any:
    text, whole, real = pa.string(), pa.int64(), pa.float64()
    message = dict.fromkeys(("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"), text)
    turn = {"turn": whole, "tokens": whole, "finish": text, "weight_version": text}
    turn |= {"seconds": real, "queue": real, "cached_tokens": whole, "attempts": whole}
    call = {"turn": whole, "tool": text, "arguments": text, "answer": text, "fault": text, "error": text}
    call |= {"reward": real, "seconds": real, "queue_wait": real, "execution_time": real, "attempts": whole}
    call |= {"metrics": text}
    span = {"author": text, "turn": whole, "start": whole, "end": whole, "weight_version": text}
    tokens = {
        "prompt_length": whole,
        "token_ids": pa.list_(pa.int32()),
        "token_mask": pa.list_(pa.int8()),
        "token_logprobs": pa.list_(pa.float32()),
        "spans": pa.list_(pa.struct(span)),
    }
    lists = {"messages": message, "turns": turn, "calls": call, "earlier": tokens}
    return pa.schema(
        {"input": text, "output": text, "gts": text, "score": real, "step": whole, "sample": whole, "seconds": real}
        | dict.fromkeys(("request_id", "group", "finish_reason", "outcome", "fidelity", "logprobs_of", "error"), text)
        | tokens
        | {name: pa.list_(pa.struct(of)) for name, of in lists.items()}
        | {"rewards": text, "extra": text}
    )


def _row(record: Record) -> dict[str, Any]:
    fields = record.fields
    try:
        tokens, earlier = record.tokens, record.earlier
    except BadLine as error:
        logger.warning("sample %s of step %s has no tokens now: %s", record.request_id, record.step, error)
        tokens, earlier = None, []
    carried = fields.get("extra")
    others = {name: value for name, value in fields.items() if name not in KEPT}
    return {
        "input": record.input,
        "output": record.output,
        "gts": _json(record.gts),
        "score": record.score,
        "step": _whole(record.step),
        "sample": _whole(record.sample),
        "seconds": record.seconds,
        "request_id": record.request_id,
        "group": record.group,
        "finish_reason": record.finish_reason,
        "outcome": record.outcome,
        "fidelity": record.fidelity,
        "logprobs_of": _text(fields.get("logprobs_of")),
        "error": record.error,
        **({} if tokens is None else _tokens(tokens)),
        "earlier": [_tokens(one) for one in earlier],
        "messages": [_message(message) for message in record.messages],
        "turns": [_turn(turn) for turn in record.turns],
        "calls": [_call(call) for call in record.calls],
        "rewards": _json(record.rewards),
        "extra": _json({**carried, **others} if isinstance(carried, dict) else others),
    }


def _tokens(tokens: Tokens) -> dict[str, Any]:
    return {
        "prompt_length": tokens.prompt_length,
        "token_ids": tokens.ids,
        "token_mask": tokens.mask,
        "token_logprobs": tokens.logprobs,
        "spans": [
            {
                "author": span.author.value,
                "turn": span.turn,
                "start": span.start,
                "end": span.end,
                "weight_version": span.weight_version,
            }
            for span in tokens.spans
        ],
    }


def _message(message: dict[str, Any]) -> dict[str, Any]:
    texts = ("role", "content", "reasoning_content", "tool_call_id", "name")
    calls = message.get("tool_calls")
    return {name: _text(message.get(name)) for name in texts} | {"tool_calls": _json(calls) if calls else None}


def _turn(turn: dict[str, Any]) -> dict[str, Any]:
    given = turn.get("timings")
    timings = given if isinstance(given, dict) else {}
    return {
        "turn": _whole(turn.get("turn")),
        "tokens": _whole(turn.get("tokens")),
        "finish": _text(turn.get("finish")),
        "weight_version": _text(turn.get("weight_version")),
        "seconds": number(timings.get("total")),
        "queue": number(timings.get("queue")),
        "cached_tokens": _whole(timings.get("cached_tokens")),
        "attempts": _whole(timings.get("attempts")),
    }


def _call(call: dict[str, Any]) -> dict[str, Any]:
    given = call.get("metrics")
    metrics = given if isinstance(given, dict) else {}
    return {
        "turn": _whole(call.get("turn")),
        **{name: _text(call.get(name)) for name in ("tool", "arguments", "answer", "fault", "error")},
        "reward": number(call.get("reward")),
        "seconds": number(call.get("seconds")),
        "queue_wait": number(metrics.get("queue_wait")),
        "execution_time": number(metrics.get("execution_time")),
        "attempts": _whole(metrics.get("attempts")),
        "metrics": _json(metrics),
    }


def _whole(value: Any) -> int | None:
    is_one = isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    return value if is_one else None


def _text(value: Any) -> str | None:
    """A text as it is; what is none, as JSON."""
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str | None:
    return None if value is None else encode(value).decode("utf-8").rstrip("\n")


def _scrubbed(value: Any) -> Any:
    if isinstance(value, str):
        return HALF.sub("�", value)
    if isinstance(value, list):
        return [_scrubbed(item) for item in value]
    if isinstance(value, dict):
        return {name: _scrubbed(item) for name, item in value.items()}
    return value
