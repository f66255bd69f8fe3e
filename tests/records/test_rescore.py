"""Re-scoring: each record once, unchanged except for its new score, also after a kill."""

import asyncio
import errno
import io
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_samples import trajectory, verl_line, write_verl
from strategies import scaled
from typer.testing import CliRunner

from toolroll.cli.app import app
from toolroll.errors import BudgetExhausted, ConfigError, InfraFault, RecordsNotWritten
from toolroll.limiter.budget_file import BUDGETS_FILE
from toolroll.limiter.limited import limited
from toolroll.limiter.registry import get_limiter
from toolroll.limiter.settings import ResourceLimits
from toolroll.records.json_line import encode
from toolroll.records.reader import read_records
from toolroll.records.record import Record
from toolroll.records.rescoring import rescore as rescore_module
from toolroll.records.rescoring.changes import ScoreChanges
from toolroll.records.rescoring.line import LineFrame
from toolroll.records.rescoring.output import RescoredDirectory
from toolroll.records.rescoring.rescore import Rescorer, RescoringFailed
from toolroll.records.rescoring.result import RescoreProgress, RescoreResult
from toolroll.records.writer import RecordWriter
from toolroll.rollout.reward import RewardRule
from toolroll.rollout.trajectory import FinishReason, Rewards, Trajectory
from toolroll.run.reward_functions import gsm8k_flexible


def write(folder: Path, *trajectories: Trajectory, step: int = 1) -> Path:
    with RecordWriter(folder) as writer:
        for one in trajectories:
            writer.append(one, step)
    return folder


def lines_of(folder: Path, step: int = 1) -> list[bytes]:
    return (folder / f"{step}.jsonl").read_bytes().splitlines(keepends=True)


def number_of(one: Trajectory) -> float:
    return float(one.request_id.removeprefix("request-"))


def run(source: Path, out: Path, function: Any = number_of, **options: Any) -> RescoreResult:
    return asyncio.run(Rescorer({"number": function}, **options).run(source, out))


def scores_of(folder: Path) -> list[float | None]:
    return [record.rescored["number"] for record in read_records(folder)]


def test_copy_differs_only_in_the_new_field(tmp_path: Path) -> None:
    dumps = write(tmp_path / "dumps", *map(trajectory, range(5)))
    write_verl(dumps / "rank-1" / "2.jsonl", [verl_line(2)])
    with (dumps / "1.jsonl").open("ab") as file:
        file.write(b'\n[1, 2]\n{"input": "half')
    before = {path: path.read_bytes() for path in dumps.rglob("*.jsonl")}
    result = run(dumps, tmp_path / "out", gsm8k_flexible)
    assert before == {path: path.read_bytes() for path in dumps.rglob("*.jsonl")}
    copies = lines_of(tmp_path / "out")
    assert copies[5:] == [b"\n", b"[1, 2]\n"]
    assert [line.replace(b',"rescored":{"number":1.0}', b"") for line in copies] == lines_of(dumps)[:7]
    assert (tmp_path / "out/rank-1/2.jsonl").read_bytes().endswith(b',"rescored":{"number":1.0}}\n')
    assert (result.records, result.bad_lines, result.unscored) == (6, 2, 0)


def test_scores_are_added_to_those_of_an_earlier_rescoring(tmp_path: Path) -> None:
    dumps = write(tmp_path / "dumps", *map(trajectory, range(2)))
    run(dumps, tmp_path / "first")
    asyncio.run(Rescorer({"zero": lambda _: 0}).run(tmp_path / "first", tmp_path / "second"))
    assert [record.rescored for record in read_records(tmp_path / "second")] == [
        {"number": 0.0, "zero": 0.0},
        {"number": 1.0, "zero": 0.0},
    ]
    with pytest.raises(ConfigError, match=r"already have a score 'number'. Choose another name"):
        run(tmp_path / "second", tmp_path / "third")


@settings(max_examples=scaled(100))
@given(
    st.dictionaries(st.sampled_from(["score", "input", "x"]), st.floats(allow_nan=False) | st.text(), max_size=3),
    st.dictionaries(st.text(), st.none() | st.floats(allow_nan=False, allow_infinity=False)),
    st.sampled_from([b"\n", b"  \r\n", b""]),
)
def test_frame_returns_the_scores_that_it_joined(
    fields: dict[str, Any], scores: dict[str, float | None], end: bytes
) -> None:
    raw = encode(fields)[:-1] + end
    frame = LineFrame.of_record(raw, Record.parse(raw), scores.keys())
    line = frame.join(scores)
    assert frame.scores_in(line) == scores
    assert line.endswith(end or b"\n")
    assert Record.parse(line).fields == {**Record.parse(raw).fields, "rescored": scores}
    assert all(frame.scores_in(line[:end]) is None for end in range(len(line)))
    more = LineFrame.of_record(line, Record.parse(line), ["more"])
    assert Record.parse(more.join({"more": 1.0})).rescored == {**scores, "more": 1.0}


DUMP_LINES = [encode({**verl_line(1, number), "gts": number}) for number in range(6)] + [b"\n", b"oops\n"]
COMPLETE = [
    LineFrame.of_record(line, Record.parse(line), ["number"]).join({"number": float(number)})
    for number, line in enumerate(DUMP_LINES[:6])
] + DUMP_LINES[6:]
UNSCORED = [line.replace(b'"number":%d.0' % number, b'"number":null') for number, line in enumerate(COMPLETE)]


@st.composite
def leftovers(draw: st.DrawFn) -> bytes | None:
    """Generate what an earlier process may leave: lines with or without scores, then any truncation or damage."""
    lines = [draw(st.sampled_from(pair)) for pair in zip(COMPLETE, UNSCORED, strict=True)]
    data = b"".join(lines[: draw(st.integers(0, len(lines)))])
    data = data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data
    return draw(st.sampled_from([None, data, data + COMPLETE[0], data + b"\x00\n"]))


@settings(max_examples=scaled(60))
@given(complete=leftovers(), part=leftovers())
def test_each_record_is_once_in_the_output_after_any_kill(complete: bytes | None, part: bytes | None) -> None:
    called: list[float] = []

    def ground_truth(one: Trajectory) -> float:
        called.append(one.extra["ground_truth"])
        return float(one.extra["ground_truth"])

    async def run_again(dumps: Path, out: Path) -> RescoreResult:
        rescorer = Rescorer({"number": ground_truth})
        await rescorer.run(dumps, out)
        (out / "1.jsonl").unlink()
        for name, data in (("1.jsonl", complete), (".1.jsonl.part", part)):
            if data is not None:
                (out / name).write_bytes(data)
        called.clear()
        return await rescorer.run(dumps, out)

    with tempfile.TemporaryDirectory() as folder:
        dumps, out = Path(folder, "dumps"), Path(folder, "out")
        dumps.mkdir()
        (dumps / "1.jsonl").write_bytes(b"".join(DUMP_LINES))
        result = asyncio.run(run_again(dumps, out))
        assert lines_of(out) == COMPLETE
        assert (result.records, result.unscored) == (6, 0)
        assert len(called) == len(set(called)), "no record is scored twice"
        assert not (out / ".1.jsonl.part").exists()


def test_output_of_a_shorter_source_is_shortened(tmp_path: Path) -> None:
    dumps = write(tmp_path / "dumps", *map(trajectory, range(3)))
    run(dumps, tmp_path / "out")
    (dumps / "1.jsonl").write_bytes(b"".join(lines_of(dumps)[:2]))
    assert run(dumps, tmp_path / "out").reused == 2
    assert scores_of(tmp_path / "out") == [0.0, 1.0]


def test_outputs_of_removed_files_are_deleted(tmp_path: Path) -> None:
    dumps, out = write(tmp_path / "dumps", trajectory(0)), tmp_path / "out"
    write(dumps, trajectory(1), step=2)
    write_verl(dumps / "rank-1" / "2.jsonl", [{**verl_line(2), "request_id": "request-2"}])
    (dumps / "images").mkdir()
    run(dumps, out)
    (out / ".2.jsonl.part").touch()
    (dumps / "2.jsonl").rename(dumps / "3.jsonl")
    (dumps / "rank-1" / "2.jsonl").unlink()
    run(dumps / "1.jsonl", out)
    assert len(list(out.rglob("*2.jsonl*"))) == 3, "the source is a single file"
    run(dumps, out)
    assert scores_of(out) == [0.0, 1.0]
    assert {path.name for path in out.iterdir() if ".jsonl" in path.name} == {"1.jsonl", "3.jsonl"}
    (dumps / "1.jsonl").rename(tmp_path / "1.jsonl")
    (dumps / "3.jsonl").rename(tmp_path / "3.jsonl")
    run(dumps, out)
    assert scores_of(out) == [0.0, 1.0], "a source without files, which may be on a disk that is not mounted"


def test_finished_rescoring_writes_nothing_again(tmp_path: Path) -> None:
    dumps = write(tmp_path / "dumps", *map(trajectory, range(3)))
    run(dumps, tmp_path / "out")
    before = (tmp_path / "out/1.jsonl").stat()
    assert run(dumps, tmp_path / "out").reused == 3
    assert (tmp_path / "out/1.jsonl").stat().st_mtime_ns == before.st_mtime_ns
    write(dumps, trajectory(3))
    assert run(dumps, tmp_path / "out").reused == 3
    assert scores_of(tmp_path / "out") == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.virtual_time
async def test_records_are_scored_concurrently_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescore_module, "MAX_WINDOW_LINES", 16)
    dumps = write(tmp_path / "dumps", *map(trajectory, range(64)))
    running = most = 0
    seen: list[RescoreProgress] = []

    async def slow(one: Trajectory) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(10 - number_of(one) % 8)
        running -= 1
        return number_of(one)

    started = asyncio.get_running_loop().time()
    await Rescorer({"number": slow}, concurrency=8).run(dumps, tmp_path / "out", seen.append)
    assert scores_of(tmp_path / "out") == list(map(float, range(64)))
    assert most == 8
    assert asyncio.get_running_loop().time() - started < 64 / 8 * 10
    assert [state.records for state in seen] == list(range(1, 65))
    assert seen[-1].bytes_done == seen[-1].total_bytes


async def test_resumed_rescoring_lets_other_tasks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescore_module, "MAX_WINDOW_LINES", 1)
    monkeypatch.setattr(rescore_module, "YIELD_INTERVAL_LINES", 4)
    dumps = write(tmp_path / "dumps", *map(trajectory, range(16)))
    rescorer = Rescorer({"number": number_of})
    await rescorer.run(dumps, tmp_path / "out")
    records, seen = 0, set[int]()

    def on_progress(progress: RescoreProgress) -> None:
        nonlocal records
        records = progress.records

    async def watch() -> None:
        while records < 16:
            seen.add(records)
            await asyncio.sleep(0)

    watcher = asyncio.create_task(watch())
    await rescorer.run(dumps, tmp_path / "out", on_progress)
    await watcher
    assert {4, 8, 12} <= seen


@pytest.mark.virtual_time
async def test_cancelled_rescoring_keeps_the_scores_so_far(tmp_path: Path) -> None:
    dumps = write(tmp_path / "dumps", *map(trajectory, range(4)))
    called: list[float] = []

    async def stuck_at_2(one: Trajectory) -> float:
        called.append(number_of(one))
        await asyncio.sleep(1000 if number_of(one) == 2 and len(called) <= 4 else 0)
        return number_of(one)

    rescorer = Rescorer({"number": stuck_at_2})
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(rescorer.run(dumps, tmp_path / "out"), 10)
    assert not (tmp_path / "out/1.jsonl").exists()
    assert (await rescorer.run(dumps, tmp_path / "out")).reused == 3
    assert called == [0, 1, 2, 3, 2]
    assert scores_of(tmp_path / "out") == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.virtual_time
async def test_cancelled_rescoring_keeps_scores_behind_a_slow_one(tmp_path: Path) -> None:
    dumps = write(tmp_path / "dumps", *map(trajectory, range(50)))
    called: list[float] = []

    async def stuck_at_0(one: Trajectory) -> float:
        called.append(number_of(one))
        await asyncio.sleep(1000 if number_of(one) == 0 and called.count(0) < 3 else 0)
        return number_of(one)

    rescorer = Rescorer({"number": stuck_at_0})
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rescorer.run(dumps, tmp_path / "out"), 10)
    assert (await rescorer.run(dumps, tmp_path / "out")).reused == 49
    assert called == [*range(50), 0, 0]
    assert scores_of(tmp_path / "out") == list(map(float, range(50)))


@pytest.mark.virtual_time
async def test_scores_that_an_unfinished_file_lacks_are_added(tmp_path: Path) -> None:
    dumps = write(tmp_path / "dumps", *map(trajectory, range(6)))
    called: list[float] = []
    is_down = True

    async def fails_at_1_and_waits_at_3(one: Trajectory) -> float:
        called.append(number_of(one))
        if is_down and number_of(one) == 1:
            raise InfraFault("the judge is down")
        await asyncio.sleep(1000 if is_down and number_of(one) == 3 else 0)
        return number_of(one)

    rescorer = Rescorer({"number": fails_at_1_and_waits_at_3})
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(rescorer.run(dumps, tmp_path / "out"), 10)
    is_down = False
    called.clear()
    result = await rescorer.run(dumps, tmp_path / "out")
    assert (result.unscored, result.reused) == (0, 4)
    assert called == [1, 3]
    assert scores_of(tmp_path / "out") == list(map(float, range(6)))


@pytest.mark.parametrize("is_complete", [True, False])
def test_moved_records_keep_their_scores(is_complete: bool, tmp_path: Path) -> None:
    """Two records are equal, and the second one of them has no score."""
    dumps, out = write(tmp_path / "dumps", *map(trajectory, range(100))), tmp_path / "out"
    lines = lines_of(dumps)
    (dumps / "1.jsonl").write_bytes(b"".join([*lines, lines[7]]))
    called: list[float] = []

    def once_each(one: Trajectory) -> float | None:
        called.append(number_of(one))
        return number_of(one) if called.count(number_of(one)) == 1 else None

    assert run(dumps, out, once_each).unscored == 1
    if not is_complete:
        (out / "1.jsonl").rename(out / ".1.jsonl.part")
    (dumps / "1.jsonl").write_bytes(b"".join([*lines[1:3], b"oops\n", *lines[4:], lines[7], lines[0]]))
    called.clear()
    result = run(dumps, out, once_each)
    assert (result.records, result.reused, result.unscored) == (100, 99, 0)
    assert called == [7.0], "the record without a score"
    assert scores_of(out) == [1.0, 2.0, *map(float, range(4, 100)), 7.0, 0.0]
    copies = [line.partition(b',"rescored"')[0].rstrip(b"}\n") for line in lines_of(out)]
    assert copies == [line.rstrip(b"}\n") for line in lines_of(dumps)]


def test_infra_fault_leaves_the_record_unscored_until_resumed(tmp_path: Path) -> None:
    dumps = write(tmp_path / "dumps", *map(trajectory, range(4)))
    is_down = True

    def flaky(one: Trajectory) -> float | None:
        if is_down and number_of(one) == 1:
            raise InfraFault("the sandbox is down")
        return None if is_down and number_of(one) == 3 else number_of(one)

    result = run(dumps, tmp_path / "out", flaky)
    assert scores_of(tmp_path / "out") == [0.0, None, 2.0, None]
    assert result.unscored == 2
    assert result.as_dict()["errors"] == [{"count": 1, "error": "Reward function 'number' failed: the sandbox is down"}]
    is_down = False
    result = run(dumps, tmp_path / "out", flaky)
    assert (result.unscored, result.reused) == (0, 2)
    assert scores_of(tmp_path / "out") == [0.0, 1.0, 2.0, 3.0]


def test_function_that_always_fails_stops_the_rescoring(tmp_path: Path) -> None:
    dumps = write(tmp_path / "dumps", *map(trajectory, range(100)))
    with pytest.raises(RescoringFailed, match=r"first 32 records could not be scored: .* ZeroDivisionError"):
        run(dumps, tmp_path / "out", lambda one: 1 / 0)


@pytest.mark.virtual_time
async def test_fast_failures_behind_slow_successes_do_not_stop(tmp_path: Path) -> None:
    dumps = write(tmp_path / "dumps", *map(trajectory, range(64)))

    async def first_ones_are_slow(one: Trajectory) -> float:
        if number_of(one) >= 31:
            raise InfraFault("no such case")
        await asyncio.sleep(10)
        return number_of(one)

    result = await Rescorer({"number": first_ones_are_slow}).run(dumps, tmp_path / "out")
    assert result.unscored == 33


def test_records_that_always_fail_do_not_block_new_ones(tmp_path: Path) -> None:
    """After the first run, only the records that failed are left in the first file."""
    dumps = write(tmp_path / "dumps", *map(trajectory, range(50)))

    def fails_from_1_to_40(one: Trajectory) -> float:
        if 1 <= number_of(one) <= 40:
            raise InfraFault("no such case")
        return number_of(one)

    assert run(dumps, tmp_path / "out", fails_from_1_to_40).unscored == 40
    write(dumps, trajectory(50), step=2)
    result = run(dumps, tmp_path / "out", fails_from_1_to_40)
    assert (result.records, result.unscored, result.reused) == (51, 40, 10)
    assert scores_of(tmp_path / "out")[-1] == 50.0


def test_damaged_output_directory_is_rejected(tmp_path: Path) -> None:
    dumps = write(tmp_path / "dumps", trajectory())
    run(dumps, tmp_path / "out")
    for content in (b"", b"[1]"):
        (tmp_path / "out/.rescore.json").write_bytes(content)
        with pytest.raises(ConfigError, match=r"\.rescore\.json is damaged: .* Choose another --out"):
            run(dumps, tmp_path / "out")


def test_spent_budget_stops_the_rescoring(tmp_path: Path) -> None:
    dumps = write(tmp_path / "dumps", *map(trajectory, range(4)))

    def judged(one: Trajectory) -> float:
        if number_of(one) == 2:
            raise BudgetExhausted("judge", "usd", 1, 0)
        return number_of(one)

    with pytest.raises(BudgetExhausted):
        run(dumps, tmp_path / "out", judged)
    assert run(dumps, tmp_path / "out").reused == 3


def judge(budget: int, calls: list[float]) -> tuple[str, Any]:
    """Return the new resource and the function of a judge with a budget of calls."""
    resource = f"judge-{uuid4().hex}"

    @limited(resource=resource, budget={"requests": budget})
    async def judged(one: Trajectory) -> float:
        calls.append(number_of(one))
        return number_of(one)

    return resource, judged


def test_next_rescoring_counts_the_spent_budget(tmp_path: Path) -> None:
    dumps, out = write(tmp_path / "dumps", *map(trajectory, range(8))), tmp_path / "out"
    calls: list[float] = []
    resource, judged = judge(5, calls)
    with pytest.raises(BudgetExhausted):
        run(dumps, out, judged)
    assert json.loads((out / BUDGETS_FILE).read_text()) == {resource: {"requests": 5.0}}
    for budget in (5, 8):  # a new resource, as this process knows the amount of the first
        resource, judged = judge(budget, calls)
        (out / BUDGETS_FILE).write_text(json.dumps({resource: {"requests": 5.0}}))
        if budget == 5:
            with pytest.raises(BudgetExhausted):
                run(dumps, out, judged)
        else:
            assert run(dumps, out, judged).unscored == 0
        assert len(calls) == budget
    assert sorted(calls) == list(map(float, range(8)))
    assert json.loads((out / BUDGETS_FILE).read_text()) == {resource: {"requests": 8.0}}


def test_damaged_budgets_are_an_error(tmp_path: Path) -> None:
    dumps, (_, judged) = write(tmp_path / "dumps", trajectory()), judge(5, [])
    run(dumps, tmp_path / "out", judged)
    (tmp_path / "out" / BUDGETS_FILE).write_text("[]")
    with pytest.raises(ConfigError, match="Correct the file, or delete it"):
        run(dumps, tmp_path / "out", judged)


def test_incomplete_conversations_are_not_scored(tmp_path: Path) -> None:
    """A trajectory whose reward function failed is complete. One whose `calc_reward` failed has no total."""
    ended_by_fault = trajectory(0, outcome="infra", finish_reason=FinishReason.INFRA)
    unrewarded = trajectory(1, outcome="infra", finish_reason=FinishReason.STOP, score=None)
    failed_tool = trajectory(2, outcome="infra", finish_reason=FinishReason.STOP, rewards=Rewards(total=None))
    dumps, rule = write(tmp_path / "dumps", ended_by_fault, unrewarded, failed_tool), RewardRule()
    write_verl(dumps / "2.jsonl", [{**verl_line(2), "request_id": "request-3"}])
    for attempt in range(2):
        result = run(dumps, tmp_path / "out", rule=rule)
        assert scores_of(tmp_path / "out") == [None, 1.0, 2.0, 3.0]
        assert [record.rescored["total"] for record in read_records(tmp_path / "out")] == [None, 1.0, None, 3.0]
        assert (result.incomplete, result.unscored, result.changes.total("number").gained) == (2, 0, 2)
        assert result.reused == 3 * attempt


def test_total_has_the_weights_of_the_rule(tmp_path: Path) -> None:
    rewards = Rewards(total=9.0, steps=(1.0, 2.0), tools={"code_interpreter": 4.0}, functions={"number": 0.5})
    dumps = write(tmp_path / "dumps", trajectory(3, rewards=rewards))
    functions = {"number": number_of}
    rule = RewardRule(steps=0.5, tools={"code_interpreter": 0.25}, functions=functions, weights={"number": 2.0})
    result = run(dumps, tmp_path / "out", rule=rule)
    [record] = read_records(tmp_path / "out")
    assert record.rescored == {"number": 3.0, "total": 1.5 + 1.0 + 6.0}
    assert record.score == 9.0
    assert result.changes.total("number").improved == 1, "compared with the recorded result of this function"
    assert result.changes.total("total").worse == 1


@given(st.lists(st.tuples(st.none() | st.integers(-2, 2), st.none() | st.integers(-2, 2))))
def test_each_record_is_counted_once(scores: list[tuple[float | None, float | None]]) -> None:
    changes, merged = ScoreChanges(), ScoreChanges()
    for number, (old, new) in enumerate(scores):
        changes.add(old, new)
        if number % 2:
            merged.add(old, new)
    assert changes.records == len(scores)
    assert changes.unscored == sum(new is None for _, new in scores)
    assert changes.improved == sum(None not in pair and pair[0] < pair[1] for pair in scores)
    assert changes.worse == sum(None not in pair and pair[0] > pair[1] for pair in scores)
    assert changes.gained == sum(old is None and new is not None for old, new in scores)
    for old, new in scores[::2]:
        merged.add(old, new)
    assert merged == changes


def test_output_directory_of_others_is_rejected(tmp_path: Path) -> None:
    dumps = write(tmp_path / "dumps", trajectory())
    for out in (dumps, dumps / "rescored", tmp_path):
        with pytest.raises(ConfigError, match="overlaps with the records"):
            run(dumps, out)
    with pytest.raises(ConfigError, match=r"not empty: it has '1.jsonl'"):
        run(dumps, write(tmp_path / "other", trajectory()))
    run(dumps, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"has the scores of source=.*dumps', but this command has source=.*other'"):
        run(tmp_path / "other", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"rewards=.*Choose another --out"):
        asyncio.run(Rescorer({"other": number_of}).run(dumps, tmp_path / "out"))


def test_output_directory_in_use_is_rejected(tmp_path: Path) -> None:
    dumps = write(tmp_path / "dumps", trajectory())

    def nested(one: Trajectory) -> float:
        with pytest.raises(ConfigError, match="Another process is writing to"), RescoredDirectory(out, dumps, {}):
            pass
        return 1.0

    out = tmp_path / "out"
    assert run(dumps, out, nested).unscored == 0


def test_full_disk_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dumps = write(tmp_path / "dumps", trajectory())
    open_file = Path.open

    class FullDisk(io.BytesIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    def open_part(path: Path, mode: str = "r", *args: Any) -> Any:
        return FullDisk() if path.suffix == ".part" else open_file(path, mode, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_part)
        with pytest.raises(RecordsNotWritten, match=r"Cannot write records to .*1\.jsonl\.part: No space left"):
            run(dumps, tmp_path / "out")
    assert run(dumps, tmp_path / "out").records == 1


def test_images_are_found_from_the_output(tmp_path: Path) -> None:
    dumps = write(tmp_path / "dumps", trajectory())
    (dumps / "images").mkdir()
    (dumps / "images/a.png").write_bytes(b"pixels")
    run(dumps / "1.jsonl", tmp_path / "out")
    run(dumps, tmp_path / "out")
    assert (tmp_path / "out/images/a.png").read_bytes() == b"pixels"


# The command


@pytest.fixture
def dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide records in the working directory: right answers that were scored as wrong, and truncated ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    right = [trajectory(number, score=0.0) for number in range(3)]
    cut = [trajectory(3, score=1.0, text="6 times 7 is 4", finish_reason=FinishReason.LENGTH)]
    write(tmp_path / "dumps", *right, *cut)
    return Path("dumps")


FLEXIBLE = "toolroll.run.reward_functions.gsm8k_flexible"


def test_command_compares_old_and_new_scores(dumps: Path) -> None:
    done = CliRunner().invoke(app, ["records", "rescore", str(dumps), "--rewards", FLEXIBLE])
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0] == ["4", "records", "in", "dumps-rescored"]
    assert ["stop", "3", "0.000", "1.000", "3", "3", "0", "0"] in rows
    assert ["length", "1", "1.000", "0.000", "1", "0", "1", "0"] in rows
    assert ["total", "4", "0.250", "0.750", "4", "3", "1", "0"] in rows
    assert [record.rescored for record in read_records("dumps-rescored")] == [{"gsm8k_flexible": 1.0}] * 3 + [
        {"gsm8k_flexible": 0.0}
    ]


def test_command_takes_the_functions_of_a_run(dumps: Path) -> None:
    Path("lengths.py").write_text("def length(trajectory, scale):\n    return scale * len(trajectory.messages)\n")
    functions = f"{{right: {FLEXIBLE}, length: {{path: lengths.length, scale: 0.5}}}}"
    engine = "engine: {kind: sglang, urls: '${oc.env:URL_OF_NO_ENGINE}'}"
    Path("run.yaml").write_text(f"{engine}\nrewards: {{functions: {functions}, weights: {{length: 2}}}}\n")
    command = ["records", "rescore", str(dumps), "--rewards", "run.yaml", "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["records"] == 4
    assert result["scores"]["right"]["finish_reasons"]["stop"]["improved"] == 3
    assert "scale" not in (Path(result["out"]) / ".rescore.json").read_text(), "settings may contain credentials"
    first = next(read_records(result["out"]))
    assert first.rescored == {"right": 1.0, "length": 2.0, "total": 5.0}
    Path("run.yaml").write_text(Path("run.yaml").read_text().replace("scale: 0.5", "scale: 0.25"))
    assert "Choose another --out" in str(CliRunner().invoke(app, command).exception)


def test_command_fails_if_a_record_has_no_score(dumps: Path) -> None:
    Path("fails.py").write_text("def fails(one):\n    return 1 / int(one.request_id[-1])\n")
    done = CliRunner().invoke(app, ["records", "rescore", str(dumps), "--rewards", "inverse=fails.fails"])
    assert done.exit_code == 1
    assert "1 × Reward function 'inverse' failed: ZeroDivisionError" in done.stdout
    assert "1 record without a score. Run the same command again" in done.stdout


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (["nothing"], "Expected a dotted path"),
        (["a=math.sqrt", "a=math.sin"], "Two functions have the same name"),
        (["run.yaml", "math.sqrt"], "Cannot combine run.yaml"),
        (["run.yaml"], "Config file not found"),
        (["total=math.sqrt"], "Reserved name 'total'"),
    ],
)
def test_wrong_rewards_are_explained(dumps: Path, rewards: list[str], message: str) -> None:
    options = [part for one in rewards for part in ("--rewards", one)]
    done = CliRunner().invoke(app, ["records", "rescore", str(dumps), *options])
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
    assert not Path("dumps-rescored").exists()


SLOW = """
import asyncio, os, sys

async def slow(trajectory):
    number = int(trajectory.request_id.removeprefix("request-"))
    print(trajectory.request_id, file=sys.stderr, flush=True)
    await asyncio.sleep(0.02)
    while number >= 150 and not os.path.exists("killed"):
        await asyncio.sleep(0.02)
    return float(number)
"""


@pytest.mark.process
def test_killed_command_resumes(tmp_path: Path) -> None:
    count, concurrency = 200, 8
    write(tmp_path / "dumps", *map(trajectory, range(count)))
    (tmp_path / "slowly.py").write_text(SLOW)
    command = [sys.executable, "-m", "toolroll.cli", "records", "rescore", "dumps", "--rewards", "number=slowly.slow"]
    command += ["--concurrency", str(concurrency), "--json"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        started = [process.stderr.readline() for _ in range(count // 2)]
        process.kill()
        started += process.stderr.readlines()
    (tmp_path / "killed").touch()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(started) < count
    result = json.loads(done.stdout)
    assert (result["records"], result["unscored"]) == (count, 0)
    assert scores_of(tmp_path / "dumps-rescored") == list(map(float, range(count)))
    again = len(started) + len(done.stderr.splitlines()) - count
    assert again <= 2 * concurrency, "only the records that were running are scored again"


JUDGE = """
def judge(trajectory):
    with open("calls", "a") as file:
        print(trajectory.request_id, file=file)
    return 1.0
"""


def rescore_judged(folder: Path, **limits: Any) -> "subprocess.Popen[str]":
    """Start to score the records in `dumps` with a judge that has limits."""
    (folder / "judging.py").write_text(JUDGE)
    functions = {"judge": {"path": "judging.judge", "limits": limits}}
    (folder / "rewards.yaml").write_text(json.dumps({"rewards": {"functions": functions}}))
    command = [sys.executable, "-m", "toolroll.cli", "records", "rescore", "dumps", "--rewards", "rewards.yaml"]
    command += ["--cluster", "auto"] if "resource" in limits else []
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def judged_records(folder: Path) -> list[str]:
    return sorted((folder / "calls").read_text().split()) if (folder / "calls").exists() else []


@pytest.mark.process
def test_command_counts_the_spent_budget(tmp_path: Path) -> None:
    write(tmp_path / "dumps", *map(trajectory, range(8)))
    for budget, status, scored in ((5, 3, 5), (5, 3, 5), (20, 0, 8)):
        with rescore_judged(tmp_path, budget={"calls": budget}) as process:
            output, _ = process.communicate(timeout=60)
        assert process.returncode == status, output
        assert ("run the same command again" in output) == (status == 3)
        assert judged_records(tmp_path) == [f"request-{number}" for number in range(scored)]
    assert json.loads((tmp_path / "dumps-rescored" / BUDGETS_FILE).read_text()) == {"judge": {"requests": 8.0}}


@pytest.mark.ray
def test_command_shares_the_limit_of_the_cluster(tmp_path: Path, cluster: str) -> None:
    from toolroll.limiter.token_bucket import limiter_status

    write(tmp_path / "dumps", *map(trajectory, range(4)))
    resource = f"judge-{uuid4().hex}"
    limits = {"resource": resource, "limit": 1}

    def is_waiting() -> bool:
        status = limiter_status(resource)
        return status.holders == 2 and status.waiting > 0

    slot = get_limiter(resource, ResourceLimits(**limits)).slot(hold=60)
    slot.acquire_blocking()
    with rescore_judged(tmp_path, **limits) as process:
        try:
            ends = time.monotonic() + 60
            while not (waiting := is_waiting()) and time.monotonic() < ends:
                assert process.poll() is None, process.communicate()
                time.sleep(0.1)
            assert waiting
            assert judged_records(tmp_path) == [], "this process has the only slot"
        finally:
            slot.release()
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert len(judged_records(tmp_path)) == 4
