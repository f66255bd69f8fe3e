"""Full-text search: everything that is there, counted, in slices."""

import json
from pathlib import Path

from toolroll.records.index import Shelf
from toolroll.viewer.conversation import conversation
from toolroll.viewer.expression import Expression
from toolroll.viewer.fields import fields
from toolroll.viewer.listing import Place
from toolroll.viewer.needle import Needle
from toolroll.viewer.search import Search


def dump(directory: Path, step: int, outputs: list[str]) -> None:
    lines = [json.dumps({"input": "q", "output": text, "score": 1, "step": step, "note": "end"}) for text in outputs]
    (directory / f"{step}.jsonl").write_text("\n".join(lines) + "\n")


def made(search: Search) -> Search:
    while not search.advance(0.02):
        pass
    return search


def test_matches_are_counted_over_all_steps_from_the_present_one_on(tmp_path: Path) -> None:
    dump(tmp_path, 1, ["needle", "hay", "Needle needle"])
    dump(tmp_path, 2, ["hay", "a needle"])
    shelf = Shelf(tmp_path)
    one, two = shelf.steps
    search = made(Search(shelf.steps, 1, Needle("needle"), conversation))
    assert (search.matches, len(search), search.samples) == (4, 3, 5)
    assert [search.sample(number) for number in range(3)] == [Place(two, 1), Place(one, 0), Place(one, 2)]
    assert [search.sample_of(match) for match in range(4)] == [0, 1, 2, 2]
    assert (search.before(0), search.before(2)) == (0, 2)
    assert search.find(Place(one, 2)) == 2
    assert search.find(Place(one, 1)) is None


def test_every_field_is_searched(tmp_path: Path) -> None:
    dump(tmp_path, 1, ["x"])
    for show in (conversation, fields):
        assert made(Search(Shelf(tmp_path).steps, 0, Needle("end"), show)).matches == 1


def test_the_filter_holds_for_what_is_found(tmp_path: Path) -> None:
    dump(tmp_path, 1, ["needle a", "needle b"])
    search = made(Search(Shelf(tmp_path).steps, 0, Needle("needle"), conversation, Expression("'b' in output")))
    assert (len(search), search.sample(0).row) == (1, 1)


def test_what_is_added_is_searched_too_and_bad_lines_are_passed_over(tmp_path: Path) -> None:
    dump(tmp_path, 1, ["needle"])
    shelf = Shelf(tmp_path)
    search = made(Search(shelf.steps, 0, Needle("needle"), conversation))
    with (tmp_path / "1.jsonl").open("a") as file:
        file.write('{"output": "needle\n' + json.dumps({"input": "", "output": "needle needle"}) + "\n")
    shelf.refresh()
    assert made(search).matches == 3
    assert not search.is_stale
