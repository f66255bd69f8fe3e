"""Attempt failed samples again when a run is resumed.

The records of samples that failed because of the infrastructure are moved to the directory `.superseded`, which readers
skip. So the samples are missing, and are produced again; and nothing counts them twice.
"""

from __future__ import annotations

import os
from pathlib import Path

from toolroll.records.directory import DumpFile, dump_files
from toolroll.records.json_line import BadLine
from toolroll.records.reader import check_complete, read_lines
from toolroll.records.record import Record

SUPERSEDED_DIR = ".superseded"


def set_aside_failed(directory: Path) -> int:
    """Move the records of failed samples of a run out of the way. No other process may write meanwhile.

    Args:
        directory: The run's `rollout_data_dir`.

    Returns:
        The number of records.

    Raises:
        OSError: If a file cannot be read or written. No record is lost.
    """
    return sum(_set_aside(file, directory) for file in dump_files(directory) if file.step is not None)


def _set_aside(file: DumpFile, directory: Path) -> int:
    path = Path(file.path)
    with path.open("rb") as opened:
        lines = list(read_lines(opened))
    failed = [_has_failed(line) for line in lines]
    if not any(failed):
        return 0
    target = directory / SUPERSEDED_DIR / path.relative_to(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    # First the copy, then the file without the lines: a crash in between leaves them in both.
    _write(target, [line for line, has_failed in zip(lines, failed, strict=True) if has_failed], "ab")
    kept = path.with_name(f".{path.name}.new")
    _write(kept, [line for line, has_failed in zip(lines, failed, strict=True) if not has_failed], "wb")
    kept.replace(path)
    return sum(failed)


def _write(path: Path, lines: list[bytes], mode: str) -> None:
    with path.open(mode) as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())


def _has_failed(line: bytes) -> bool:
    if b'"infra"' not in line:
        return False
    try:
        record = Record.parse(check_complete(line))
    except BadLine:
        return False
    return record.is_native and record.outcome == "infra"
