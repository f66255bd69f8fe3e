"""Index of dumps: lines are read on demand, and changes of the files are detected."""

import gc
import json
import os
import random
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from record_samples import trajectory, verl_line, write_verl
from strategies import scaled

from toolroll.errors import ConfigError
from toolroll.records.columns import SummaryTable
from toolroll.records.index import DumpDirectory, StepFile
from toolroll.records.json_line import BadLine, encode
from toolroll.records.line import trajectory_fields
from toolroll.records.summary import SampleSummary, UnreadableLine
from toolroll.records.writer import RecordWriter

SUMMARY_NAMES = [field.name for field in fields(SampleSummary)]


def line(number: int, step: int = 1) -> bytes:
    return encode(trajectory_fields(trajectory(number), step))


def ids(step: StepFile) -> list[str | None]:
    """Return the request ids of the rows as read from disk; None for an unreadable row."""
    return [
        None if isinstance(step.summary(row), UnreadableLine) else step.record(row).request_id
        for row in range(len(step))
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write the file of a step with three samples."""
    (tmp_path / "1.jsonl").write_bytes(line(0) + line(1) + line(2))
    return tmp_path / "1.jsonl"


def test_steps_are_sorted_by_number(tmp_path: Path) -> None:
    for name in ("10", "9", "100", "-1", "notes", "also notes"):
        write_verl(tmp_path / f"{name}.jsonl", [verl_line(0)])
    write_verl(tmp_path / "rank-1" / "9.jsonl", [verl_line(9, 1), verl_line(9, 2)])
    dumps = DumpDirectory(tmp_path)
    assert [step.name for step in dumps.steps] == ["-1", "9", "10", "100", "also notes", "notes"]
    assert [step.step for step in dumps.steps] == [-1, 9, 10, 100, None, None]
    nine = dumps.steps[1]
    assert nine.size == sum(path.stat().st_size for path in nine.paths)
    assert len(nine.paths) == 2
    assert nine.index()
    assert len(nine) == 3
    assert not dumps.refresh()


def test_lines_are_read_on_demand(path: Path) -> None:
    step = DumpDirectory(path.parent).steps[0]
    assert (len(step), step.is_indexed, step.size) == (0, False, path.stat().st_size)
    assert not step.index(up_to=2)
    assert (len(step), step.is_indexed) == (2, False)
    assert step.index(up_to=2)
    assert ids(step) == ["request-0", "request-1", "request-2"]
    assert DumpDirectory(path).steps[0].name == "1"


def test_index_stays_within_its_time(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_bytes(line(0) * 20_000)
    step, start = DumpDirectory(tmp_path).steps[0], time.process_time()
    assert not step.index(seconds=0.02)
    assert time.process_time() - start < 0.5
    before = len(step)
    assert 0 < before < 20_000
    assert not step.index(seconds=0.0)
    assert len(step) == before + 1, "indexes at least one line per call"


def test_summaries_match_the_records(tmp_path: Path) -> None:
    with RecordWriter(tmp_path) as writer:
        for number in range(20):
            writer.append(trajectory(number, score=random.choice([None, -0.05, 2e-05, 1e300])), 1)
            writer.append(verl_line(1, number, version=random.choice(["0.6", "0.8", "0.9"])), 1)
    step = DumpDirectory(tmp_path).steps[0]
    step.index()
    for row in range(40):
        summary = step.summary(row)
        assert summary == step.record(row).summary()
        for name in SUMMARY_NAMES:
            assert step.column(name)[row] == getattr(summary, name)
    assert step.raw(3) == (tmp_path / "1.jsonl").read_bytes().splitlines(keepends=True)[3]


NUMBERS = st.none() | st.integers(-(2**31), 2**31 - 2)
COUNTS = st.none() | st.integers(0, 2**16 - 2)
TEXTS = st.none() | st.text(st.characters(exclude_categories=()), max_size=5)


SUMMARIES = st.builds(
    SampleSummary,
    step=NUMBERS,
    score=st.none() | st.floats(allow_nan=False),
    turns=COUNTS,
    calls=COUNTS,
    policy_faults=COUNTS,
    infra_faults=COUNTS,
    failed_programs=COUNTS,
    finish_reason=TEXTS,
    outcome=TEXTS,
    fidelity=TEXTS,
    group=TEXTS,
    sample=NUMBERS,
    request_id=TEXTS,
    tokens=NUMBERS,
    seconds=st.none() | st.floats(width=32, allow_nan=False),
)
NOTHING = SampleSummary(*([None] * len(SUMMARY_NAMES)))


@given(st.lists(st.none() | SUMMARIES, max_size=5), st.none() | SUMMARIES)
def test_columns_return_their_values(rows: list[SampleSummary | None], other: SampleSummary | None) -> None:
    columns = SummaryTable()
    for number, row in enumerate(rows):
        columns.put(number, 0, 0, 1, row)
    assert len(columns) == len(rows)
    if rows:
        columns.put(0, 0, 0, 2, other)
        rows[0] = other
    assert [columns.summary(row) for row in range(len(rows))] == [row or NOTHING for row in rows]


def test_too_large_number_is_clamped(tmp_path: Path) -> None:
    write_verl(tmp_path / "1.jsonl", [verl_line(10**15) | {"group": "g", "sample": 10**18}])
    step = DumpDirectory(tmp_path).steps[0]
    step.index()
    assert step.column("step")[0] == step.column("sample")[0] == 2**31 - 2
    assert step.record(0).sample == 10**18


def test_summary_takes_at_most_150_bytes(tmp_path: Path) -> None:
    """With a different request id in each row."""
    summary = SampleSummary(3, 0.5, 2, 1, 0, 0, 0, "stop", "ok", "exact", "prompt-123", 4, "", 2000, 12.5)
    tracemalloc.start()
    columns = SummaryTable()
    for row in range(20_000):
        columns.put(row, 0, row * 10_000, 10_000, _with_request_id(summary, f"{row:032x}"))
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / 20_000 < 150
    assert columns.summary(77) == _with_request_id(summary, f"{77:032x}")


def _with_request_id(summary: SampleSummary, request_id: str) -> SampleSummary:
    from dataclasses import replace

    return replace(summary, request_id=request_id)


# Changes of files


def test_growing_file(path: Path) -> None:
    dumps = DumpDirectory(path.parent)
    step = dumps.steps[0]
    step.index()
    with path.open("ab") as file:
        file.write(line(3) + line(4)[:100])
        file.flush()
        assert dumps.refresh()
        assert not step.is_indexed
        assert step.index()
        assert ids(step) == ["request-0", "request-1", "request-2", "request-3", None]
        incomplete = step.summary(4)
        assert isinstance(incomplete, UnreadableLine)
        assert (incomplete.path, incomplete.number) == (str(path), 5)
        assert "Incomplete line" in incomplete.problem
        with pytest.raises(BadLine, match="Incomplete line"):
            step.record(4)
        assert not dumps.refresh()
        assert step.index()
        file.write(line(4)[100:] + line(5))
    assert dumps.refresh()
    step.index()
    assert ids(step) == [f"request-{number}" for number in range(6)]
    assert (step.version, step.bad_rows) == (0, 0)
    assert dumps.steps == [step]


@pytest.mark.parametrize("new", [b"", line(7), line(7) * 10, line(5) + line(6) + line(7)])
@pytest.mark.parametrize("moved", [False, True])
def test_rewritten_file(path: Path, new: bytes, moved: bool) -> None:
    """verl rewrites its files when a run is restarted. The new file may have the same size."""
    dumps = DumpDirectory(path.parent)
    step = dumps.steps[0]
    step.index()
    if moved:
        (path.parent / "new").write_bytes(new)
        (path.parent / "new").rename(path)
    else:
        path.write_bytes(new)
    os.utime(path, ns=(1, 1))
    assert dumps.refresh()
    assert dumps.steps == [step]
    assert (step.version, len(step)) == (1, 0)
    assert step.index()
    assert ids(step) == [json.loads(one)["request_id"] for one in new.splitlines()]


def test_truncated_last_line(path: Path) -> None:
    path.write_bytes(line(0) + line(1).rstrip())
    dumps = DumpDirectory(path.parent)
    step = dumps.steps[0]
    step.index()
    assert ids(step) == ["request-0", "request-1"]
    os.truncate(path, path.stat().st_size - 10)
    assert dumps.refresh()
    step.index()
    assert ids(step) == ["request-0", None]


def test_added_and_removed_files(path: Path) -> None:
    dumps = DumpDirectory(path.parent)
    step = dumps.steps[0]
    step.index()
    write_verl(path.parent / "0.jsonl", [])
    write_verl(path.parent / "rank-1" / "1.jsonl", [verl_line(1, 9, version="0.8")])
    assert dumps.refresh()
    assert [one.name for one in dumps.steps] == ["0", "1"]
    assert dumps.steps[1] is step
    step.index()
    assert ids(step) == ["request-0", "request-1", "request-2", "verl-9"]
    assert step.version == 0
    path.unlink()
    with pytest.raises(BadLine, match=r"Cannot read .*1\.jsonl: No such file"):
        step.record(0)
    assert list(step.scan(3)) == [(3, (path.parent / "rank-1" / "1.jsonl").read_bytes())]
    assert dumps.refresh()
    step.index()
    assert ids(step) == ["verl-9"]
    assert step.version == 1
    (path.parent / "rank-1" / "1.jsonl").unlink()
    assert dumps.refresh()
    assert [one.name for one in dumps.steps] == ["0"]


def test_removed_directory(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    write_verl(folder / "1.jsonl", [verl_line(1)])
    dumps = DumpDirectory(folder)
    (folder / "1.jsonl").unlink()
    folder.rmdir()
    step = dumps.steps[0]
    assert step.index()
    assert list(step.scan()) == []
    assert dumps.refresh()
    assert dumps.steps == []
    with pytest.raises(ConfigError):
        DumpDirectory(folder)


def test_unreadable_lines_are_rows_with_a_problem(tmp_path: Path) -> None:
    parts = [line(0), b'{"input": "\xff"}\n', b"\n", b"   \n", b"nothing\n", line(1), line(2)[:-1]]
    (tmp_path / "1.jsonl").write_bytes(b"".join(parts))
    step = DumpDirectory(tmp_path).steps[0]
    assert step.index()
    assert ids(step) == ["request-0", None, None, "request-1", "request-2"]
    problems = [summary for row in range(5) if isinstance(summary := step.summary(row), UnreadableLine)]
    assert [bad.number for bad in problems] == [2, 5]
    assert "Invalid UTF-8" in problems[0].problem
    assert "Invalid JSON" in problems[1].problem
    assert step.column("score")[1] is None
    assert step.bad_rows == 2
    assert step.raw(2) == b"nothing\n"


def test_field_of_5_mb(tmp_path: Path) -> None:
    with RecordWriter(tmp_path) as writer:
        writer.append(trajectory(0, text="é" * 2_500_000), 1)
        writer.append(trajectory(1), 1)
    step = DumpDirectory(tmp_path).steps[0]
    step.index()
    assert ids(step) == ["request-0", "request-1"]
    assert len(step.record(0).messages[-1]["content"]) == 2_500_000


def test_scan_indexes_on_demand(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with RecordWriter(tmp_path, writer=name) as writer:
            for number in range(700):
                writer.append({"request_id": f"{name}{number}"}, 1)
    step = DumpDirectory(tmp_path).steps[0]
    step.index(up_to=10)
    rows = list(step.scan(5))
    assert [row for row, _ in rows] == list(range(5, 1400))
    assert all(raw == step.raw(row) for row, raw in rows)
    assert step.is_indexed


def test_threads_read_while_others_index(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_bytes(b"".join(line(number) for number in range(3000)))
    dumps = DumpDirectory(tmp_path)
    step = dumps.steps[0]
    errors: list[Exception] = []

    def collect_errors(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except Exception as error:
                errors.append(error)

        return run

    def read() -> None:
        while not step.is_indexed:
            dumps.refresh()
            for row in {0, len(step) // 2, len(step) - 1} if len(step) else ():
                summary = step.summary(row)
                assert isinstance(summary, SampleSummary)
                assert summary.request_id == step.record(row).request_id == f"request-{row}"

    def index() -> None:
        while not step.index(up_to=50):
            pass

    jobs: list[Callable[[], object]] = [read, read, index, index, lambda: list(step.scan())]
    threads = [threading.Thread(target=collect_errors(job)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert len(step) == 3000


class GrowingFiles(RuleBasedStateMachine):
    """Invariant: the rows of a step are the lines of its files, whatever writers do to them."""

    folder: Path

    @initialize()
    def create_files(self) -> None:
        import tempfile

        self.path = Path(tempfile.mkdtemp(dir=self.folder))
        self.files = [self.path / "1.jsonl", self.path / "b" / "1.jsonl"]
        self.files[1].parent.mkdir()
        self.files[0].touch()
        self.dumps = DumpDirectory(self.path)
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
        self.dumps.refresh()
        for step in self.dumps.steps:
            step.index(up_to=up_to)

    @invariant()
    def rows_are_lines(self) -> None:
        self.dumps.refresh()
        existing = [file for file in self.files if file.exists()]
        assert bool(self.dumps.steps) == bool(existing)
        lines = [one for file in existing for one in file.read_bytes().split(b"\n") if one.strip()]
        found = []
        for step in self.dumps.steps:
            assert step.index()
            found = [step.raw(row).strip() for row in range(len(step))]
            assert found == [raw.strip() for _, raw in step.scan()]
            for row in range(len(step)):
                summary = step.summary(row)
                try:
                    assert isinstance(summary, SampleSummary)
                    assert summary.request_id == json.loads(found[row])["request_id"]
                except (ValueError, AssertionError):
                    assert isinstance(summary, UnreadableLine)
        assert sorted(found) == sorted(one.strip() for one in lines)


def test_rows_are_lines_after_any_changes(tmp_path: Path) -> None:
    GrowingFiles.folder = tmp_path
    run_state_machine_as_test(
        GrowingFiles, settings=settings(max_examples=scaled(60), stateful_step_count=15, deadline=None)
    )
