"""Listings: filter, order, time slices, and files that grow."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from toolroll.records.index import DumpDirectory
from toolroll.viewer.query.expression import FilterExpression
from toolroll.viewer.query.listing import SampleListing, SampleOrder
from toolroll.viewer.query.scan import SamplePosition
from toolroll.viewer.widgets.background import step_trend
from viewer.dumps import write_toolroll_run

SCORES = [9, 0.5, None, 1.0, 2e-05, 10, -0.05]


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def dump(folder: Path, step: int, scores: list[float | None]) -> None:
    write(folder / f"{step}.jsonl", [{"input": "q", "output": f"o{s}", "score": s, "step": step} for s in scores])


def completed(listing: SampleListing) -> SampleListing:
    while not listing.advance(0.05):
        pass
    return listing


def scores(listing: SampleListing) -> list[float | None]:
    return [position.step.column("score")[position.row] for position in (listing[row] for row in range(len(listing)))]


def test_sort_is_numeric(tmp_path: Path) -> None:
    dump(tmp_path, 1, SCORES)
    steps = DumpDirectory(tmp_path).steps
    assert scores(completed(SampleListing(steps, None, SampleOrder("score")))) == [-0.05, 2e-05, 0.5, 1.0, 9, 10, None]
    assert scores(completed(SampleListing(steps, None, SampleOrder("score", descending=True)))) == [
        10,
        9,
        1.0,
        0.5,
        2e-05,
        -0.05,
        None,
    ]
    assert scores(completed(SampleListing(steps, None, SampleOrder("file", descending=True)))) == SCORES[::-1]
    assert scores(completed(SampleListing(steps))) == SCORES


def test_all_steps_are_listed_together(tmp_path: Path) -> None:
    dump(tmp_path, 2, [2, 4])
    dump(tmp_path, 10, [1, 3])
    steps = DumpDirectory(tmp_path).steps
    both = completed(SampleListing(steps, None, SampleOrder("score")))
    assert scores(both) == [1, 2, 3, 4]
    assert both[0] == SamplePosition(steps[1], 0)
    assert both.find(SamplePosition(steps[0], 1)) == 3
    assert both.find(SamplePosition(steps[0], 7)) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("score >= 1", [9, 1.0, 10]),
        ("score == None", [None]),
        ("'2e' in output", [2e-05]),
        ("line.output == 'o9'", [9]),
        ("step == 1 and row > 5", [10, -0.05]),
        ("file == '1' and score < 0", [-0.05]),
        ("faults > 0", []),
        ("finish == None and turns == 1 and row == 1", [9]),
    ],
)
def test_filter_selects_samples(tmp_path: Path, text: str, expected: list[float | None]) -> None:
    dump(tmp_path, 1, SCORES)
    listing = completed(SampleListing(DumpDirectory(tmp_path).steps, FilterExpression(text)))
    assert scores(listing) == expected
    assert listing.examined == len(SCORES)


def test_listing_continues_when_step_grows(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    line = json.dumps({"input": "q", "output": "x", "score": 5}) + "\n"
    path.write_text(line + line[:10])
    directory = DumpDirectory(tmp_path)
    plain, filtered = SampleListing(directory.steps), SampleListing(directory.steps, FilterExpression("score > 1"))
    assert (len(completed(plain)), len(completed(filtered))) == (2, 1)
    path.write_text(line + line + line)
    assert directory.refresh()
    assert (len(completed(plain)), len(completed(filtered))) == (3, 3)
    assert not plain.is_stale


def test_rewritten_step_makes_listing_stale(tmp_path: Path) -> None:
    dump(tmp_path, 1, SCORES)
    directory = DumpDirectory(tmp_path)
    listing = completed(SampleListing(directory.steps))
    dump(tmp_path, 1, [1])
    directory.refresh()
    assert listing.is_stale


def test_slices_show_partial_results(tmp_path: Path) -> None:
    dump(tmp_path, 1, [float(number) for number in range(20_000)])
    listing = SampleListing(
        DumpDirectory(tmp_path).steps, FilterExpression("score >= 100"), SampleOrder("score", descending=True)
    )
    seen, longest = [], 0.0
    done = False
    while not done:
        began = time.thread_time()
        done = listing.advance(0.01)
        longest = max(longest, time.thread_time() - began)
        seen.append(len(listing))
    assert len(seen) > 3
    assert seen == sorted(seen)
    assert any(0 < count < 19_900 for count in seen)
    assert scores(listing)[:2] == [19_999, 19_998]
    assert longest < 1


def test_concurrent_threads_list_each_sample_once(tmp_path: Path) -> None:
    dump(tmp_path, 1, [float(number) for number in range(5_000)])
    listing = SampleListing(DumpDirectory(tmp_path).steps, FilterExpression("score >= 0"))
    threads = [threading.Thread(target=completed, args=[listing]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores(listing) == list(range(5_000))


def test_step_trend_aggregates_samples(tmp_path: Path) -> None:
    step = DumpDirectory(write_toolroll_run(tmp_path, steps=[1])).steps[0]
    step.index()
    found = step_trend(step)
    scores = [score for row in range(len(step)) if (score := step.column("score")[row]) is not None]
    assert found.samples == 16
    assert found.score == pytest.approx(sum(scores) / len(scores))
    assert (found.lowest, found.highest) == (min(scores), max(scores))
    assert sum(found.finish_reasons.values()) == 16
    assert found.policy_faults is not None
    assert found.policy_faults > 0
