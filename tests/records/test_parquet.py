"""Conversion of records to Parquet."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_samples import TRAJECTORIES, VERL_ANSWER, trajectory, verl_line
from strategies import JSON, scaled

from toolroll.errors import ConfigError
from toolroll.records.export import parquet
from toolroll.records.export.parquet import convert
from toolroll.records.json_line import encode
from toolroll.records.line import trajectory_fields
from toolroll.records.reader import read_records
from toolroll.records.record import FORMAT, Record
from toolroll.records.writer import RecordWriter
from toolroll.rollout.tokens import TokenStream
from toolroll.rollout.trajectory import Fidelity, Trajectory


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "records.parquet"


def converted(out: Path, *trajectories: Trajectory) -> list[dict[str, Any]]:
    convert((Record.parse(encode(trajectory_fields(one, 7))) for one in trajectories), out)
    rows: list[dict[str, Any]] = pq.read_table(out).to_pylist()
    return rows


def test_pandas_reads_tokens_as_lists(out: Path) -> None:
    converted(out, trajectory(0), trajectory(1, score=None, tokens=TokenStream([])))
    frame = pd.read_parquet(out)
    assert list(frame["step"]) == [7, 7]
    assert list(frame["score"].isna()) == [False, True]
    assert frame["token_ids"][0].tolist() == list(range(1, 12))
    assert frame["token_mask"][0].tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert frame["token_logprobs"][0].tolist() == [0, 0, 0, 0, -0.5, -0.25, -0.125, 0, 0, -1, -2]
    assert frame["prompt_length"][0] == 4
    assert frame["token_ids"][1] is None
    calls = frame["calls"].explode().apply(pd.Series)
    assert list(calls["queue_wait"]) == [0.25, 0.25]
    assert list(calls["attempts"]) == [1, 1]


def test_pyarrow_reads_all_fields(out: Path) -> None:
    before = TokenStream([1, 2])
    before.append_sampled([3], None, turn=0)
    (row,) = converted(out, trajectory(3, earlier=[before], fidelity=Fidelity.RERENDERED))
    record = Record.parse(encode(trajectory_fields(trajectory(3), 7)))
    assert (row["input"], row["output"], json.loads(row["gts"])) == (record.input, record.output, "42")
    assert (row["group"], row["sample"], row["request_id"]) == ("0", 3, "request-3")
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert json.loads(row["messages"][1]["tool_calls"])[0]["function"]["name"] == "code_interpreter"
    assert json.loads(row["calls"][0]["arguments"]) == {"code": "print(6 * 7)"}
    assert row["calls"][0]["execution_time"] == 0.5
    assert row["turns"][1]["seconds"] == 0.5
    assert row["spans"][1] == {"author": "model", "turn": 0, "start": 4, "end": 7, "weight_version": "3"}
    assert row["earlier"][0]["token_ids"] == [1, 2, 3]
    assert row["earlier"][0]["token_logprobs"] is None
    assert json.loads(row["rewards"])["total"] == 1.0
    assert json.loads(row["extra"])["ground_truth"] == "42"


@settings(max_examples=scaled(25))
@given(st.lists(TRAJECTORIES, max_size=3))
def test_any_trajectory_can_be_converted(
    tmp_path_factory: pytest.TempPathFactory, trajectories: list[Trajectory]
) -> None:
    """Including lone surrogates."""
    rows = converted(tmp_path_factory.mktemp("out") / "x.parquet", *trajectories)
    assert [row["token_ids"] or [] for row in rows] == [list(one.tokens.ids) for one in trajectories]
    assert [[turn["turn"] for turn in row["turns"]] for row in rows] == [
        [turn.turn for turn in one.turns] for one in trajectories
    ]


@settings(max_examples=scaled(25))
@given(
    st.lists(
        st.dictionaries(st.sampled_from([*trajectory_fields(trajectory(), 1), "rescored", "else"]), JSON, max_size=6),
        max_size=3,
    )
)
def test_any_other_line_can_be_converted(tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]]) -> None:
    out = tmp_path_factory.mktemp("out") / "x.parquet"
    records = [Record.parse(encode(line | form)) for line in lines for form in ({"format": FORMAT}, {"format": None})]
    assert convert(records, out) == len(records)
    for record, row in zip(records, pq.read_table(out).to_pylist(), strict=True):
        extra = json.loads(row["extra"])
        lost = [name for name, value in record.fields.items() if not _is_kept(name, value, record, row, extra)]
        assert lost == [], (record.fields, row)


def _is_kept(name: str, value: Any, record: Record, row: dict[str, Any], extra: dict[str, Any]) -> bool:
    if value in (None, [], {}) or (name in extra and extra[name] == value):
        return True
    if name == "extra":
        return isinstance(value, dict) and all(extra[key] == one or key in record.fields for key, one in value.items())
    column = row.get(name)
    if name in ("gts", "rewards", "rescored"):
        column = None if column is None else json.loads(column)
    if name in ("messages", "turns", "calls"):
        return isinstance(value, list) and list(map(_without_none, column)) == list(map(_without_none, value))
    return bool(column == value) or (name == "format" and record.is_native)


def _without_none(fields: Any) -> Any:
    return {name: one for name, one in fields.items() if one not in (None, [])} if isinstance(fields, dict) else fields


def test_fields_of_other_programs_are_kept(out: Path) -> None:
    foreign = {"format": "chat", "tokens": 12, "turns": 3, "calls": [1], "messages": "none", "score": "high"}
    native = {**trajectory_fields(trajectory(), 7), "tool_versions": {"search": "1"}}
    convert([Record.parse(encode(fields)) for fields in (foreign, native)], out)
    first, second = pq.read_table(out).to_pylist()
    assert json.loads(first["extra"]) == foreign
    assert json.loads(second["extra"]).keys() == {"ground_truth", "uid", "written_at", "tool_versions"}


def test_verl_dump_can_be_converted(out: Path) -> None:
    convert([Record.parse(encode(verl_line(3, 5, version="0.9", acc=0.5)))], out)
    (row,) = pq.read_table(out).to_pylist()
    assert (row["step"], row["sample"], row["output"], row["token_ids"]) == (3, 5, VERL_ANSWER, None)
    assert json.loads(row["extra"])["acc"] == 0.5
    assert len(row["messages"]) == 5


def test_row_groups_are_bounded(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_MAX_ROWS", 10)
    converted(out, *map(trajectory, range(25)))
    assert pq.ParquetFile(out).num_row_groups == 3
    monkeypatch.setattr(parquet, "ROW_GROUP_MAX_ROWS", 1000)
    monkeypatch.setattr(parquet, "ROW_GROUP_TARGET_BYTES", 1000)
    converted(out, *(trajectory(number, text="x" * 400) for number in range(6)))
    assert pq.ParquetFile(out).num_row_groups == 6


def test_file_is_replaced_only_when_complete(out: Path) -> None:
    converted(out, trajectory(1))
    before = out.read_bytes()

    def broken() -> Any:
        yield Record.parse(encode(trajectory_fields(trajectory(), 1)))
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        convert(broken(), out)
    assert out.read_bytes() == before
    assert list(out.parent.iterdir()) == [out]
    with pytest.raises(ConfigError, match=r"Cannot write .*: No such file"):
        convert([], out.parent / "nowhere" / "x.parquet")
    assert convert([], out) == 0
    assert len(pd.read_parquet(out)) == 0


MEASURE = """
import re, sys
from pathlib import Path
import pyarrow.parquet
from toolroll.records.export.parquet import convert
from toolroll.records.reader import read_records

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

before = peak()
print(convert(read_records(sys.argv[1]), Path(sys.argv[2])), peak() - before)
"""


@pytest.mark.process
def test_large_directory_takes_bounded_memory(tmp_path: Path, out: Path) -> None:
    folder = tmp_path / "dumps"
    with RecordWriter(folder) as writer:
        for number in range(300):
            writer.append(trajectory(number, text=f"{number} " * 6000), 0)
    for step in range(1, 10):
        (folder / f"{step}.jsonl").hardlink_to(folder / "0.jsonl")
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    assert size > 130
    done = subprocess.run([sys.executable, "-c", MEASURE, folder, out], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    count, growth_mb = done.stdout.split()
    assert int(count) == 3000
    assert float(growth_mb) < 250
    assert sum(1 for _ in read_records(folder)) == pq.read_metadata(out).num_rows
