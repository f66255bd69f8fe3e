"""The Textual application behind `toolroll view`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

from textual.app import App
from textual.constants import DEFAULT_THEME
from textual.screen import Screen

from toolroll.errors import ConfigError
from toolroll.records.index import DumpDirectory
from toolroll.viewer.documents.token_flow import TokenText
from toolroll.viewer.formatting import DEFAULT_MASK
from toolroll.viewer.palette import THEME
from toolroll.viewer.screens.browse import BrowseScreen
from toolroll.viewer.screens.dialogs import HelpScreen
from toolroll.viewer.widgets.sample_pane import SamplePane


class RolloutViewer(App[None]):
    """Terminal application that displays a directory of rollout dumps.

    Args:
        directory: A `rollout_data_dir`, or one of its files.
        tokenizer: Path or name of the model's tokenizer, to show the text of tokens instead of their IDs.
        mask_str: Regular expression. Text that matches it is displayed as `*`.
        follow: Start with the newest sample and follow the run.
        refresh_interval_s: Interval between two checks of the directory for changes, in seconds.

    Raises:
        ConfigError: If the directory does not exist or `mask_str` is not a valid regular expression.
    """

    TITLE = "toolroll"
    ENABLE_COMMAND_PALETTE: ClassVar[bool] = False

    def __init__(
        self,
        directory: str | Path,
        *,
        tokenizer: str | None = None,
        mask_str: str = DEFAULT_MASK,
        follow: bool = False,
        refresh_interval_s: float = 1.0,
    ) -> None:
        super().__init__()
        try:
            mask = re.compile(mask_str) if mask_str else None
        except re.error as error:
            raise ConfigError(f"Invalid regular expression for the mask: {mask_str!r}: {error}.") from error
        pane = SamplePane(TokenText(tokenizer) if tokenizer else None, mask)
        self._browse = BrowseScreen(DumpDirectory(directory), pane, follow, refresh_interval_s)
        self.register_theme(THEME)
        if DEFAULT_THEME == "textual-dark":  # not overridden by TEXTUAL_THEME
            self.theme = THEME.name

    def get_default_screen(self) -> Screen[None]:
        """Return the browse screen."""
        return self._browse

    def action_help(self) -> None:
        """Show the help screen."""
        self.push_screen(HelpScreen())
