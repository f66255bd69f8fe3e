"""Statistics of runs match counts by hand."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_samples import trajectory, verl_line

from toolroll.errors import ConfigError, Fault
from toolroll.records.json_line import encode
from toolroll.records.line import trajectory_fields
from toolroll.records.record import Record
from toolroll.records.stats.histogram import Histogram
from toolroll.records.stats.plot import plot
from toolroll.records.stats.statistics import (
    MAX_ERROR_KINDS,
    OTHER_MESSAGES,
    RunningMean,
    RunStats,
    error_kind,
    merge_stats,
)
from toolroll.rollout.trajectory import CallRecord, FinishReason, Rewards, Trajectory


def recorded(one: Trajectory, step: int = 1) -> Record:
    return Record.parse(encode(trajectory_fields(one, step)))


def call(
    fault: Fault | None = None, *, tool: str = "f", wait: float = 0.0, run: float = 0.0, error: str = ""
) -> CallRecord:
    metrics = {"queue_wait": wait, "execution_time": run}
    return CallRecord(
        turn=0, tool=tool, arguments={}, answer="", fault=fault, error=error, seconds=1.0, metrics=metrics
    )


SECONDS = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=99))
def test_high_quantile_is_not_below_the_mean(values: list[float]) -> None:
    """Of less than 100 values, the 99th percentile is the largest."""
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    assert (histogram.quantile(0.99) or 0.0) >= (histogram.mean or 0.0) * (1 - 1e-9)


@given(SECONDS, SECONDS, st.sampled_from([0.0, 0.01, 0.5, 0.9, 0.99, 1.0]))
def test_quantiles_are_accurate_to_2_percent(one: list[float], other: list[float], fraction: float) -> None:
    histogram, second = Histogram(), Histogram()
    for value in one:
        histogram.add(value)
    for value in other:
        second.add(value)
    histogram.merge(second)
    values = sorted(one + other)
    true = next(value for place, value in enumerate(values, 1) if place >= fraction * len(values))
    found = histogram.quantile(fraction)
    assert found is not None
    assert found == pytest.approx(true, rel=0.021, abs=2e-9)
    assert histogram.mean == pytest.approx(statistics.fmean(values))
    assert histogram.as_dict()["max"] == max(values)


def test_empty_histogram() -> None:
    assert set(Histogram().as_dict().values()) == {None}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(0, 40))
def test_merged_means_equal_overall_mean(values: list[float], cut: int) -> None:
    one, other = RunningMean(), RunningMean()
    for value in values[:cut]:
        one.add(value)
    for value in values[cut:]:
        other.add(value)
    one.merge(other)
    assert one.count == len(values)
    assert one.mean == pytest.approx(statistics.fmean(values), rel=1e-9, abs=1e-6)
    assert one.std == pytest.approx(statistics.pstdev(values), rel=1e-6, abs=1e-3)
    assert (one.min, one.max) == (min(values), max(values))


def test_counts_match_the_records() -> None:
    calls: Sequence[CallRecord] = [
        call(wait=1.0, run=2.0),
        call(Fault.POLICY, error="Unknown tool 'a'."),
        call(Fault.POLICY, error="Unknown tool 'b'."),
        call(Fault.INFRA, tool="g", error="down", wait=9.0),
    ]
    stats = RunStats(
        [
            recorded(trajectory(0, score=1.0, calls=list(calls))),
            recorded(trajectory(1, score=0.0, calls=[], finish_reason=FinishReason.LENGTH)),
            recorded(trajectory(2, score=None, calls=[], outcome="infra", finish_reason=FinishReason.INFRA)),
            recorded(trajectory(3, score=0.5), step=2),
        ]
    )
    found = stats.as_dict()
    first, second = found["steps"]
    assert (first["step"], first["samples"], first["infra"]) == (1, 3, 1)
    assert first["score"] == {"count": 2, "mean": 0.5, "std": 0.5, "min": 0.0, "max": 1.0}
    assert (first["calls"], first["policy_faults"], first["infra_faults"]) == (4, 2, 1)
    assert first["queue_wait"]["p99"] == pytest.approx(9.0, rel=0.02)
    assert first["finish_reasons"] == {"stop": 1, "length": 1, "infra": 1}
    assert second["score"]["mean"] == 0.5
    assert second["rewards"]["right"]["mean"] == 0.5
    assert second["tokens"]["mean"] == 11
    assert found["total"]["samples"] == 4
    assert found["total"]["turns"] == 8
    assert found["tools"]["f"]["policy_faults"] == 2
    assert found["tools"]["g"]["infra_faults"] == 1
    assert found["tools"]["code_interpreter"]["execution_time"]["p50"] == pytest.approx(0.5, rel=0.02)
    assert found["faults"] == [
        {"fault": "policy", "kind": "Unknown tool '…'.", "count": 2},
        {"fault": "infra", "kind": "down", "count": 1},
    ]
    assert stats.total.finish_scores["length"].mean == 0.0


def test_verl_dumps_have_rewards_and_calls() -> None:
    stats = RunStats(
        Record.parse(encode(verl_line(step, score=score))) for step, score in ((1, 0.0), (1, 1.0), (2, 1.0))
    )
    total = stats.total
    assert (total.samples, total.call_count, total.turns) == (3, 3, 6)
    assert total.score.mean == pytest.approx(2 / 3)
    assert total.finish_counts == {"unknown": 3}


def test_many_steps_are_merged_into_ranges() -> None:
    stats = RunStats(Record.parse(encode({"step": step, "score": step})) for step in [*range(100), None])
    ranges = stats.ranges(20)
    assert [(steps[0], steps[-1]) for steps, _ in ranges[:2]] == [(0, 5), (6, 11)]
    assert ranges[-1][0][-1] is None
    assert len(ranges) <= 20
    assert merge_stats(stats for _, stats in ranges).samples == 101
    assert RunStats().as_dict()["steps"] == []


def test_error_kind_ignores_names_and_numbers() -> None:
    assert error_kind("\n  http://10.0.0.1:80: no answer after 3.5 s\nTraceback") == "http://N.N:N: no answer after N s"
    assert error_kind('no `x` and "y"') == "no '…' and '…'"
    assert error_kind("calc_gsm8k_reward failed 3 times") == "calc_gsm8k_reward failed N times", "digits of a name"
    assert error_kind("") == "(no message)"
    assert len(error_kind("word " * 1000)) == 100


def test_error_kinds_are_limited() -> None:
    stats = RunStats()
    for number in range(MAX_ERROR_KINDS + 50):
        name = "".join(chr(97 + int(digit)) for digit in str(number))
        stats.add(recorded(trajectory(calls=[call(Fault.POLICY, error=name)])))
    assert len(stats.error_kinds) == MAX_ERROR_KINDS + 1
    assert stats.error_kinds["policy", OTHER_MESSAGES] == 50


@pytest.mark.process  # matplotlib lists the fonts of a new machine by a program
@pytest.mark.parametrize("steps", [1, 50])
def test_plot_writes_an_image(tmp_path: Path, steps: int) -> None:
    from PIL import Image

    stats = RunStats(recorded(trajectory(score=step / steps), step) for step in range(steps))
    plot(stats, tmp_path / "stats.png")
    with Image.open(tmp_path / "stats.png") as picture:
        assert picture.size == (1650, 880)
        assert len(picture.convert("RGB").getcolors(1 << 20) or ()) > 20
    bare = RunStats(Record.parse(encode({"step": step})) for step in range(steps))
    plot(bare, tmp_path / "bare.svg")
    assert "<svg" in (tmp_path / "bare.svg").read_text()


@pytest.mark.process
def test_plot_errors(tmp_path: Path) -> None:
    some = RunStats([recorded(trajectory())])
    with pytest.raises(ConfigError, match="Nothing to plot"):
        plot(RunStats(), tmp_path / "x.png")
    with pytest.raises(ConfigError, match=r"Use a name like plot\.png"):
        plot(some, tmp_path / "x.docx")
    with pytest.raises(ConfigError, match="No such file"):
        plot(some, tmp_path / "nowhere" / "x.png")


@given(
    st.lists(st.sampled_from([Rewards(total=None), Rewards(total=1.0, functions={"a": None, "b": 2.0})]), max_size=3)
)
def test_unknown_rewards_are_not_counted(rewards: list[Rewards]) -> None:
    total = RunStats(recorded(trajectory(rewards=one)) for one in rewards).total
    known = sum(one.total is not None for one in rewards)
    assert total.score.count == known
    assert set(total.components) <= {"b"}
