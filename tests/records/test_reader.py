"""Dumps are read from first to last, whoever wrote them, in the memory of one line."""

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
from toolroll.records.reader import read
from toolroll.records.writer import RecordWriter

MB = 1024 * 1024


def test_by_step_and_not_by_name(tmp_path: Path) -> None:
    for step in (10, 9, 2, 100, -1):
        write_verl(tmp_path / f"{step}.jsonl", [verl_line(step)])
    write_verl(tmp_path / "notes.jsonl", [verl_line(0)])
    write_verl(tmp_path / "rank-1" / "9.jsonl", [verl_line(9, 1)])
    write_verl(tmp_path / "rank-1" / "deeper" / "9.jsonl", [verl_line(9, 2)])
    write_verl(tmp_path / ".hidden" / "9.jsonl", [verl_line(9, 3)])
    (tmp_path / "9.txt").write_text("nothing of ours")
    assert [record.step for record in read(tmp_path)] == [-1, 2, 9, 9, 10, 100, 0]
    assert [record.step for record in read(tmp_path, steps=[100, 9])] == [9, 9, 100]
    assert [record.step for record in read(tmp_path, steps=range(3, 11))] == [9, 9, 10]
    assert [record.step for record in read(tmp_path / "rank-1")] == [9, 9]
    assert [record.step for record in read(tmp_path / "notes.jsonl")] == [0]


def test_ours_and_verls_in_one_directory(tmp_path: Path) -> None:
    with RecordWriter(tmp_path, writer="ours") as writer:
        writer.append(trajectory(), 1)
    for version in ("0.6", "0.7", "0.8", "0.9"):
        write_verl(tmp_path / f"verl-{version}" / "1.jsonl", [verl_line(1, version=version), verl_line(1, 1)])
    records = list(read(tmp_path))
    assert len(records) == 9
    assert sum(record.is_ours for record in records) == 1


def test_what_can_not_be_read_is_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = json.dumps(verl_line(1)).encode()
    content = b"\n".join([good, b'{"input": "\xff"}', b"", b"  ", b"[]", good, b"{", good[:-20]])
    (tmp_path / "1.jsonl").write_bytes(content)
    (tmp_path / "2.jsonl").write_bytes(b"")
    (tmp_path / "3.jsonl").write_bytes(good)  # whole, but for its newline
    reading = read(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert len(list(reading)) == 3
    assert reading.bad == 4
    assert [message for message in caplog.messages if "1.jsonl, line 2 was skipped: It is no UTF-8" in message]
    assert [message for message in caplog.messages if "1.jsonl, line 8 was skipped: It is half a line" in message]


def test_a_file_that_is_no_dump_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "LONGEST", 5000)
    good = json.dumps(verl_line(1)).encode() + b"\n"
    (tmp_path / "1.jsonl").write_bytes(good + b"x" * 25_000 + b"\n" + good + b"\0" * 5000)
    reading = read(tmp_path)
    assert len(list(reading)) == 2
    assert reading.bad == 2


def test_not_every_bad_line_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "1.jsonl").write_bytes(b"no\n" * 1000)
    reading = read(tmp_path)
    assert list(reading) == []
    assert reading.bad == 1000
    assert len(caplog.messages) == reader.NAMED + 1


def test_a_file_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    write_verl(tmp_path / "1.jsonl", [verl_line(1)])
    reading = read(tmp_path)
    (tmp_path / "1.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"1\.jsonl can't be read: No such file"):
        list(reading)


def test_nothing_there(tmp_path: Path) -> None:
    assert list(read(tmp_path)) == []
    with pytest.raises(ConfigError, match=r"There is no directory .*rollout_data_dir"):
        read(tmp_path / "nothing")


MEASURED = """
import re, sys
from pathlib import Path
from toolroll.records.reader import read

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

before = peak()
count = sum(record.summary().turns for record in read(sys.argv[1]))
print(count, peak() - before)
"""


def test_a_large_directory_is_read_in_the_memory_of_one_line(tmp_path: Path) -> None:
    with RecordWriter(tmp_path) as writer:
        for number in range(400):
            writer.append(trajectory(number, text="x" * 8000), 0)
    size = (tmp_path / "0.jsonl").stat().st_size
    for step in range(1, 300 * MB // size):
        os.link(tmp_path / "0.jsonl", tmp_path / f"{step}.jsonl")
    done = subprocess.run([sys.executable, "-c", MEASURED, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    turns, grown = done.stdout.split()
    assert int(turns) == 2 * 400 * len(list(tmp_path.iterdir()))
    assert float(grown) < 10
