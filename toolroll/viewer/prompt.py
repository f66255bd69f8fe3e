"""Prompt: the line at the foot in which one types what to find, what to filter by, or a request id.

What is wrong with what is typed stands below it while one types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, Static

from toolroll.viewer.harmless import harmless


class Remark(NamedTuple):
    """What is said of what is typed."""

    text: str
    column: int | None = None
    """Where it is wrong, from 0; None where it isn't."""


Check = Callable[[str], Remark]
"""From what is typed to a remark on it."""


class Prompt(Vertical):
    """The line and what is said of it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", show=False, priority=True)]
    DEFAULT_CSS = """
    Prompt { height: auto; background: $surface; display: none; }
    Prompt.-open { display: block; }
    Prompt Horizontal { height: 1; }
    Prompt #prompt-label { width: auto; color: $primary; text-style: bold; padding: 0 1; }
    Prompt Input { border: none; height: 1; width: 1fr; padding: 0; background: $surface; }
    Prompt Input:focus { border: none; }
    Prompt #prompt-remark { height: 1; padding: 0 1; color: $text-muted; }
    Prompt #prompt-remark.-error { color: $error; }
    """

    class Given(Message):
        """Something was typed and entered."""

        def __init__(self, kind: str, text: str) -> None:
            super().__init__()
            self.kind = kind
            self.text = text

    class Closed(Message):
        """It was closed without anything."""

        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind

    def __init__(self) -> None:
        super().__init__(id="prompt")
        self.kind = ""
        self._check: Check = lambda _: Remark("")

    def compose(self) -> ComposeResult:
        """The label, the line, the remark."""
        with Horizontal():
            yield Static("", id="prompt-label", markup=False)
            yield Input(id="prompt-input", select_on_focus=True)
        yield Static("", id="prompt-remark", markup=False)

    def open(self, kind: str, check: Check, value: str = "") -> None:
        """Ask for something."""
        self.kind, self._check = kind, check
        self.add_class("-open")
        self.query_one("#prompt-label", Static).update(Content(kind))
        line = self.query_one(Input)
        line.value = value
        self._remark(value)
        line.focus()

    def shut(self) -> None:
        """Don't show it any more."""
        self.remove_class("-open")

    @property
    def is_open(self) -> bool:
        """Whether it is shown."""
        return self.has_class("-open")

    def action_close(self) -> None:
        """Give up."""
        self.shut()
        self.post_message(self.Closed(self.kind))

    @on(Input.Changed)
    def _changed(self, event: Input.Changed) -> None:
        event.stop()
        if (shown := harmless(event.value)) != event.value:  # what was pasted may hold anything
            event.input.value = shown
        else:
            self._remark(event.value)

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if self._check(event.value).column is None:
            self.shut()
            self.post_message(self.Given(self.kind, event.value))

    def _remark(self, text: str) -> None:
        said = self._check(text)
        line = self.query_one("#prompt-remark", Static)
        line.update(Content(self._pointed(said)))
        line.set_class(said.column is not None, "-error")

    def _pointed(self, said: Remark) -> str:
        """The remark, below the place that it is about where there is room."""
        if said.column is None:
            return said.text
        column = len(self.kind) + 1 + said.column
        if column + 2 + len(said.text) < self.size.width - 2:
            return f"{' ' * column}^ {said.text}"
        return f"at {said.column + 1}: {said.text}"
