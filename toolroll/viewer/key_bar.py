"""KeyBar: every key, at the foot of the screen, on as many lines as that takes. A click does what the key does."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Size
from textual.strip import Strip
from textual.widget import Widget

from toolroll.viewer.keys import Key
from toolroll.viewer.palette import palette

GAP = 2


def key_lines(keys: Sequence[Key], width: int) -> list[list[Key]]:
    """The keys on lines of a width, in their order."""
    lines: list[list[Key]] = []
    left = 0
    for key in keys:
        needed = cell_len(key.shown) + 1 + cell_len(key.label) + GAP
        if not lines or needed - GAP > left:
            lines.append([])
            left = width - 1
        lines[-1].append(key)
        left -= needed
    return lines


class KeyBar(Widget):
    """The footer."""

    DEFAULT_CSS = "KeyBar { height: auto; background: $panel; }"

    def __init__(self, keys: Sequence[Key]) -> None:
        super().__init__()
        self._keys = keys

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """As many lines as the keys take."""
        return len(key_lines(self._keys, width))

    def render_line(self, y: int) -> Strip:
        """One line of keys."""
        styles, base = palette(self.app.theme_variables), self.rich_style
        lines = key_lines(self._keys, self.size.width)
        segments = [Segment(" ")]
        for key in lines[y] if y < len(lines) else ():
            action = key.actions[0][1]
            click = Style.from_meta({"@click": action if "." in action else f"screen.{action}"})
            segments += [
                Segment(key.shown, styles["key"] + click),
                Segment(f" {key.label}", styles["dim"] + click),
                Segment(" " * GAP),
            ]
        return Strip(segments).crop(0, self.size.width).adjust_cell_length(self.size.width, base).apply_style(base)
