"""Dumps of toolroll and verl are read in order, with one line in memory."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from record_samples import trajectory, verl_line, write_verl

from toolroll.errors import ConfigError
from toolroll.records import reader
from toolroll.records.reader import read_records
from toolroll.records.writer import RecordWriter

MB = 1024 * 1024


def test_records_are_sorted_by_step(tmp_path: Path) -> None:
    for step in (10, 9, 2, 100, -1):
        write_verl(tmp_path / f"{step}.jsonl", [verl_line(step)])
    write_verl(tmp_path / "notes.jsonl", [verl_line(0)])
    write_verl(tmp_path / "rank-1" / "9.jsonl", [verl_line(9, 1)])
    write_verl(tmp_path / "rank-1" / "deeper" / "9.jsonl", [verl_line(9, 2)])
    write_verl(tmp_path / ".hidden" / "9.jsonl", [verl_line(9, 3)])
    (tmp_path / "9.txt").write_text("not a dump")
    assert [record.step for record in read_records(tmp_path)] == [-1, 2, 9, 9, 10, 100, 0]
    assert [record.step for record in read_records(tmp_path, steps=[100, 9])] == [9, 9, 100]
    assert [record.step for record in read_records(tmp_path, steps=range(3, 11))] == [9, 9, 10]
    assert [record.step for record in read_records(tmp_path / "rank-1")] == [9, 9]
    assert [record.step for record in read_records(tmp_path / "notes.jsonl")] == [0]


def test_toolroll_and_verl_in_one_directory(tmp_path: Path) -> None:
    with RecordWriter(tmp_path, writer="toolroll") as writer:
        writer.append(trajectory(), 1)
    for version in ("0.6", "0.7", "0.8", "0.9"):
        write_verl(tmp_path / f"verl-{version}" / "1.jsonl", [verl_line(1, version=version), verl_line(1, 1)])
    records = list(read_records(tmp_path))
    assert len(records) == 9
    assert sum(record.is_native for record in records) == 1


def test_unreadable_lines_are_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = json.dumps(verl_line(1)).encode()
    content = b"\n".join([good, b'{"input": "\xff"}', b"", b"  ", b"[]", good, b"{", good[:-20]])
    (tmp_path / "1.jsonl").write_bytes(content)
    (tmp_path / "2.jsonl").write_bytes(b"")
    (tmp_path / "3.jsonl").write_bytes(good)  # complete except for the newline
    records = read_records(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert len(list(records)) == 3
    assert records.bad_lines == 4
    assert [message for message in caplog.messages if "1.jsonl: skipped line 2: Invalid UTF-8" in message]
    assert [message for message in caplog.messages if "1.jsonl: skipped line 8: Incomplete line" in message]


def test_too_long_line_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 5000)
    good = json.dumps(verl_line(1)).encode() + b"\n"
    (tmp_path / "1.jsonl").write_bytes(good + b"x" * 25_000 + b"\n" + good + b"\0" * 5000)
    records = read_records(tmp_path)
    assert len(list(records)) == 2
    assert records.bad_lines == 2


def test_logged_bad_lines_are_limited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "1.jsonl").write_bytes(b"no\n" * 1000)
    records = read_records(tmp_path)
    assert list(records) == []
    assert records.bad_lines == 1000
    assert len(caplog.messages) == reader.MAX_LOGGED_BAD_LINES + 1


def test_removed_file_raises_config_error(tmp_path: Path) -> None:
    write_verl(tmp_path / "1.jsonl", [verl_line(1)])
    records = read_records(tmp_path)
    (tmp_path / "1.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"Cannot read .*1\.jsonl: No such file"):
        list(records)


def test_missing_directory_raises_config_error(tmp_path: Path) -> None:
    assert list(read_records(tmp_path)) == []
    with pytest.raises(ConfigError, match=r"No such directory: .*rollout_data_dir"):
        read_records(tmp_path / "nothing")


MEASURE = """
import re, sys
from pathlib import Path
from toolroll.records.reader import read_records

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

before = peak()
count = sum(record.summary().turns for record in read_records(sys.argv[1]))
print(count, peak() - before)
"""


@pytest.mark.process
def test_large_directory_takes_bounded_memory(tmp_path: Path) -> None:
    with RecordWriter(tmp_path) as writer:
        for number in range(400):
            writer.append(trajectory(number, text="x" * 8000), 0)
    size = (tmp_path / "0.jsonl").stat().st_size
    for step in range(1, 300 * MB // size):
        os.link(tmp_path / "0.jsonl", tmp_path / f"{step}.jsonl")
    done = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    turns, growth_mb = done.stdout.split()
    assert int(turns) == 2 * 400 * len(list(tmp_path.iterdir()))
    assert float(growth_mb) < 10
