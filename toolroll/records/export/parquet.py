"""Convert records to one Parquet file, for example for pandas or DuckDB.

Each record is a row. Numbers, strings, token ids, messages, turns and calls have typed columns. Values without a fixed
type are JSON in a string column: ground truth, arguments, metrics, rewards, new scores, and in `extra` all other fields
of the line, including those whose values do not fit their column. Lone surrogates, which Parquet cannot store, become
U+FFFD.

The file is written in row groups of bounded size, and replaces an existing file only when it is complete.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from toolroll._internal.text import replace_lone_surrogates_in_json
from toolroll.errors import ConfigError, MissingExtra
from toolroll.records.json_line import BadLine, encode
from toolroll.records.packed_tokens import PackedTokens
from toolroll.records.record import Record, number
from toolroll.records.schema import RecordLine

logger = logging.getLogger(__name__)

ROW_GROUP_MAX_ROWS = 1000
"""Maximum number of rows in a row group."""
ROW_GROUP_TARGET_BYTES = 16 * 1024 * 1024
"""Approximate size of the lines in a row group."""

COLUMN_FIELDS = frozenset(RecordLine.model_fields) - {"uid", "written_at", "tool_versions"}
"""Fields that have their own columns, unless a line of another program uses the name for other values."""


def _int64(value: Any) -> int | None:
    is_int64 = isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    return value if is_int64 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str | None:
    return None if value is None else encode(value).decode("utf-8").rstrip("\n")


ToType = Callable[[Any], Any]
"""Function that converts the values of a column. It also determines the column's type."""
ColumnTypes = Mapping[str, ToType]
RECORD_COLUMNS: ColumnTypes = {
    "input": _text, "output": _text, "gts": _json, "score": number, "step": _int64, "sample": _int64,
    "started_at": number, "seconds": number, "request_id": _text, "group": _text, "finish_reason": _text,
    "outcome": _text, "fidelity": _text, "logprobs_mode": _text, "error": _text,
}  # fmt: skip
MESSAGE_COLUMNS: ColumnTypes = {
    "role": _text, "content": _text, "reasoning_content": _text,
    "tool_calls": _json, "tool_call_id": _text, "name": _text,
}  # fmt: skip
TURN_COLUMNS: ColumnTypes = {
    "turn": _int64, "tokens": _int64, "finish": _text, "weight_version": _text,
    "start": number, "seconds": number, "queue": number, "cached_tokens": _int64, "attempts": _int64,
}  # fmt: skip
CALL_COLUMNS: ColumnTypes = {
    "turn": _int64, "tool": _text, "arguments": _text, "answer": _text, "fault": _text, "error": _text,
    "reward": number, "start": number, "seconds": number, "queue_wait": number, "execution_time": number,
    "attempts": _int64, "metrics": _json,
}  # fmt: skip
SPAN_COLUMNS: ColumnTypes = {"author": _text, "turn": _int64, "start": _int64, "end": _int64, "weight_version": _text}
LIST_KEYS = {"messages": {*MESSAGE_COLUMNS}, "turns": {*TURN_COLUMNS, "timings"}, "calls": {*CALL_COLUMNS}}
"""Keys that the columns of each list have."""


def convert(records: Iterable[Record], path: Path) -> int:
    """Write records to a Parquet file.

    Args:
        records: Records to write.
        path: Path of the file. An existing file is replaced.

    Returns:
        The number of records.

    Raises:
        ConfigError: If the file cannot be written.
        MissingExtra: If pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtra("pyarrow", "records") from error
    schema, count = _schema(pa), 0
    with _atomic_file(path) as part, pq.ParquetWriter(part, schema, compression="zstd") as file:
        for rows in _row_groups(records):
            try:
                table = pa.Table.from_pylist(rows, schema)
            except UnicodeEncodeError:
                table = pa.Table.from_pylist(replace_lone_surrogates_in_json(rows), schema)
            file.write_table(table)
            count += len(rows)
    return count


@contextmanager
def _atomic_file(path: Path) -> Iterator[Path]:
    """Provide a temporary path. The file replaces `path` if the block succeeds, and is deleted otherwise."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {os.strerror(error.errno) if error.errno else error}.") from error
    finally:
        part.unlink(missing_ok=True)


def _row_groups(records: Iterable[Record]) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    size = 0
    for record in records:
        rows.append(_row(record))
        size += 2 * (len(record.input) + len(record.output))
        if len(rows) >= ROW_GROUP_MAX_ROWS or size >= ROW_GROUP_TARGET_BYTES:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _schema(pa: Any) -> Any:
    types: dict[ToType, Any] = {_text: pa.string(), _json: pa.string(), _int64: pa.int64(), number: pa.float64()}

    def typed(columns: ColumnTypes) -> dict[str, Any]:
        return {name: types[to_type] for name, to_type in columns.items()}

    tokens = {
        "prompt_length": pa.int64(),
        "token_ids": pa.list_(pa.int32()),
        "token_mask": pa.list_(pa.int8()),
        "token_logprobs": pa.list_(pa.float32()),
        "spans": pa.list_(pa.struct(typed(SPAN_COLUMNS))),
    }
    lists = {"messages": typed(MESSAGE_COLUMNS), "turns": typed(TURN_COLUMNS), "calls": typed(CALL_COLUMNS)}
    return pa.schema(
        typed(RECORD_COLUMNS)
        | tokens
        | {name: pa.list_(pa.struct(struct)) for name, struct in (lists | {"earlier": tokens}).items()}
        | {"rewards": pa.string(), "rescored": pa.string(), "extra": pa.string()}
    )


def _row(record: Record) -> dict[str, Any]:
    fields = record.fields
    try:
        tokens, earlier = record.tokens, record.earlier
    except BadLine as error:
        logger.warning("sample %s of step %s: tokens left out: %s", record.request_id, record.step, error)
        tokens, earlier = None, []
    row: dict[str, Any] = {
        **{name: to_type(getattr(record, name, fields.get(name))) for name, to_type in RECORD_COLUMNS.items()},
        **({} if tokens is None else _tokens(tokens)),
        "earlier": [_tokens(sequence) for sequence in earlier],
        "messages": [_message(message) for message in record.messages],
        "turns": [_turn(turn) for turn in record.turns],
        "calls": [_call(call) for call in record.calls],
        "rewards": _json(record.rewards),
        "rescored": _json(record.rescored or None),
    }
    extra = fields.get("extra")
    others = {name: value for name, value in fields.items() if not _is_in_row(name, value, record, row)}
    return {**row, "extra": _json({**extra, **others} if isinstance(extra, dict) else others)}


def _is_in_row(name: str, value: Any, record: Record, row: Mapping[str, Any]) -> bool:
    """Return True if the columns of a row have the value of a field, so that `extra` need not have it."""
    if name not in COLUMN_FIELDS or value is None:
        return name in COLUMN_FIELDS
    match name:
        case "format":
            return record.is_native
        case "gts":
            return True
        case "rewards" | "extra":
            return isinstance(value, dict)
        case "rescored":
            return bool(value == record.rescored)
        case "tokens":
            return "token_ids" in row
        case "earlier":
            return isinstance(value, list) and len(value) == len(row["earlier"])
        case "messages" | "turns" | "calls":
            return isinstance(value, list) and all(_has_keys(one, LIST_KEYS[name]) for one in value)
    return bool(value == row[name])


def _has_keys(value: Any, keys: set[str]) -> bool:
    """Return True if a value is an object with no other keys, except for empty ones."""
    return isinstance(value, dict) and all(key in keys or one in (None, []) for key, one in value.items())


def _tokens(tokens: PackedTokens) -> dict[str, Any]:
    return {
        "prompt_length": tokens.prompt_length,
        "token_ids": tokens.ids,
        "token_mask": tokens.mask,
        "token_logprobs": tokens.logprobs,
        "spans": [{**asdict(span), "author": span.author.value} for span in tokens.spans],
    }


def _message(message: dict[str, Any]) -> dict[str, Any]:
    return _struct({**message, "tool_calls": message.get("tool_calls") or None}, MESSAGE_COLUMNS)


def _turn(turn: dict[str, Any]) -> dict[str, Any]:
    timings = timings if isinstance(timings := turn.get("timings"), dict) else {}
    return _struct({**timings, **turn, "seconds": timings.get("total")}, TURN_COLUMNS)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    metrics = metrics if isinstance(metrics := call.get("metrics"), dict) else {}
    return _struct({**metrics, **call, "metrics": metrics}, CALL_COLUMNS)


def _struct(fields: Mapping[str, Any], columns: ColumnTypes) -> dict[str, Any]:
    return {name: to_type(fields.get(name)) for name, to_type in columns.items()}
