"""Columns of the sample list."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from toolroll.records.summary import SampleSummary
from toolroll.viewer.widgets import lists

SUMMARY = SampleSummary(
    step=3,
    score=2e-05,
    turns=2,
    calls=4,
    policy_faults=2,
    infra_faults=1,
    failed_programs=1,
    finish_reason="max_turns",
    outcome="infra",
    fidelity="exact",
    group="a group with a long name",
    sample=0,
    request_id="x",
    tokens=None,
    seconds=1.5,
)


def shown(summary: SampleSummary, width: int, *, with_step: bool = False) -> dict[str, str]:
    columns = lists.columns_for(width, with_step=with_step)
    cells = [text for text, _ in lists.cells(summary, 7, columns)][1::2]
    return {column.title: text.strip() for column, text in zip(columns, cells, strict=True)}


def test_cells_of_a_sample() -> None:
    assert shown(SUMMARY, 200, with_step=True) == {
        "#": "7",
        "step": "3",
        "score": "2e-05",
        "turns": "2",
        "calls": "4",
        "faults": "2+1i",
        "failed": "1",
        "tokens": "–",
        "time": "1.5 s",
        "finish": "max_turns",
        "group": "a group wit…",
        "index": "0",
    }
    assert shown(replace(SUMMARY, policy_faults=0, infra_faults=0), 200)["faults"] == "·"


def test_narrow_list_keeps_important_columns() -> None:
    assert list(shown(SUMMARY, 58)) == ["#", "score", "turns", "calls", "faults", "tokens", "finish"]
    assert list(shown(SUMMARY, 30)) == ["#", "score", "calls", "faults"]


@given(st.integers(10, 120), st.sampled_from(lists.LIST_COLUMNS), st.booleans())
def test_header_and_cells_have_same_width(width: int, by: lists.ListColumn, descending: bool) -> None:
    columns = lists.columns_for(width, with_step=True)
    header = "".join(text for text, _ in lists.header(columns, by.name, descending))
    line = "".join(text for text, _ in lists.cells(SUMMARY, 1_000_000, columns))
    assert cell_len(header) == cell_len(line) <= width
    assert by not in columns or ("↓" if descending else "↑") in header
