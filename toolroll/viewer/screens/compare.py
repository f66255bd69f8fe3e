"""Screen that compares two samples of one group side by side."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from operator import attrgetter
from typing import ClassVar

from rich.console import Group
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import Static

from toolroll._internal.sanitize import one_line
from toolroll.records.index import StepFile
from toolroll.records.json_line import BadLine
from toolroll.records.summary import SampleSummary
from toolroll.viewer import formatting
from toolroll.viewer.documents.conversation import conversation
from toolroll.viewer.documents.document import Block, BlockKind, Document
from toolroll.viewer.keys import HELP_KEY, QUIT_KEY, KeyAction, KeyBar, bindings
from toolroll.viewer.palette import palette
from toolroll.viewer.query.scan import SamplePosition
from toolroll.viewer.widgets.document_view import DocumentView

LEFT, RIGHT = 0, 1
COMPARE_KEYS = (
    KeyAction("n p", "right sample", {"n": f"move({RIGHT}, 1)", "p": f"move({RIGHT}, -1)"}),
    KeyAction("N P", "left sample", {"N": f"move({LEFT}, 1)", "P": f"move({LEFT}, -1)"}),
    KeyAction("j k", "page", {"j": "scroll('page_down')", "k": "scroll('page_up')"}),
    KeyAction("g G", "ends", {"g": "scroll('home')", "G": "scroll('end')"}),
    KeyAction("tab ← →", "side", {"tab,right,left,shift+tab": "switch_focus"}),
    KeyAction("z", "fold", {"z": "fold"}),
    HELP_KEY,
    KeyAction("esc c", "back", {"escape,c": "dismiss(None)"}),
    QUIT_KEY,
)


class CompareScreen(Screen[None]):
    """Two conversations side by side, with their common start folded.

    Args:
        rows: Rows of the group in its step, at least two.
        position: Sample to show on the left.
    """

    BINDINGS: ClassVar[list[BindingType]] = [*bindings(COMPARE_KEYS)]
    DEFAULT_CSS = """
    CompareScreen #facts { height: 4; background: $panel; padding: 0 1; }
    CompareScreen #left { border-right: solid $panel; }
    """

    def __init__(self, rows: list[int], position: SamplePosition) -> None:
        super().__init__()
        self._rows, self._step = rows, position.step
        left = rows.index(position.row)
        self._shown = [left, (left + 1) % len(rows)]
        """Indices into `rows` of the samples on the left and on the right."""
        self._facts = Static(id="facts")
        self._views = DocumentView(id="left"), DocumentView(id="right")

    def compose(self) -> ComposeResult:
        """Compose the values, both conversations and the footer."""
        yield self._facts
        with Horizontal():
            yield from self._views
        yield KeyBar(COMPARE_KEYS)

    def on_mount(self) -> None:
        """Show the samples."""
        self._views[LEFT].focus()
        self._show()

    def _show(self) -> None:
        try:
            left, right = (self._step.record(self._rows[index]) for index in self._shown)
        except (BadLine, IndexError) as error:
            self.notify(f"The sample can no longer be read: {error}", severity="error", markup=False)
            self.dismiss(None)
            return
        documents = fold_common_start(conversation(left), conversation(right))
        for view, document in zip(self._views, documents, strict=True):
            view.show(document)
        self._facts.update(self._fact_table(left.summary(), right.summary()))

    def _fact_table(self, left: SampleSummary, right: SampleSummary) -> Group:
        """Return the title and the main values of both samples, with differences highlighted."""
        styles = palette(self.app.theme_variables)
        group, step = one_line(left.group or "", 40), one_line(self._step.name, 20)
        title = Text(f"group {group} in step {step}: {len(self._rows)} samples", styles["key"])
        facts = _summary_values(left), _summary_values(right)
        table = Table.grid(padding=(0, 2))
        table.add_column(style=styles["dim"])
        for _ in facts[LEFT]:
            table.add_column(justify="right", no_wrap=True)
        table.add_row("", *(Text(name, styles["dim"]) for name in facts[LEFT]))
        for index, values, others in zip(self._shown, facts, reversed(facts), strict=True):
            cells = (Text(value, styles["" if value == others[name] else "warn"]) for name, value in values.items())
            table.add_row(f"sample {self._rows[index] + 1}", *cells)
        return Group(title, table)

    def action_move(self, side: int, by: int) -> None:
        """Show another sample on one side, skipping the one on the other side. Two samples are swapped."""
        count, other = len(self._rows), self._shown[1 - side]
        if count == 2:
            self._shown.reverse()
        else:
            moved = (self._shown[side] + by) % count
            self._shown[side] = (moved + by) % count if moved == other else moved
        self._show()

    def action_scroll(self, to: str) -> None:
        """Scroll both sides: `page_down`, `page_up`, `home` or `end`."""
        for view in self._views:
            getattr(view, f"scroll_{to}")(animate=False)

    def action_switch_focus(self) -> None:
        """Focus the other side."""
        self._views[self._views[LEFT].has_focus].focus()

    def action_fold(self) -> None:
        """Unfold or fold both sides."""
        for view in self._views:
            view.fold_all()


def group_rows(step: StepFile, row: int) -> list[int]:
    """Return the rows of a step that belong to the same group as `row`, in the order of the file."""
    groups = step.column("group")
    group = groups[row]
    return [row] if group is None else [other for other in range(len(step)) if groups[other] == group]


def fold_common_start(left: Document, right: Document) -> tuple[Document, Document]:
    """Replace the blocks at the start that two documents have in common by one folded block."""
    shown = attrgetter("kind", "title", "text")
    pairs = zip(map(shown, left.blocks), map(shown, right.blocks), strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[LEFT] == pair[RIGHT], pairs))
    return _fold_start(left, common), _fold_start(right, common)


def _fold_start(document: Document, count: int) -> Document:
    if not count:
        return document
    text = "\n\n".join(f"{block.title}\n{block.text}".strip() for block in document.blocks[:count])
    title = formatting.plural(count, "identical block")
    rest = [replace(block, beside=block.beside and number > 0) for number, block in enumerate(document.blocks[count:])]
    return Document([Block(BlockKind.NOTE, title, text, folded=True), *rest])


def _summary_values(summary: SampleSummary) -> dict[str, str]:
    infra = f" + {summary.infra_faults} infra" if summary.infra_faults else ""
    return {
        "score": formatting.score(summary.score),
        "turns": formatting.count(summary.turns),
        "calls": formatting.count(summary.calls),
        "faults": f"{summary.policy_faults or 0}{infra}",
        "tokens": formatting.count(summary.tokens),
        "time": formatting.seconds(summary.seconds),
        "finish": one_line(summary.finish_reason or formatting.UNKNOWN, 20),
    }
