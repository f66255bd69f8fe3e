"""Alarms find jumps of a share within one step, and are quiet while the share does not change."""

import json
from collections.abc import Iterator
from itertools import product
from math import comb
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_samples import trajectory

from toolroll.errors import Fault
from toolroll.records.json_line import encode
from toolroll.records.line import trajectory_fields
from toolroll.records.record import Record
from toolroll.records.stats.alarm_blocks import AlarmBlocks, BlockCounts
from toolroll.records.stats.alarms import AlarmCounts, RunAlarms, ShareAlarm, rise_probability
from toolroll.records.stats.statistics import RunStats
from toolroll.records.writer import RecordWriter
from toolroll.rollout.trajectory import CallRecord, Fidelity, FinishReason, Trajectory
from toolroll.run.aggregates import SampleOutcome
from toolroll.run.resume import COMPLETE_STEPS_FILE, ResumeState

STEPS = 1000
SHARES = (0.0, 0.005, 0.02, 0.1, 0.3, 0.5, 0.9)
SIZES = (1, 16, 256, 2048)


def starts_of_alarms(hits: Iterator[int], samples: int, samples_per_prompt: int = 1) -> int:
    """Return the number of alarms that start in steps of `samples` samples each."""
    alarm, starts = ShareAlarm("malformed", samples_per_prompt), 0
    for malformed in hits:
        was_active = alarm.active
        alarm.add(AlarmCounts(samples=samples, malformed=malformed))
        starts += alarm.active and not was_active
    return starts


@pytest.mark.parametrize("size", SIZES)
def test_no_alarm_while_the_share_is_constant(size: int) -> None:
    """At most one alarm in 25,000 steps is expected; these have 7,000."""
    rng = np.random.default_rng(size)
    assert sum(starts_of_alarms(map(int, rng.binomial(size, share, STEPS)), size) for share in SHARES) == 0


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("n", [8, 16, 64, 256])
def test_no_alarm_if_samples_of_a_prompt_are_similar(share: float, n: int) -> None:
    """The shares of prompts have a beta distribution, with a correlation of 0.25 between the samples of a prompt."""
    rng, similarity, rows = np.random.default_rng(8), 3.0, BlockCounts(n).rows_per_block
    prompts = rng.beta(similarity * share, similarity * (1 - share), (STEPS, rows))
    assert starts_of_alarms(map(int, rng.binomial(n, prompts).sum(axis=1)), n * rows, n) == 0


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.12), (0.02, 0.2), (0.1, 0.35), (0.3, 0.6)])
def test_jump_is_found_within_one_step(before: float, after: float) -> None:
    rng = np.random.default_rng(1)
    for _ in range(100):
        alarms = RunAlarms()
        for malformed in rng.binomial(256, before, 8):
            alarms.add(AlarmCounts(samples=256, malformed=int(malformed)))
        assert alarms.messages() == {}
        alarms.add(AlarmCounts(samples=256, malformed=int(rng.binomial(256, after))))
        assert list(alarms.messages()) == ["malformed"]


def test_alarm_lasts_until_the_share_returns() -> None:
    alarms = RunAlarms()
    active = []
    for truncated in [5] * 4 + [60] * 100 + [10] * 4:
        alarms.add(AlarmCounts(samples=256, truncated=truncated))
        active.append(bool(alarms.messages()))
    assert active == [False] * 4 + [True] * 100 + [False] * 4, "an alarm does not become the norm"


def test_steps_of_few_samples_are_taken_together() -> None:
    alarms = RunAlarms()
    for step in range(80):
        alarms.add(AlarmCounts(samples=8, infra=0 if step < 70 else 4))
        assert not alarms.messages() or step > 70
    assert alarms.messages()["infra"] == "31.2 % samples with infra faults, 0.0 % before"


def test_no_alarm_without_a_baseline() -> None:
    alarms = RunAlarms()
    alarms.add(AlarmCounts(samples=256))
    alarms.add(AlarmCounts())
    alarms.add(AlarmCounts(samples=256, malformed=256))
    assert alarms.messages() == {}


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_probability_is_that_of_the_definition(hits: int, misses: int, hits_before: int, misses_before: int) -> None:
    samples, before, total = hits + misses, hits_before + misses_before, hits + hits_before
    tail = sum(comb(samples, k) * comb(before, total - k) for k in range(hits, min(total, samples) + 1))
    expected = tail / comb(samples + before, total)
    assert rise_probability(hits, samples, hits_before, before) == pytest.approx(expected, rel=1e-9)


def call(**fields: object) -> CallRecord:
    return CallRecord(turn=0, tool="t", arguments={}, answer="", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "counts"),
    [
        (trajectory(), AlarmCounts(samples=1)),
        (
            trajectory(calls=[call(fault=Fault.POLICY, metrics={"malformed": True})]),
            AlarmCounts(samples=1, malformed=True),
        ),
        (trajectory(calls=[call(fault=Fault.POLICY)]), AlarmCounts(samples=1)),
        (trajectory(calls=[call(metrics={"malformed": True})]), AlarmCounts(samples=1)),
        (trajectory(outcome="infra", finish_reason=FinishReason.INFRA), AlarmCounts(samples=1, infra=True)),
        (trajectory(finish_reason=FinishReason.LENGTH), AlarmCounts(samples=1, truncated=True)),
        (trajectory(fidelity=Fidelity.RERENDERED), AlarmCounts(samples=1, rerendered=True)),
    ],
)
def test_trajectory_and_its_record_are_counted_alike(one: Trajectory, counts: AlarmCounts) -> None:
    record = Record.parse(encode(trajectory_fields(one, 1)))
    assert AlarmCounts.of_record(record) == counts
    assert SampleOutcome.from_trajectory(one, 0).alarm_counts == counts
    assert SampleOutcome.from_record(record, 0).alarm_counts == counts


def test_block_counts_when_all_of_its_samples_have_ended() -> None:
    """Samples that were not truncated end first, so half of the samples would be misleading."""
    blocks = AlarmBlocks(n=2)
    fine, cut = AlarmCounts(samples=1), AlarmCounts(samples=1, truncated=1)
    for row in range(128):
        blocks.add(row, fine)
    for row in range(127):
        blocks.add(row, cut)
        assert blocks.alarms.figures()["truncated"]["share"] is None
    blocks.add(127, cut)
    assert blocks.alarms.figures()["truncated"]["share"] == 0.5
    for row in range(128, 256):
        blocks.skip_row(row)
    assert blocks.alarms.figures()["truncated"]["share"] == 0.5


def test_statistics_name_the_step_of_an_alarm() -> None:
    fine, cut = (
        Record.parse(encode({"format": "toolroll/1", "finish_reason": reason, "step": 0}))
        for reason in ("stop", "length")
    )
    stats = RunStats()
    for step in range(8):
        for number in range(128):
            record = cut if step >= 5 and number < 64 else fine
            stats.steps[step].add(record)
    assert stats.as_dict()["alarms"] == [{"step": 5, "messages": ["50.0 % truncated samples, 0.0 % before"]}]
    assert stats.as_dict()["steps"][5]["shares"]["truncated"] == 0.5


def test_resumed_run_counts_each_recorded_sample_once(tmp_path: Path) -> None:
    with RecordWriter(tmp_path) as writer:
        for number in range(200):
            writer.append(trajectory(group="0", sample=number, finish_reason=FinishReason.LENGTH), 0)
    n, rows = 256, BlockCounts(256).rows_per_block
    state = ResumeState(tmp_path, n=n, prompts_per_step=rows)
    state.load()
    for row in range(1, rows):
        state.skip_row(row)
    for number in range(n):
        assert state.alarm_blocks.alarms.figures()["truncated"]["share"] is None
        state.add(SampleOutcome.from_trajectory(trajectory(sample=number), 0))
    assert state.alarm_blocks.alarms.figures()["truncated"]["share"] == 200 / 256


N = 4
ROWS_PER_BLOCK = 64


def run_samples(state: ResumeState, rows: range, truncated: int) -> None:
    """Record samples of rows, as a run does. The first `truncated` samples of each row are truncated."""
    with RecordWriter(state.directory) as writer:
        for row, number in product(rows, range(N)):
            reason = FinishReason.LENGTH if number < truncated else FinishReason.STOP
            one = trajectory(group=str(row), sample=number, finish_reason=reason)
            writer.append(one, state.step_of(row))
            state.add(SampleOutcome.from_trajectory(one, row))


def resumed(directory: Path) -> ResumeState:
    """Return the state of a run that was killed, as a new process restores it."""
    state = ResumeState(directory, N, prompts_per_step=100)
    state.load()
    return state


def test_resumed_run_keeps_the_baseline_of_alarms(tmp_path: Path) -> None:
    state = resumed(tmp_path)
    run_samples(state, range(300), truncated=0)
    before = state.alarm_blocks.alarms.figures()
    assert before["truncated"] == {"share": 0.0, "baseline": 0.0, "alarm": False}
    state = resumed(tmp_path)
    assert state.alarm_blocks.alarms.figures() == before
    run_samples(state, range(300, 384), truncated=2)
    assert state.alarm_blocks.alarms.messages() == {"truncated": "50.0 % truncated samples, 0.0 % before"}


def test_block_that_straddles_a_resume_counts(tmp_path: Path) -> None:
    run_samples(resumed(tmp_path), range(100), truncated=0)
    state = resumed(tmp_path)
    assert state.first_row() == 100, "the records of the first step are not read"
    run_samples(state, range(100, 2 * ROWS_PER_BLOCK), truncated=4)
    share = (2 * ROWS_PER_BLOCK - 100) / ROWS_PER_BLOCK
    assert state.alarm_blocks.alarms.figures()["truncated"]["share"] == share


def test_step_without_counts_for_alarms_is_read_again(tmp_path: Path) -> None:
    """The entries of earlier versions have none."""
    run_samples(resumed(tmp_path), range(100), truncated=1)
    file = tmp_path / COMPLETE_STEPS_FILE
    entry = json.loads(file.read_text())
    del entry["alarm_blocks"]
    file.write_text(json.dumps(entry))
    state = resumed(tmp_path)
    assert state.first_row() == 100
    assert state.alarm_blocks.alarms.figures()["truncated"]["share"] == 0.25


def test_last_block_counts_when_the_data_ends() -> None:
    blocks = AlarmBlocks(n=2)
    for row in range(128):
        for _ in range(2):
            blocks.add(row, AlarmCounts(samples=1))
    blocks.add(128, AlarmCounts(samples=1, truncated=1))
    blocks.end_data(129)
    assert blocks.alarms.figures()["truncated"]["share"] == 0, "a sample is running"
    blocks.add(128, AlarmCounts(samples=1, truncated=1))
    assert blocks.alarms.figures()["truncated"]["share"] == 2 / 258
    blocks = AlarmBlocks(n=2)
    for _ in range(2):
        blocks.add(0, AlarmCounts(samples=1, truncated=1))
    blocks.end_data(1)
    assert blocks.alarms.figures()["truncated"]["share"] == 1


@given(st.lists(st.tuples(st.integers(0, 400), st.booleans())), st.integers(0, 100))
def test_block_counts_survive_json(samples: list[tuple[int, bool]], cut: int) -> None:
    whole, merged = BlockCounts(N), BlockCounts(N)
    parts = [BlockCounts(N), BlockCounts(N)]
    for number, (row, malformed) in enumerate(samples):
        for counts in (whole, parts[number >= cut]):
            counts.add(row, AlarmCounts(samples=1, malformed=malformed))
    for part in parts:
        merged.merge(BlockCounts.from_state(N, json.loads(json.dumps(part.state()))))
    assert sorted(merged.state()) == sorted(whole.state())
