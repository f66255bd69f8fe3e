"""A document as lines: every character once, and where it is said to be."""

from hypothesis import given
from hypothesis import strategies as st

from toolroll.viewer.document import Block, Document, Kind
from toolroll.viewer.layout import BEGINNING, BESIDE_FROM, Layout, Part

TEXTS = st.text(st.sampled_from("ab 漢\n"), max_size=60)
BLOCKS = st.lists(
    st.builds(Block, st.sampled_from(Kind), st.just("title"), TEXTS, TEXTS.map(lambda text: text.replace("\n", " "))),
    max_size=5,
)


@given(BLOCKS, st.integers(20, 120), st.booleans())
def test_every_character_is_on_the_line_that_is_said(blocks: list[Block], width: int, as_table: bool) -> None:
    document = Document(blocks)
    layout = Layout(document, width, as_table=as_table)
    for number, block in enumerate(blocks):
        for offset in range(len(block.text)):
            line = layout.line_of(number, offset)
            assert line is not None
            cells = [cell for cell in layout.lines[line][:2] if cell is not None and cell.block == number]
            body = next(cell for cell in cells if cell.part is Part.BODY)
            assert body.start <= offset
            assert offset < body.end or block.text[offset] in " \n"


def test_an_answer_is_beside_its_call_where_there_is_room() -> None:
    document = Document(
        [Block(Kind.CALL, "calls f", "one\ntwo\nthree"), Block(Kind.ANSWER, "answers", "1", beside=True)]
    )
    wide, narrow = Layout(document, BESIDE_FROM), Layout(document, BESIDE_FROM - 1)
    assert len(wide.lines) == 4
    assert all(line.paired for line in wide.lines)
    assert len(narrow.lines) == 4 + 1 + 2
    assert not any(line.paired for line in narrow.lines)


def test_folds() -> None:
    document = Document([Block(Kind.THINKING, "thinking", "a\nb", folded=True), Block(Kind.ANSWER, "x", "y\n" * 500)])
    folded = Layout(document, 80)
    assert folded.foldable == {0, 1}
    assert folded.line_of(0, 0) is None
    assert folded.line_of(1, 900) is None
    assert folded.line_of(1, 0) is not None
    assert len(folded.lines) == 1 + 1 + 1 + BEGINNING + 1
    assert folded.lines[-1].left is not None
    assert (folded.lines[-1].left.start, folded.lines[-1].left.end) == (2 * BEGINNING - 1, 1000)
    opened = Layout(document, 80, turned={0, 1})
    assert opened.line_of(0, 0) == 1
    assert opened.line_of(1, 900) is not None


def test_a_detail_that_has_no_room_beside_the_title_is_below_it() -> None:
    document = Document([Block(Kind.ANSWER, "answers", "72", "1.2 s · waited 1 ms · ran 1.1 s · reward 0.5")])
    assert [line.left.part for line in Layout(document, 80).lines if line.left] == [Part.TITLE, Part.BODY]
    assert [line.left.part for line in Layout(document, 30).lines if line.left] == [
        Part.TITLE,
        Part.DETAIL,
        Part.DETAIL,
        Part.BODY,
    ]


def test_a_huge_text_is_not_wrapped_before_it_is_wanted() -> None:
    document = Document([Block(Kind.ANSWER, "x", "word " * 100_000)])
    folded, opened = Layout(document, 80), Layout(document, 80, turned={0})
    assert len(folded.lines) == 1 + BEGINNING + 1
    assert folded.line_of(0, 499_000) is None
    assert opened.line_of(0, 499_000) is not None
    assert opened.lines[1 : BEGINNING + 1] == folded.lines[1 : BEGINNING + 1]
