"""Rows: the prompts of a run, out of files of any size, each under a number that stays its own.

    rows = Rows(config.data)
    for row in rows.rows(start=1_000_000):
        number, prompt = row                    # or it is a BadRow

Promises:

- A row's number is the same in every run over the same files. `fingerprint` says whether they are the same.
- Memory is bounded whatever the files' sizes, and rows before `start` are stepped over without being decoded.
- One bad row costs itself only. What is wrong with all of them, a column that isn't there say, is a ConfigError.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

from toolroll.errors import ConfigError, did_you_mean
from toolroll.run.config import DataConfig
from toolroll.run.prompt_row import PromptRow, UnusableRow
from toolroll.run.row_files import BadRow, Read, RowFile, find

LOOKED_AT = 100
"""Rows at the beginning of which one must have all columns that are named."""
MARK = 64 * 1024
"""Bytes of a file's beginning and of its end that are in the fingerprint."""


class Rows:
    """The rows of all files, one after another."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self._prompt = PromptRow(config)
        paths = [config.path] if isinstance(config.path, str) else config.path
        self.files: list[RowFile] = [file for path in paths for file in find(path)]
        if not self.files:
            raise ConfigError("data.path names no file.")

    def rows(self, start: int = 0) -> Iterator[tuple[int, dict[str, Any]] | BadRow]:
        """The rows from number `start` on: the number, and the row as a prompt. Or why it is none."""
        self.check()
        end = self._config.limit
        for found in self._all(start):
            number = found[0]
            if end is not None and number >= end:
                return
            if isinstance(found, BadRow):
                yield found
                continue
            try:
                yield number, self._prompt.prompt(found[1])
            except UnusableRow as error:
                yield BadRow(number, str(error))

    def check(self) -> None:
        """Look whether among the first rows there is one as the config says. Raises ConfigError."""
        problem = "there are no rows."
        for number, found in enumerate(islice(self._all(0), LOOKED_AT)):
            if isinstance(found, BadRow):
                wrong = f"row {found.number} can't be used. {found.why}"
            elif (name := self._prompt.missing(found[1])) is None:
                return
            else:
                wrong = f"there is no column {name!r}{_others(name, list(found[1]))}."
            problem = wrong if number == 0 else problem
        raise ConfigError(f"data: {self.files[0].path}: {problem}")

    def known_length(self) -> int | None:
        """How many rows there are at the most, where that is cheap to know."""
        total = 0
        for file in self.files:
            length = file.known_length()
            if length is None:
                return None
            total += length
        return total if self._config.limit is None else min(total, self._config.limit)

    def fingerprint(self) -> str:
        """Another one where the files' names, sizes, beginnings or ends are others."""
        mark = hashlib.sha256()
        for file in self.files:
            size = file.path.stat().st_size
            mark.update(f"{file.path.name}\0{size}\0".encode())
            with file.path.open("rb") as opened:
                mark.update(opened.read(MARK))
                opened.seek(max(0, size - MARK))
                mark.update(opened.read(MARK))
        return mark.hexdigest()[:32]

    def _all(self, start: int) -> Iterator[tuple[int, dict[str, Any]] | BadRow]:
        first = 0
        for file in self.files:
            first += yield from _numbered(file.rows(max(0, start - first)), first)


def _others(name: str, columns: list[str]) -> str:
    """The columns that there are."""
    return did_you_mean(name, columns) or f" (known: {', '.join(columns[:12])}, …)"


def _numbered(rows: Read, first: int) -> Read:
    """The same rows, with the file's first one under another number."""
    while True:
        try:
            found = next(rows)
        except StopIteration as ended:
            return int(ended.value)
        yield BadRow(first + found.number, found.why) if isinstance(found, BadRow) else (first + found[0], found[1])
