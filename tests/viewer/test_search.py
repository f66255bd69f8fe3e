"""Full-text search over all steps."""

import json
from pathlib import Path

from toolroll.records.index import DumpDirectory
from toolroll.viewer.documents.conversation import conversation
from toolroll.viewer.documents.document import TextQuery
from toolroll.viewer.documents.fields import fields_document
from toolroll.viewer.query.expression import FilterExpression
from toolroll.viewer.query.scan import SamplePosition
from toolroll.viewer.query.search import SampleSearch


def dump(folder: Path, step: int, outputs: list[str]) -> None:
    lines = [json.dumps({"input": "q", "output": text, "score": 1, "step": step, "note": "end"}) for text in outputs]
    (folder / f"{step}.jsonl").write_text("\n".join(lines) + "\n")


def completed(search: SampleSearch) -> SampleSearch:
    while not search.advance(0.02):
        pass
    return search


def test_matches_are_counted_from_first_step_and_wrap(tmp_path: Path) -> None:
    dump(tmp_path, 1, ["needle", "hay", "Needle needle"])
    dump(tmp_path, 2, ["hay", "a needle"])
    directory = DumpDirectory(tmp_path)
    one, two = directory.steps
    search = completed(SampleSearch(directory.steps, 1, TextQuery("needle"), conversation))
    assert (search.match_count, len(search), search.examined) == (4, 3, 5)
    assert [search[number] for number in range(3)] == [
        SamplePosition(two, 1),
        SamplePosition(one, 0),
        SamplePosition(one, 2),
    ]
    assert [search.sample_of_match(match) for match in range(4)] == [0, 1, 2, 2]
    assert (search.matches_before(0), search.matches_before(2)) == (0, 2)
    assert search.find(SamplePosition(one, 2)) == 2
    assert search.find(SamplePosition(one, 1)) is None


def test_every_field_is_searched(tmp_path: Path) -> None:
    dump(tmp_path, 1, ["x"])
    for render in (conversation, fields_document):
        assert completed(SampleSearch(DumpDirectory(tmp_path).steps, 0, TextQuery("end"), render)).match_count == 1


def test_filter_restricts_matches(tmp_path: Path) -> None:
    dump(tmp_path, 1, ["needle a", "needle b"])
    search = completed(
        SampleSearch(
            DumpDirectory(tmp_path).steps, 0, TextQuery("needle"), conversation, FilterExpression("'b' in output")
        )
    )
    assert (len(search), search[0].row) == (1, 1)


def test_appended_lines_are_searched_and_bad_ones_skipped(tmp_path: Path) -> None:
    dump(tmp_path, 1, ["needle"])
    directory = DumpDirectory(tmp_path)
    search = completed(SampleSearch(directory.steps, 0, TextQuery("needle"), conversation))
    with (tmp_path / "1.jsonl").open("a") as file:
        file.write('{"output": "needle\n' + json.dumps({"input": "", "output": "needle needle"}) + "\n")
    directory.refresh()
    assert completed(search).match_count == 3
    assert not search.is_stale
