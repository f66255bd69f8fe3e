"""Named styles of the viewer, derived from the colours of a Textual theme."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.strip import Strip
from textual.theme import Theme
from textual.widget import Widget

Piece = tuple[str, str] | tuple[str, str, str]
"""A text, the name of its style and, if it can be clicked, the action."""

THEME = Theme(
    name="toolroll",
    primary="#e0a458",
    secondary="#6fb3b8",
    accent="#e0a458",
    success="#8fc17a",
    warning="#e5c07b",
    error="#e06c75",
    foreground="#d7dae0",
    background="#15171b",
    surface="#1b1e24",
    panel="#262a33",
    dark=True,
)
_THEME_COLORS = ("background", "error", "foreground", "panel", "primary", "secondary", "success", "warning")


Palette = defaultdict[str, Style]
"""Styles by name. An unknown name has the null style."""


def palette(variables: Mapping[str, str]) -> Palette:
    """Return the styles for a theme.

    Args:
        variables: Textual's variables of the theme (`App.theme_variables`).
    """
    return _palette(tuple((name, variables[name]) for name in _THEME_COLORS))


def draw(widget: Widget, pieces: Iterable[Piece], *, width: int | None = None, base: str = "") -> Strip:
    """Return pieces as one line of a widget.

    Args:
        widget: Widget that is being rendered.
        pieces: The line, from left to right. It is cropped or padded to the width.
        width: Width in cells; by default that of the widget.
        base: Name of a style for the whole line, on which the styles of the pieces take precedence.
    """
    styles, width = palette(widget.app.theme_variables), widget.size.width if width is None else width
    segments = [
        Segment(text, styles[name] + Style.from_meta({"@click": action[0]}) if action else styles[name])
        for text, name, *action in pieces
    ]
    return Strip(segments).adjust_cell_length(width).apply_style(styles[base]).apply_style(widget.rich_style)


@lru_cache(maxsize=8)
def _palette(theme_colors: tuple[tuple[str, str], ...]) -> Palette:
    colors = {name: Color.parse(value) for name, value in theme_colors}
    background = colors["background"]
    is_ansi = background.ansi is not None

    def color(name: str, blend: float = 0.0) -> str:
        """Return a colour of the theme, blended with the background. ANSI colours cannot be blended."""
        if is_ansi or colors[name].ansi is not None:
            return colors[name].rich_color.name
        return colors[name].blend(background, blend).rich_color.name

    def style(name: str, blend: float = 0.0, *, on: str | None = None, fade: float = 0.0, **more: bool) -> Style:
        if is_ansi and on is not None:
            return Style(color=color(on if on != "panel" else name), reverse=on != "panel", bold=True)
        return Style(color=color(name, blend), bgcolor=color(on, fade) if on else None, **more)  # type: ignore[arg-type]

    return Palette(
        Style.null,
        {
            "dim": style("foreground", 0.55),
            "good": style("success"),
            "bad": style("error"),
            "warn": style("warning"),
            "zero": style("foreground", 0.35),
            "header": style("foreground", 0.35, on="panel"),
            "header.sorted": style("primary", on="panel", bold=True),
            "cursor": Style(underline=True) if is_ansi else Style(bgcolor=color("primary", 0.8)),
            "cursor.focused": Style(reverse=True) if is_ansi else Style(bgcolor=color("primary", 0.65), bold=True),
            "key": style("primary", bold=True),
            "match": style("background", on="warning"),
            "match.current": style("background", on="error", bold=True),
            # Blocks of a document, by BlockKind
            "system": style("foreground", 0.45, bold=True),
            "user": style("secondary", bold=True),
            "assistant": style("success", bold=True),
            "thinking": style("foreground", 0.45, italic=True),
            "call": style("primary", bold=True),
            "result": style("secondary", bold=True),
            "fault": style("error", bold=True),
            "field": style("primary", 0.2),
            "note": style("foreground", 0.35, italic=True),
            "text.system": style("foreground", 0.35),
            "text.thinking": style("foreground", 0.4, italic=True),
            "rule": style("foreground", 0.75),
            # Source code
            "comment": style("foreground", 0.5, italic=True),
            "keyword": style("primary"),
            "string": style("success", 0.1),
            "number": style("secondary"),
            "builtin": style("secondary", 0.15),
            "function": style("foreground", bold=True),
            "operator": style("foreground", 0.25),
            "error": style("error"),
            "fence": style("foreground", 0.6),
            "tag": style("primary", 0.3),
            # Tokens, by mask and probability
            "token.prompt": style("foreground", 0.55),
            "token.tool": style("secondary", 0.25),
            "token.sampled": style("success"),
            "token.p90": style("success"),
            "token.p50": style("foreground", on="success", fade=0.65),
            "token.p10": style("foreground", on="warning", fade=0.6),
            "token.p01": style("background", on="warning", fade=0.1),
            "token.p00": style("background", on="error", bold=True),
        },
    )
