"""Which samples are listed: one step or all, filtered, in order, while files grow."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from toolroll.records.index import Shelf
from toolroll.viewer.expression import Expression
from toolroll.viewer.listing import Listing, Place
from toolroll.viewer.ordering import Order
from toolroll.viewer.trends import step_figures
from viewer.dumps import ours

SCORES = [9, 0.5, None, 1.0, 2e-05, 10, -0.05]


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def dump(directory: Path, step: int, scores: list[float | None]) -> None:
    write(directory / f"{step}.jsonl", [{"input": "q", "output": f"o{s}", "score": s, "step": step} for s in scores])


def made(listing: Listing) -> Listing:
    while not listing.advance(0.05):
        pass
    return listing


def scores(listing: Listing) -> list[float | None]:
    return [place.step.column("score")[place.row] for place in (listing[row] for row in range(len(listing)))]


def test_in_numeric_order(tmp_path: Path) -> None:
    dump(tmp_path, 1, SCORES)
    steps = Shelf(tmp_path).steps
    assert scores(made(Listing(steps, None, Order("score")))) == [-0.05, 2e-05, 0.5, 1.0, 9, 10, None]
    assert scores(made(Listing(steps, None, Order("score", descending=True)))) == [10, 9, 1.0, 0.5, 2e-05, -0.05, None]
    assert scores(made(Listing(steps, None, Order("file", descending=True)))) == SCORES[::-1]
    assert scores(made(Listing(steps))) == SCORES


def test_over_all_steps(tmp_path: Path) -> None:
    dump(tmp_path, 2, [2, 4])
    dump(tmp_path, 10, [1, 3])
    steps = Shelf(tmp_path).steps
    both = made(Listing(steps, None, Order("score")))
    assert scores(both) == [1, 2, 3, 4]
    assert both[0] == Place(steps[1], 0)
    assert both.find(Place(steps[0], 1)) == 3
    assert both.find(Place(steps[0], 7)) is None


@pytest.mark.parametrize(
    ("text", "wanted"),
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
def test_filtered(tmp_path: Path, text: str, wanted: list[float | None]) -> None:
    dump(tmp_path, 1, SCORES)
    listing = made(Listing(Shelf(tmp_path).steps, Expression(text)))
    assert scores(listing) == wanted
    assert listing.looked_at == len(SCORES)


def test_it_goes_on_as_a_step_grows_and_a_half_line_becomes_whole(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    line = json.dumps({"input": "q", "output": "x", "score": 5}) + "\n"
    path.write_text(line + line[:10])
    shelf = Shelf(tmp_path)
    plain, filtered = Listing(shelf.steps), Listing(shelf.steps, Expression("score > 1"))
    assert (len(made(plain)), len(made(filtered))) == (2, 1)
    path.write_text(line + line + line)
    assert shelf.refresh()
    assert (len(made(plain)), len(made(filtered))) == (3, 3)
    assert not plain.is_stale


def test_a_step_that_was_begun_anew_makes_it_stale(tmp_path: Path) -> None:
    dump(tmp_path, 1, SCORES)
    shelf = Shelf(tmp_path)
    listing = made(Listing(shelf.steps))
    dump(tmp_path, 1, [1])
    shelf.refresh()
    assert listing.is_stale


def test_it_works_in_slices_and_shows_what_it_has(tmp_path: Path) -> None:
    dump(tmp_path, 1, [float(number) for number in range(20_000)])
    listing = Listing(Shelf(tmp_path).steps, Expression("score >= 100"), Order("score", descending=True))
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


def test_several_threads_at_once_list_nothing_twice(tmp_path: Path) -> None:
    dump(tmp_path, 1, [float(number) for number in range(5_000)])
    listing = Listing(Shelf(tmp_path).steps, Expression("score >= 0"))
    threads = [threading.Thread(target=made, args=[listing]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores(listing) == list(range(5_000))


def test_figures_of_a_step(tmp_path: Path) -> None:
    step = Shelf(ours(tmp_path, steps=[1])).steps[0]
    step.index()
    found = step_figures(step)
    scores = [score for row in range(len(step)) if (score := step.column("score")[row]) is not None]
    assert found.samples == 16
    assert found.score == pytest.approx(sum(scores) / len(scores))
    assert (found.lowest, found.highest) == (min(scores), max(scores))
    assert sum(found.finishes.values()) == 16
    assert found.policy_faults is not None
    assert found.policy_faults > 0
