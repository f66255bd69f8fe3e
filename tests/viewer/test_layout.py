"""Layout of documents: every character on exactly one line, folds, columns."""

from hypothesis import given
from hypothesis import strategies as st

from toolroll.viewer.documents.document import Block, BlockKind, Document
from toolroll.viewer.documents.layout import MIN_WIDTH_BESIDE, PREVIEW_ROWS, Layout, LinePart

TEXTS = st.text(st.sampled_from("ab 漢\n"), max_size=60)
BLOCKS = st.lists(
    st.builds(
        Block, st.sampled_from(BlockKind), st.just("title"), TEXTS, TEXTS.map(lambda text: text.replace("\n", " "))
    ),
    max_size=5,
)


@given(BLOCKS, st.integers(20, 120), st.booleans())
def test_line_of_finds_every_character(blocks: list[Block], width: int, as_table: bool) -> None:
    document = Document(blocks)
    layout = Layout(document, width, as_table=as_table)
    for number, block in enumerate(blocks):
        for offset in range(len(block.text)):
            line = layout.line_of(number, offset)
            assert line is not None
            cells = [cell for cell in layout.lines[line][:2] if cell is not None and cell.block == number]
            body = next(cell for cell in cells if cell.part is LinePart.BODY)
            assert body.start <= offset
            assert offset < body.end or block.text[offset] in " \n"


def test_result_is_beside_call_on_wide_screen() -> None:
    document = Document(
        [Block(BlockKind.CALL, "call f", "one\ntwo\nthree"), Block(BlockKind.RESULT, "result", "1", beside=True)]
    )
    wide, narrow = Layout(document, MIN_WIDTH_BESIDE), Layout(document, MIN_WIDTH_BESIDE - 1)
    assert len(wide.lines) == 4
    assert all(line.paired for line in wide.lines)
    assert len(narrow.lines) == 4 + 1 + 2
    assert not any(line.paired for line in narrow.lines)


def test_folded_and_long_blocks_hide_text() -> None:
    document = Document(
        [Block(BlockKind.THINKING, "thinking", "a\nb", folded=True), Block(BlockKind.RESULT, "x", "y\n" * 500)]
    )
    folded = Layout(document, 80)
    assert folded.foldable == {0, 1}
    assert folded.line_of(0, 0) is None
    assert folded.line_of(1, 900) is None
    assert folded.line_of(1, 0) is not None
    assert len(folded.lines) == 1 + 1 + 1 + PREVIEW_ROWS + 1
    assert folded.lines[-1].left is not None
    assert (folded.lines[-1].left.start, folded.lines[-1].left.end) == (2 * PREVIEW_ROWS - 1, 1000)
    opened = Layout(document, 80, toggled={0, 1})
    assert opened.line_of(0, 0) == 1
    assert opened.line_of(1, 900) is not None


def test_long_detail_is_below_title() -> None:
    document = Document([Block(BlockKind.RESULT, "result", "72", "1.2 s · queued 1 ms · ran 1.1 s · reward 0.5")])
    assert [line.left.part for line in Layout(document, 80).lines if line.left] == [LinePart.TITLE, LinePart.BODY]
    assert [line.left.part for line in Layout(document, 30).lines if line.left] == [
        LinePart.TITLE,
        LinePart.DETAIL,
        LinePart.DETAIL,
        LinePart.BODY,
    ]


def test_huge_text_is_wrapped_only_when_opened() -> None:
    document = Document([Block(BlockKind.RESULT, "x", "word " * 100_000)])
    folded, opened = Layout(document, 80), Layout(document, 80, toggled={0})
    assert len(folded.lines) == 1 + PREVIEW_ROWS + 1
    assert folded.line_of(0, 499_000) is None
    assert opened.line_of(0, 499_000) is not None
    assert opened.lines[1 : PREVIEW_ROWS + 1] == folded.lines[1 : PREVIEW_ROWS + 1]
