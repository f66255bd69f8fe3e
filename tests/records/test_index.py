"""A shelf of dumps: nothing is read that isn't asked for, and what happens to the files is seen."""

import gc
import json
import os
import random
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from record_samples import trajectory, verl_line, write_verl

from toolroll.errors import ConfigError
from toolroll.records.columns import Columns
from toolroll.records.index import Shelf, StepFile
from toolroll.records.json_line import BadLine, encode
from toolroll.records.line import fields_of
from toolroll.records.summary import Bad, Summary
from toolroll.records.writer import RecordWriter


def line(number: int, step: int = 1) -> bytes:
    return encode(fields_of(trajectory(number), step))


def ids(step: StepFile) -> list[str | None]:
    """Of the rows, by what is on the disk; None of a bad one."""
    return [None if isinstance(step.summary(row), Bad) else step.record(row).request_id for row in range(len(step))]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A step's file with three samples."""
    (tmp_path / "1.jsonl").write_bytes(line(0) + line(1) + line(2))
    return tmp_path / "1.jsonl"


def test_steps_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("10", "9", "100", "-1", "notes", "also notes"):
        write_verl(tmp_path / f"{name}.jsonl", [verl_line(0)])
    write_verl(tmp_path / "rank-1" / "9.jsonl", [verl_line(9, 1), verl_line(9, 2)])
    shelf = Shelf(tmp_path)
    assert [step.name for step in shelf.steps] == ["-1", "9", "10", "100", "also notes", "notes"]
    assert [step.step for step in shelf.steps] == [-1, 9, 10, 100, None, None]
    nine = shelf.steps[1]
    assert nine.size == sum(path.stat().st_size for path in nine.paths)
    assert len(nine.paths) == 2
    assert nine.index()
    assert len(nine) == 3
    assert not shelf.refresh()


def test_nothing_is_read_before_it_is_asked_for(path: Path) -> None:
    step = Shelf(path.parent).steps[0]
    assert (len(step), step.is_indexed, step.size) == (0, False, path.stat().st_size)
    assert not step.index(up_to=2)
    assert (len(step), step.is_indexed) == (2, False)
    assert step.index(up_to=2)
    assert ids(step) == ["request-0", "request-1", "request-2"]
    assert Shelf(path).steps[0].name == "1"


def test_a_time_slice_is_kept(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_bytes(line(0) * 20_000)
    step, began = Shelf(tmp_path).steps[0], time.process_time()
    assert not step.index(seconds=0.02)
    assert time.process_time() - began < 0.5
    before = len(step)
    assert 0 < before < 20_000
    assert not step.index(seconds=0.0)
    assert len(step) == before + 1, "it goes on, however short the slices"


def test_summaries_are_those_of_the_records(tmp_path: Path) -> None:
    with RecordWriter(tmp_path) as writer:
        for number in range(20):
            writer.append(trajectory(number, score=random.choice([None, -0.05, 2e-05, 1e300])), 1)
            writer.append(verl_line(1, number, version=random.choice(["0.6", "0.8", "0.9"])), 1)
    step = Shelf(tmp_path).steps[0]
    step.index()
    for row in range(40):
        summary = step.summary(row)
        assert summary == step.record(row).summary()
        for name in Columns.NAMES:
            assert step.column(name)[row] == getattr(summary, name)
    assert step.raw(3) == (tmp_path / "1.jsonl").read_bytes().splitlines(keepends=True)[3]


NUMBERS = st.none() | st.integers(-(2**31), 2**31 - 2)
COUNTS = st.none() | st.integers(0, 2**16 - 2)
TEXTS = st.none() | st.text(st.characters(exclude_categories=()), max_size=5)


SUMMARIES = st.builds(
    Summary,
    step=NUMBERS,
    score=st.none() | st.floats(allow_nan=False),
    turns=COUNTS,
    calls=COUNTS,
    policy_faults=COUNTS,
    infra_faults=COUNTS,
    finish_reason=TEXTS,
    outcome=TEXTS,
    fidelity=TEXTS,
    group=TEXTS,
    sample=NUMBERS,
    request_id=TEXTS,
    tokens=NUMBERS,
    seconds=st.none() | st.floats(width=32, allow_nan=False),
)
NOTHING = Summary(*([None] * len(Columns.NAMES)))


@given(st.lists(st.none() | SUMMARIES, max_size=5), st.none() | SUMMARIES)
def test_columns_keep_what_they_are_given(rows: list[Summary | None], other: Summary | None) -> None:
    columns = Columns()
    for row in rows:
        columns.append(0, 0, 1, row)
    assert len(columns) == len(rows)
    if rows:
        columns.set(0, 2, other)
        rows[0] = other
    assert [columns.summary(row) for row in range(len(rows))] == [row or NOTHING for row in rows]


def test_a_number_that_is_too_large_is_cut(tmp_path: Path) -> None:
    write_verl(tmp_path / "1.jsonl", [verl_line(10**15) | {"group": "g", "sample": 10**18}])
    step = Shelf(tmp_path).steps[0]
    step.index()
    assert step.column("step")[0] == step.column("sample")[0] == 2**31 - 2
    assert step.record(0).sample == 10**18


def test_a_million_samples_fit(tmp_path: Path) -> None:
    """By what some of them take, of which each has a name of its own."""
    summary = Summary(3, 0.5, 2, 1, 0, 0, "stop", "ok", "exact", "prompt-123", 4, "", 2000, 12.5)
    tracemalloc.start()
    columns = Columns()
    for row in range(20_000):
        columns.append(0, row * 10_000, 10_000, _named(summary, f"{row:032x}"))
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / 20_000 < 150
    assert columns.summary(77) == _named(summary, f"{77:032x}")


def _named(summary: Summary, request_id: str) -> Summary:
    from dataclasses import replace

    return replace(summary, request_id=request_id)


# What happens to files


def test_a_file_that_grows(path: Path) -> None:
    shelf = Shelf(path.parent)
    step = shelf.steps[0]
    step.index()
    with path.open("ab") as file:
        file.write(line(3) + line(4)[:100])
        file.flush()
        assert shelf.refresh()
        assert not step.is_indexed
        assert step.index()
        assert ids(step) == ["request-0", "request-1", "request-2", "request-3", None]
        half = step.summary(4)
        assert isinstance(half, Bad)
        assert (half.path, half.number) == (str(path), 5)
        assert "half a line" in half.problem
        with pytest.raises(BadLine, match="half a line"):
            step.record(4)
        assert not shelf.refresh()
        assert step.index()
        file.write(line(4)[100:] + line(5))
    assert shelf.refresh()
    step.index()
    assert ids(step) == [f"request-{number}" for number in range(6)]
    assert (step.version, step.bad) == (0, 0)
    assert shelf.steps == [step]


@pytest.mark.parametrize("new", [b"", line(7), line(7) * 10, line(5) + line(6) + line(7)])
@pytest.mark.parametrize("moved", [False, True])
def test_a_file_that_is_written_anew(path: Path, new: bytes, moved: bool) -> None:
    """As verl does when a run begins again. Of the same size too."""
    shelf = Shelf(path.parent)
    step = shelf.steps[0]
    step.index()
    if moved:
        (path.parent / "new").write_bytes(new)
        (path.parent / "new").rename(path)
    else:
        path.write_bytes(new)
    os.utime(path, ns=(1, 1))
    assert shelf.refresh()
    assert shelf.steps == [step]
    assert (step.version, len(step)) == (1, 0)
    assert step.index()
    assert ids(step) == [json.loads(one)["request_id"] for one in new.splitlines()]


def test_a_last_line_that_is_cut_short(path: Path) -> None:
    path.write_bytes(line(0) + line(1).rstrip())
    shelf = Shelf(path.parent)
    step = shelf.steps[0]
    step.index()
    assert ids(step) == ["request-0", "request-1"]
    os.truncate(path, path.stat().st_size - 10)
    assert shelf.refresh()
    step.index()
    assert ids(step) == ["request-0", None]


def test_files_that_come_and_go(path: Path) -> None:
    shelf = Shelf(path.parent)
    step = shelf.steps[0]
    step.index()
    write_verl(path.parent / "0.jsonl", [])
    write_verl(path.parent / "rank-1" / "1.jsonl", [verl_line(1, 9, version="0.8")])
    assert shelf.refresh()
    assert [one.name for one in shelf.steps] == ["0", "1"]
    assert shelf.steps[1] is step
    step.index()
    assert ids(step) == ["request-0", "request-1", "request-2", "verl-9"]
    assert step.version == 0
    path.unlink()
    with pytest.raises(BadLine, match=r"1\.jsonl can't be read: No such file"):
        step.record(0)
    assert list(step.scan(3)) == [(3, (path.parent / "rank-1" / "1.jsonl").read_bytes())]
    assert shelf.refresh()
    step.index()
    assert ids(step) == ["verl-9"]
    assert step.version == 1
    (path.parent / "rank-1" / "1.jsonl").unlink()
    assert shelf.refresh()
    assert [one.name for one in shelf.steps] == ["0"]


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    write_verl(folder / "1.jsonl", [verl_line(1)])
    shelf = Shelf(folder)
    (folder / "1.jsonl").unlink()
    folder.rmdir()
    step = shelf.steps[0]
    assert step.index()
    assert list(step.scan()) == []
    assert shelf.refresh()
    assert shelf.steps == []
    with pytest.raises(ConfigError):
        Shelf(folder)


def test_lines_that_can_not_be_read_are_rows_that_say_so(tmp_path: Path) -> None:
    parts = [line(0), b'{"input": "\xff"}\n', b"\n", b"   \n", b"nothing\n", line(1), line(2)[:-1]]
    (tmp_path / "1.jsonl").write_bytes(b"".join(parts))
    step = Shelf(tmp_path).steps[0]
    assert step.index()
    assert ids(step) == ["request-0", None, None, "request-1", "request-2"]
    problems = [summary for row in range(5) if isinstance(summary := step.summary(row), Bad)]
    assert [bad.number for bad in problems] == [2, 5]
    assert "no UTF-8" in problems[0].problem
    assert "no JSON" in problems[1].problem
    assert step.column("score")[1] is None
    assert step.bad == 2
    assert step.raw(2) == b"nothing\n"


def test_a_field_of_5_mb(tmp_path: Path) -> None:
    with RecordWriter(tmp_path) as writer:
        writer.append(trajectory(0, text="é" * 2_500_000), 1)
        writer.append(trajectory(1), 1)
    step = Shelf(tmp_path).steps[0]
    step.index()
    assert ids(step) == ["request-0", "request-1"]
    assert len(step.record(0).messages[-1]["content"]) == 2_500_000


def test_scan_gives_the_rows_without_an_index_first(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with RecordWriter(tmp_path, writer=name) as writer:
            for number in range(700):
                writer.append({"request_id": f"{name}{number}"}, 1)
    step = Shelf(tmp_path).steps[0]
    step.index(up_to=10)
    rows = list(step.scan(5))
    assert [row for row, _ in rows] == list(range(5, 1400))
    assert all(raw == step.raw(row) for row, raw in rows)
    assert step.is_indexed


def test_threads_read_while_one_indexes(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_bytes(b"".join(line(number) for number in range(3000)))
    shelf = Shelf(tmp_path)
    step = shelf.steps[0]
    problems: list[Exception] = []

    def within(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except Exception as error:
                problems.append(error)

        return run

    def look() -> None:
        while not step.is_indexed:
            shelf.refresh()
            for row in {0, len(step) // 2, len(step) - 1} if len(step) else ():
                summary = step.summary(row)
                assert isinstance(summary, Summary)
                assert summary.request_id == step.record(row).request_id == f"request-{row}"

    def index() -> None:
        while not step.index(up_to=50):
            pass

    threads = [threading.Thread(target=within(work)) for work in (look, look, index, index, lambda: list(step.scan()))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems
    assert len(step) == 3000


class GrowingFiles(RuleBasedStateMachine):
    """Whatever writers do to the files of a step, in whatever order, its rows are the lines that are there."""

    folder: Path

    @initialize()
    def begin(self) -> None:
        import tempfile

        self.path = Path(tempfile.mkdtemp(dir=self.folder))
        self.files = [self.path / "1.jsonl", self.path / "b" / "1.jsonl"]
        self.files[1].parent.mkdir()
        self.files[0].touch()
        self.shelf = Shelf(self.path)
        self.written = 0

    @rule(which=st.integers(0, 1), count=st.integers(1, 3), cut=st.integers(0, 60), blank=st.booleans())
    def append(self, which: int, count: int, cut: int, blank: bool) -> None:
        lines = [b'{"request_id":"%d"}\n' % (self.written + number) for number in range(count)]
        self.written += count
        with self.files[which].open("ab") as file:
            file.write(b"".join(lines + [b" \n"] * blank)[: -cut or None])

    @rule(which=st.integers(0, 1))
    def end_line(self, which: int) -> None:
        with self.files[which].open("ab") as file:
            file.write(b"\n")

    @rule(which=st.integers(0, 1), keep=st.integers(0, 100))
    def cut(self, which: int, keep: int) -> None:
        if self.files[which].exists():
            with self.files[which].open("r+b") as file:
                file.truncate(min(keep, self.files[which].stat().st_size))

    @rule(which=st.integers(0, 1))
    def remove(self, which: int) -> None:
        self.files[which].unlink(missing_ok=True)

    @rule(up_to=st.integers(1, 3))
    def index(self, up_to: int) -> None:
        self.shelf.refresh()
        for step in self.shelf.steps:
            step.index(up_to=up_to)

    @invariant()
    def rows_are_lines(self) -> None:
        self.shelf.refresh()
        there = [file for file in self.files if file.exists()]
        assert bool(self.shelf.steps) == bool(there)
        lines = [one for file in there for one in file.read_bytes().split(b"\n") if one.strip()]
        found = []
        for step in self.shelf.steps:
            assert step.index()
            found = [step.raw(row).strip() for row in range(len(step))]
            assert found == [raw.strip() for _, raw in step.scan()]
            for row in range(len(step)):
                summary = step.summary(row)
                try:
                    assert isinstance(summary, Summary)
                    assert summary.request_id == json.loads(found[row])["request_id"]
                except (ValueError, AssertionError):
                    assert isinstance(summary, Bad)
        assert sorted(found) == sorted(one.strip() for one in lines)


def test_whatever_happens_to_files_rows_are_lines(tmp_path: Path) -> None:
    GrowingFiles.folder = tmp_path
    run_state_machine_as_test(GrowingFiles, settings=settings(max_examples=60, stateful_step_count=15, deadline=None))
