"""Prompts of a run, read from data files of any size.

    rows = PromptRows(config.data)
    for row in rows.rows(start=1_000_000):
        number, prompt = row  # unless it is a BadRow

Invariants:

- A row has the same number in every run over the same files. `fingerprint()` identifies the files.
- Memory use does not depend on file sizes, and rows before `start` are skipped without being decoded.
- An invalid row is skipped and reported. A problem that affects all rows, such as a missing column, is a ConfigError.

A column name with dots refers to a nested value, e.g. `reward_model.ground_truth`. Columns that are not part of the
prompt are kept, and are available to reward functions as `trajectory.extra`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from toolroll.errors import ConfigError, did_you_mean, validate
from toolroll.rollout.prompt import Prompt
from toolroll.run.config import DataConfig
from toolroll.run.row_files import BadRow, NumberedRow, find_row_files

CHECKED_ROWS = 100
"""Number of rows to check before a run; at least one of them must be valid."""
FINGERPRINT_BYTES = 64 * 1024
"""Number of bytes at the start and at the end of each file that are part of the fingerprint."""
RESERVED_PROMPT_KEYS = ("prompt", "messages", "tools_kwargs", "group")
"""Keys of a prompt that have a meaning. Columns with these names are dropped unless the config refers to them."""


class InvalidRow(Exception):
    """Raised when a row cannot be converted to a prompt. The message is the reason."""


class MissingColumn(InvalidRow):
    """Raised when a row does not have a column that the config names."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Column {name!r} is missing.")
        self.name = name


class PromptRows:
    """Rows of all data files, numbered consecutively.

    Args:
        config: Data files and columns.

    Raises:
        ConfigError: If a file does not exist or has an unknown format.
    """

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        paths = [config.path] if isinstance(config.path, str) else config.path
        self.files = [file for path in paths for file in find_row_files(path)]
        if not self.files:
            raise ConfigError("data.path is empty. Name at least one file or directory.")

    def rows(self, start: int = 0) -> Iterator[NumberedRow | BadRow]:
        """Yield the rows from number `start` on, each converted to a prompt."""
        self.check()
        limit = self._config.limit
        for row in self._all_rows(start):
            if limit is not None and row[0] >= limit:
                return
            if isinstance(row, BadRow):
                yield row
                continue
            number, columns = row
            try:
                yield number, to_prompt(columns, self._config)
            except InvalidRow as error:
                yield BadRow(number, str(error))

    def check(self) -> None:
        """Check that at least one of the first rows is valid.

        Raises:
            ConfigError: If none of them is. The message describes the problem of the first row.
        """
        problems = []
        for row in islice(self._all_rows(0), CHECKED_ROWS):
            if isinstance(row, BadRow):
                problems.append(f"Row {row.number}: {row.reason}")
                continue
            try:
                to_prompt(row[1], self._config)
                return
            except MissingColumn as error:
                available = list(row[1])
                hint = did_you_mean(error.name, available) or f" (available: {', '.join(available[:12])}, …)"
                problems.append(f"Unknown column {error.name!r}{hint}.")
            except InvalidRow as error:
                problems.append(f"Row {row[0]}: {error}")
        raise ConfigError(f"data: {self.files[0].path}: {next(iter(problems), 'The file has no rows.')}")

    def known_length(self) -> int | None:
        """Return the number of rows, including invalid ones, or None if counting them would be expensive."""
        total = 0
        for file in self.files:
            length = file.known_length()
            if length is None:
                return None
            total += length
        return total if self._config.limit is None else min(total, self._config.limit)

    def fingerprint(self) -> str:
        """Return a hash of the names, sizes, first bytes and last bytes of all files."""
        digest = hashlib.sha256()
        for file in self.files:
            size = file.path.stat().st_size
            digest.update(f"{file.path.name}\0{size}\0".encode())
            with file.path.open("rb") as opened:
                digest.update(opened.read(FINGERPRINT_BYTES))
                opened.seek(max(0, size - FINGERPRINT_BYTES))
                digest.update(opened.read(FINGERPRINT_BYTES))
        return digest.hexdigest()[:32]

    def _all_rows(self, start: int) -> Iterator[NumberedRow | BadRow]:
        first = 0
        for file in self.files:
            first = yield from file.rows(first, start)


def to_prompt(row: Mapping[str, Any], config: DataConfig) -> dict[str, Any]:
    """Return the prompt of a row, using the columns that the config names. Raises InvalidRow.

    Example:
        >>> config = DataConfig(path="x.jsonl", prompt="question", ground_truth="answer")
        >>> to_prompt({"question": "What is 6 times 7?", "answer": "42", "level": 1}, config)
        {'answer': '42', 'level': 1, 'prompt': 'What is 6 times 7?', 'ground_truth': '42'}
    """
    prompt = {name: value for name, value in row.items() if name not in (*RESERVED_PROMPT_KEYS, config.prompt)}
    prompt |= _conversation(_get(row, config.prompt), config)
    if config.ground_truth is not None:
        prompt["ground_truth"] = _get(row, config.ground_truth)
    if isinstance(config.tools_kwargs, dict):
        prompt["tools_kwargs"] = _fill_template(config.tools_kwargs, row)
    elif config.tools_kwargs is not None:
        prompt.pop(config.tools_kwargs, None)
        prompt["tools_kwargs"] = _parse_tools_kwargs(_get(row, config.tools_kwargs))
    elif "tools_kwargs" in row:
        prompt["tools_kwargs"] = _parse_tools_kwargs(row["tools_kwargs"])
    try:
        validate(Prompt, prompt, "Invalid prompt")
    except ConfigError as error:
        raise InvalidRow(str(error)) from None
    return prompt


def _conversation(value: Any, config: DataConfig) -> dict[str, Any]:
    system = [] if config.system is None else [{"role": "system", "content": config.system}]
    if isinstance(value, str) and value:
        return {"messages": [*system, {"role": "user", "content": value}]} if system else {"prompt": value}
    if not isinstance(value, list) or not value or not all(isinstance(one, Mapping) for one in value):
        problem = "is empty" if value in (None, "", []) else f"is neither text nor a list of messages: {value!r:.60}"
        raise InvalidRow(f"Column {config.prompt!r} {problem}.")
    messages = [_without_nulls(message) for message in value]
    return {"messages": messages if messages[0].get("role") == "system" else [*system, *messages]}


def _get(row: Mapping[str, Any], name: str) -> Any:
    if name in row:
        return row[name]
    if name == "prompt" and "messages" in row:  # "prompt" is the default; many data sets call the column "messages"
        return row["messages"]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise MissingColumn(name)
        value = value[part]
    return value


def _fill_template(template: Any, row: Mapping[str, Any]) -> Any:
    """Replace each `{column: NAME}` by the row's value."""
    if isinstance(template, dict):
        if template.keys() == {"column"} and isinstance(name := template["column"], str):
            return _get(row, name)
        return {key: _fill_template(value, row) for key, value in template.items()}
    if isinstance(template, list):
        return [_fill_template(value, row) for value in template]
    return template


def _parse_tools_kwargs(value: Any) -> dict[str, Any]:
    """Return keyword arguments by tool, from an object or its JSON, without the nulls that Parquet adds to each row."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRow(f"tools_kwargs is not valid JSON: {error}.") from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRow(f"tools_kwargs is not an object: {value!r:.60}.")
    return {
        tool: {kind: _without_nulls(kwargs) for kind, kwargs in kinds.items() if isinstance(kwargs, Mapping)}
        for tool, kinds in value.items()
        if isinstance(kinds, Mapping)
    }


def _without_nulls(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if value is not None}
