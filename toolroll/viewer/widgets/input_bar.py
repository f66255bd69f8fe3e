"""Input line for a search text, a filter or a request ID, with a hint or an error message below it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Input, Static

from toolroll._internal.sanitize import sanitize


class InputRemark(NamedTuple):
    """Hint or error message about the input."""

    text: str
    error_column: int | None = None
    """Position of the error, from 0; None if the input is valid."""


class InputBar(Vertical):
    """Input line that is shown on demand. It accepts only valid input."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", show=False, priority=True)]
    DEFAULT_CSS = """
    InputBar { height: auto; background: $surface; display: none; }
    InputBar.-open { display: block; }
    InputBar Horizontal { height: 1; }
    InputBar #input-label { width: auto; color: $primary; text-style: bold; padding: 0 1; }
    InputBar Input, InputBar Input:focus { border: none; height: 1; width: 1fr; padding: 0; background: $surface; }
    InputBar #input-remark { height: 1; padding: 0 1; color: $text-muted; }
    InputBar #input-remark.-error { color: $error; }
    """

    _label: str
    _check: Callable[[str], InputRemark]
    _callback: Callable[[str | None], None]

    def compose(self) -> ComposeResult:
        """Compose the label, the input and the remark."""
        with Horizontal():
            yield Static("", id="input-label", markup=False)
            yield Input(select_on_focus=True)
        yield Static("", id="input-remark", markup=False)

    def open(
        self, label: str, check: Callable[[str], InputRemark], callback: Callable[[str | None], None], value: str = ""
    ) -> None:
        """Show and focus the bar.

        Args:
            label: Text to the left of the input.
            check: Validates the input while it is typed.
            callback: Called with valid input when it is submitted, or with None if the user cancels.
            value: Initial input.
        """
        self._label, self._check, self._callback = label, check, callback
        self.add_class("-open")
        self.query_one("#input-label", Static).update(Content(label))
        line = self.query_one(Input)
        line.value = value
        self._show_remark(value)
        line.focus()

    def action_cancel(self) -> None:
        """Close the bar without submitting."""
        self._close(None)

    def _close(self, text: str | None) -> None:
        self.remove_class("-open")
        self._callback(text)

    @on(Input.Changed)
    def _changed(self, event: Input.Changed) -> None:
        event.stop()
        if (clean := sanitize(event.value)) != event.value:  # pasted text can contain anything
            event.input.value = clean
        else:
            self._show_remark(event.value)

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if self._check(event.value).error_column is None:
            self._close(event.value)

    def _show_remark(self, value: str) -> None:
        remark = self._check(value)
        line = self.query_one("#input-remark", Static)
        line.update(Content(self._remark_text(remark)))
        line.set_class(remark.error_column is not None, "-error")

    def _remark_text(self, remark: InputRemark) -> str:
        """Return the remark, placed below the error if there is room."""
        if remark.error_column is None:
            return remark.text
        column = len(self._label) + 1 + remark.error_column
        if column + 2 + len(remark.text) < self.size.width - 2:
            return f"{' ' * column}^ {remark.text}"
        return f"column {remark.error_column + 1}: {remark.text}"
