"""The palette: what the names of styles look like in a theme."""

from __future__ import annotations

from collections.abc import Mapping

from rich.style import Style
from textual.color import Color
from textual.theme import Theme

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


class Palette(dict[str, Style]):
    """From a style's name to the style. A name that it doesn't know has none."""

    def __missing__(self, name: str) -> Style:
        return Style.null()


def palette(variables: Mapping[str, str]) -> Palette:
    """The palette of a theme, from textual's variables for it."""
    is_ansi = Color.parse(variables["background"]).ansi is not None

    def color(name: str, blend: float = 0.0) -> str:
        """A colour of the theme, a part of the way to the background."""
        made = Color.parse(variables[name])
        if made.ansi is not None or is_ansi:  # the terminal's own colours can't be mixed
            return made.rich_color.name
        return made.blend(Color.parse(variables["background"]), blend).rich_color.name

    def style(name: str, blend: float = 0.0, *, on: str | None = None, fade: float = 0.0, **more: bool) -> Style:
        if is_ansi and on is not None:
            return Style(color=color(on if on != "panel" else name), reverse=on != "panel", bold=True)
        return Style(color=color(name, blend), bgcolor=color(on, fade) if on else None, **more)  # type: ignore[arg-type]

    return Palette(
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
            # Blocks of a document, by kind
            "system": style("foreground", 0.45, bold=True),
            "user": style("secondary", bold=True),
            "assistant": style("success", bold=True),
            "thinking": style("foreground", 0.45, italic=True),
            "call": style("primary", bold=True),
            "answer": style("secondary", bold=True),
            "fault": style("error", bold=True),
            "field": style("primary", 0.2),
            "note": style("foreground", 0.35, italic=True),
            "text.system": style("foreground", 0.35),
            "text.thinking": style("foreground", 0.4, italic=True),
            "rule": style("foreground", 0.75),
            # Programs
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
        }
    )
