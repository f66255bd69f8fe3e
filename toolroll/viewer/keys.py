"""Key bindings of the browse screen, and the footer that shows keys.

The footer, the help screen and the bindings are all derived from one table. The keys of verl's rollout viewer (f, n, p,
N, P, j, k, g, G, s, tab, ←, →, enter, esc) keep their meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from textual.binding import Binding
from textual.geometry import Size
from textual.strip import Strip
from textual.widget import Widget

from toolroll.viewer.palette import Piece, draw


class KeyAction(NamedTuple):
    """A key, or several keys with related actions."""

    shown: str
    """The keys as displayed."""
    label: str
    """One word for the footer."""
    actions: Mapping[str, str]
    """Actions by Textual key name. A click on the footer runs the first one."""
    help: str = ""
    """One sentence for the help screen."""


HELP_KEY = KeyAction("?", "help", {"question_mark": "app.help"}, "Show this help.")
QUIT_KEY = KeyAction("q", "quit", {"q": "app.quit"}, "Quit.")

KEY_GROUPS: Mapping[str, tuple[KeyAction, ...]] = {
    "Navigate": (
        KeyAction("n p", "sample", {"n": "move_sample(1)", "p": "move_sample(-1)"}, "Next or previous sample."),
        KeyAction("N P", "step", {"N": "move_step(1)", "P": "move_step(-1)"}, "Next or previous step."),
        KeyAction(
            "j k", "page", {"j": "scroll('page_down')", "k": "scroll('page_up')"}, "Scroll the sample by a page."
        ),
        KeyAction("g G", "ends", {"g": "scroll('home')", "G": "scroll('end')"}, "Start or end of the sample."),
        KeyAction(
            "tab ← →",
            "pane",
            {"tab": "move_pane(1)", "right": "move_pane(1)", "shift+tab": "move_pane(-1)", "left": "move_pane(-1)"},
            "Switch between steps, samples and the sample. ↑ ↓ PgUp PgDn Home End move within a pane.",
        ),
        KeyAction("enter", "open", {"enter": "open"}, "Open the sample; in a sample, go to the next match."),
        KeyAction("esc", "back", {"escape": "back"}, "Close the input line, the search, the view or the sample."),
    ),
    "Search and filter": (
        KeyAction("f", "find", {"f": "find"}, "Find text in all samples of all steps."),
        KeyAction(". ,", "match", {"full_stop": "move_match(1)", "comma": "move_match(-1)"}, "Next or previous match."),
        KeyAction("/", "filter", {"slash": "filter"}, "List only samples that match an expression, e.g. score < 1."),
        KeyAction("o O", "sort", {"o": "sort", "O": "reverse_order"}, "Sort by the next column; reverse the order."),
        KeyAction("a", "all", {"a": "all_steps"}, "List the samples of all steps, or of one."),
        KeyAction("i", "id", {"i": "request_id"}, "Go to the sample with a given request ID."),
    ),
    "View": (
        KeyAction("s", "view", {"s": "cycle_display"}, "Show the sample as a conversation, plain text or a table."),
        KeyAction("d", "fields", {"d": "fields"}, "Choose the fields shown as plain text and table."),
        KeyAction("z", "fold", {"z": "fold"}, "Unfold or fold thinking and long texts. Click a title to toggle one."),
        KeyAction("t", "tokens", {"t": "tokens"}, "Show tokens by mask and log-probability: as text, or one per line."),
        KeyAction("r", "reward", {"r": "rewards"}, "Show rewards and timings."),
        KeyAction("c", "compare", {"c": "compare"}, "Compare with another sample of the same group, side by side."),
        KeyAction("l", "plot", {"l": "plots"}, "Plot scores, turns, calls, faults, tokens and finish reasons by step."),
    ),
    "Other": (
        KeyAction("F", "follow", {"F": "follow"}, "Follow a run in progress: always show the newest sample."),
        KeyAction("y", "copy", {"y": "copy"}, "Copy the sample to the clipboard as Markdown."),
        KeyAction("e", "save", {"e": "export"}, "Save the sample as a Markdown file in the current directory."),
        HELP_KEY,
        QUIT_KEY,
    ),
}
BROWSE_KEYS = tuple(key for keys in KEY_GROUPS.values() for key in keys)


def bindings(keys: Iterable[KeyAction]) -> list[Binding]:
    """Return Textual bindings for keys, hidden from Textual's own footer."""
    return [Binding(name, action, key.label, show=False) for key in keys for name, action in key.actions.items()]


KEY_GAP_CELLS = 2


def key_lines(keys: Sequence[KeyAction], width: int) -> list[list[KeyAction]]:
    """Distribute keys over lines of a width."""
    lines: list[list[KeyAction]] = []
    free = 0
    for key in keys:
        needed = cell_len(key.shown) + 1 + cell_len(key.label)
        if not lines or needed > free:
            lines.append([])
            free = width - 1
        lines[-1].append(key)
        free -= needed + KEY_GAP_CELLS
    return lines


class KeyBar(Widget):
    """Footer of as many lines as the keys need."""

    DEFAULT_CSS = "KeyBar { height: auto; background: $panel; }"

    def __init__(self, keys: Sequence[KeyAction]) -> None:
        super().__init__()
        self._keys = keys

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Return the number of lines that the keys need."""
        return len(key_lines(self._keys, width))

    def render_line(self, y: int) -> Strip:
        """Return one line of keys."""
        lines = key_lines(self._keys, self.size.width)
        pieces: list[Piece] = [(" ", "")]
        for key in lines[y] if y < len(lines) else ():
            action = next(iter(key.actions.values()))
            action = action if action.startswith("app.") else f"screen.{action}"
            pieces += [(key.shown, "key", action), (f" {key.label}", "dim", action), (" " * KEY_GAP_CELLS, "")]
        return draw(self, pieces)
